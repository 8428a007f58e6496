"""The command that writes text, as a user runs it."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from popxl_gpt.data import example
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo import generate as command
from popxl_gpt.demo.generate import generate
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun, _sha256
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.checkpoints.manifest import manifest_text, read_manifest
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.utils.errors import NotFiniteError, UserError
from tests import warm
from tests.integration.runs import run_job

pytestmark = pytest.mark.multi
ROOT = Path(__file__).parents[3]
TEXT = "the cat sat on the mat. the dog sat on the log. "
SECONDS = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a finished run on some text."""
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = train_tokenizer([TEXT * 20], 270)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = np.array(tokenizer.encode(TEXT * 40).ids)
    with RecordWriter(folder / "train.tfrecord") as writer:
        starts = np.random.default_rng(0).integers(0, tokens.size - 17, 64)
        for payload in example.encode(np.stack([tokens[start : start + 17] for start in starts])):
            writer.write(payload)
    run_job(
        *"--config tiny --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1".split(),
        *"--vocabulary_size 270 --sequence_length 16 --max_positions 40 --steps 30".split(),
        *"--learning_rate 0.01 --name run --samples 0 --checkpoint.every 15".split(),
        *("--input_files", folder / "train.tfrecord", "--tokenizer", folder / "tokenizer.json"),
        *("--run_folder", folder),
    )
    (folder / "tokenizer.json").unlink()  # what is beside the checkpoints is enough
    return folder / "run"


def words(run: Path, *flags: object) -> "list[str]":
    return [str(word) for word in ("--checkpoint", run, "--tokens", 12, *flags)]


def started(arguments, launcher=(), python=None, **more) -> subprocess.Popen:
    script = [*launcher, python or warm.python(), str(ROOT / "demo/generate.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*script, *arguments], text=True, env=environment, **pipes, **more)


def ended(process: subprocess.Popen, given: str = "") -> "tuple[int, str, str]":
    output, errors = process.communicate(given, timeout=SECONDS)
    return process.returncode, output, errors


def printed(capsys, run, *flags) -> str:
    assert command.main(words(run, *flags)) == 0
    return capsys.readouterr().out


def test_training_leaves_its_tokenizer_beside_the_checkpoints_and_the_command_finds_both(run):
    assert (run / "checkpoints/tokenizer.json").is_file()
    code, output, errors = ended(started(words(run, "--prompt", "the cat", "--seed", 1)))
    assert (code, errors) == (0, "")
    assert output.startswith("the cat") and len(output) > len("the cat\n") + 8


def test_every_sample_of_every_prompt_is_printed_after_its_prompt(run, capsys):
    flags = ("--prompt", "the cat", "the dog sat on\nthe", "--samples", 2, "--seed", 1)
    output = printed(capsys, run, *flags)
    texts = re.split(r"\n?--- \d of 4 ---\n", output)[1:]
    assert [text.startswith("the cat") for text in texts] == [True, True, False, False]
    assert all(text.startswith("the dog sat on\nthe") for text in texts[2:])
    assert printed(capsys, run, *flags) == output
    assert printed(capsys, run, *flags[:-1], 2) != output
    found = generate(
        run, ["the cat", "the dog sat on\nthe"], samples=2, tokens=12, sampling=Sampling(seed=1)
    )
    given = ["the cat"] * 2 + ["the dog sat on\nthe"] * 2
    assert [text.rstrip("\n") for text in texts] == [a + b for a, b in zip(given, found)]


@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor_parallel_1", 2, "--data_parallel", 2),
        ("--tensor_parallel_2", 2, "--precision", "float32"),
        ("--device_memory", "1MiB"),
    ],
)
def test_layouts_write_the_same(run, capsys, layout):
    flags = ("--prompt", "the cat", "the", "--samples", 2)
    assert printed(capsys, run, *flags, *layout) == printed(capsys, run, *flags)


def test_two_processes_write_what_one_does(run, capsys):
    flags = (
        "--prompt",
        "the cat",
        "the dog",
        "the",
        "--tensor_parallel_1",
        2,
        "--data_parallel",
        2,
    )
    launcher = [warm.launcher(), "-m", "poprun", "--num-replicas", "4", "--num-instances", "2"]
    code, output, errors = ended(started(words(run, *flags), launcher))
    assert code == 0, errors
    assert output == printed(capsys, run, *flags)


def test_a_prompt_comes_from_a_file_or_from_standard_input(run, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("the dog\n")
    expected = printed(capsys, run, "--prompt", "the dog")
    assert printed(capsys, run, "--prompt_file", tmp_path / "prompt.txt") == expected
    (tmp_path / "prompt.txt").write_bytes(
        b"\xef\xbb\xbfthe dog\r\n"
    )  # as editors elsewhere write it
    assert printed(capsys, run, "--prompt_file", tmp_path / "prompt.txt") == expected
    code, output, _ = ended(started(words(run, "--prompt_file", "-")), "the dog\n")
    assert (code, output) == (0, expected)


def test_without_a_prompt_a_new_document_is_begun(run, capsys):
    assert printed(capsys, run).strip()


def test_a_special_token_in_a_prompt_is_text_unless_it_is_asked_for(run, capsys):
    end = "<|endoftext|>"
    begun = generate(run, tokens=12)
    assert generate(run, [end], tokens=12, special_tokens=True) == begun
    assert generate(run, [end], tokens=12) != begun
    assert printed(capsys, run, "--prompt", end, "--special_tokens") == f"{end}{begun[0]}\n"


def test_a_stop_ends_a_text(run, capsys):
    whole = printed(capsys, run, "--prompt", "the cat", "--tokens", 30)
    stop = next(
        c for c in whole if c not in "the cat" and c.isprintable()
    )  # CPUs round differently
    assert printed(capsys, run, "--prompt", "the cat", "--tokens", 30, "--stop", stop) == (
        whole[: whole.index(stop)] + "\n"
    )


def test_one_text_is_one_prompt_and_one_stop(run):
    assert generate(run, "the cat", tokens=12, stop=".") == generate(
        run, ["the cat"], tokens=12, stop=["."]
    )


def test_a_chat_answers_each_line_and_remembers_what_was_said(run):
    flags = words(run, "--chat", "--temperature", 0, "--stop", ".")
    code, output, errors = ended(started(flags), "the cat\n\nthe dog\n")
    assert (code, errors) == (0, "")
    assert len(output.split("\n")) >= 3
    first = generate(run, ["the cat\n"], tokens=12, stop=["."], sampling=Sampling(temperature=0))[0]
    said = f"the cat\n{first}\nthe dog\n"
    second = generate(run, [said], tokens=12, stop=["."], sampling=Sampling(temperature=0))[0]
    assert output == f"{first}\n{second}\n"


def test_a_text_ends_at_the_tokens_that_a_checkpoint_names(run, capsys, monkeypatch):
    greedy = {"tokens": 12, "sampling": Sampling(temperature=0)}
    (whole,) = generate(run, "the cat", **greedy)
    tokenizer = find_trained(run).folder.parent / "tokenizer.json"
    texts = Tokenizer.from_file(str(tokenizer))
    last = texts.encode(whole).ids[-1]
    monkeypatch.setattr(SavedRun, "ends", [269, last])
    (short,) = generate(run, "the cat", **greedy)
    assert len(short) < len(whole) and whole.startswith(short)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n")))
    told = printed(capsys, run, "--chat", "--temperature", 0)
    monkeypatch.setattr(SavedRun, "ends", [])
    (answer,) = generate(run, "the cat\n", **greedy)
    assert len(told.rstrip("\n")) < len(answer)


@pytest.mark.parametrize("given", [b"\xff\n", b"a\xe2\x82\n"])
def test_a_line_of_a_chat_that_is_not_utf8_is_refused_in_words(run, monkeypatch, given):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    with pytest.raises(UserError, match="^--chat: got b'.*', which is not UTF-8; expected lines"):
        command.main(words(run, "--chat"))


def test_a_prompt_that_is_no_text_is_refused_in_words(run):
    with pytest.raises(UserError, match="^prompts: got .*, which is not UTF-8; expected"):
        generate(run, ["a\udcff"])


def test_text_is_seen_as_it_is_made_and_ctrl_c_ends_it_cleanly(run):
    process = started(
        [*words(run), "--prompt", "the cat", "--tokens", "1000000"], python=sys.executable
    )
    assert process.stdout is not None
    seen = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    code, _, errors = ended(process)
    assert seen.startswith("the cat")
    assert (code, errors) == (130, "stopped.\n")


BAD = [
    (
        ("--checkpoint", "/nowhere"),
        "--checkpoint: got /nowhere, no folder; expected a run's folder",
    ),
    (("--top_k", "0"), "--top_k: got 0; expected a whole number, at least 1, or none."),
    (("--top_p", "1.5"), "--top_p: got 1.5; expected a number, at least 1e-06 and at most 1."),
    (("--temperature", "-1"), "--temperature: got -1.0; expected a number, at least 0."),
    (("--tokens", "0"), "--tokens: got 0; expected a whole number, at least 1."),
    (("--samples", "x"), "--samples: got 'x'; expected a whole number, at least 1."),
    (("--prompt",), "--prompt: got no value; expected texts."),
    (("--prompt", ""), "--prompt: got ['']; expected a list of texts, none of them empty."),
    (("--prompt", "\udcff"), "which is not UTF-8"),
    (("--prompt_file", "/nowhere"), "--prompt_file: got /nowhere: No such file or directory;"),
    (
        ("--prompt_file", "/dev/null"),
        "--prompt_file: got /dev/null: Not a plain file, but a device;",
    ),
    (("--chat", "--prompt", "a"), "--chat: got prompts beside it; expected one or the other"),
    (("--chat", "--samples", "2"), "--samples: got 2 with --chat; expected 1, for a conversation"),
    (("--stop", ""), "--stop: got ['']; expected a list of texts, none of them empty."),
    (("--propmt", "a"), "--propmt: unknown flag. Did you mean '--prompt'?"),
    (("--config", "tiny"), "--config: unknown flag."),
    (("--layers", "3"), "--layers: got a flag that demo/generate.py does not use;"),
    (("--tokenizer", "/nowhere"), "--tokenizer: got /nowhere: No such file or directory;"),
    (("--tensor_parallel_1", "3"), "heads: got 4; expected a multiple of tensor_parallel_1 = 3."),
    (("--host_memory", "1GiB"), "host_memory: got 1073741824 while memmap_dir is none;"),
    (("--device_memory", "1KiB"), "device memory: got 1024 bytes of cpu; expected at least"),
]


@pytest.mark.parametrize("flags, says", BAD, ids=[" ".join(map(ascii, flags)) for flags, _ in BAD])
def test_bad_input_is_told_in_one_line(run, flags, says):
    with pytest.raises(UserError) as told:
        command.main(words(run, *flags))
    assert says in str(told.value) and "\n" not in str(told.value)


def test_a_command_that_fails_prints_one_line_and_no_traceback(run):
    code, output, errors = ended(started(words(run, "--prompt_file", "-")))
    assert (code, output) == (2, "")
    assert errors.startswith("error: --prompt_file -: got an empty prompt; expected some text.")
    assert errors.count("\n") == 1


def test_a_tokenizer_without_tokens_is_refused(run, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(UserError, match="--tokenizer: got .*json without a token; expected"):
        command.main(words(run, "--tokenizer", file))


def test_a_checkpoint_without_a_tokenizer_is_refused(run, tmp_path):
    shutil.copytree(run / "checkpoints/step_00000030", tmp_path / "step_00000030")
    with pytest.raises(UserError, match="--tokenizer: got none, and no .*; expected the"):
        command.main(words(tmp_path / "step_00000030"))
    tokenizer = run / "checkpoints/tokenizer.json"
    assert command.main(words(tmp_path / "step_00000030", "--tokenizer", tokenizer)) == 0


def test_a_damaged_checkpoint_is_passed_over_and_one_that_is_asked_for_is_refused(
    run, tmp_path, capsys, caplog
):
    shutil.copytree(run, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_00000030"
    (newest / "head.safetensors").write_bytes(b"")
    printed(capsys, tmp_path / "run")
    assert "It is passed over for step_00000015." in caplog.text
    with pytest.raises(UserError, match="head.safetensors: got 0 bytes"):
        command.main(words(newest))


def test_weights_that_are_not_finite_end_with_exit_code_1_and_their_place(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step_00000030"
    path = checkpoint / "decoder.1.safetensors"
    tensors = load_file(path)
    tensors["weights.attention.qkv.bias"][3] = np.nan
    save_file(tensors, path)
    manifest = read_manifest(checkpoint / "checkpoint.json")
    manifest.pop("sha256", None)
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (checkpoint / "checkpoint.json").write_text(manifest_text(manifest))
    with pytest.raises(NotFiniteError, match="decoder.1.safetensors, weights.attention.qkv.bias"):
        command.main(words(tmp_path / "run"))
    code, _, errors = ended(started(words(tmp_path / "run")))
    assert code == 1 and errors.startswith("not finite: ") and errors.count("\n") == 1


def test_help_has_groups_and_no_setting_that_is_not_used(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert "--top_k TOP_K" in text and "\nexecution: " in text and "max_positions" in text
    assert "--learning_rate" not in text and "\ncheckpoint: " not in text
    assert "--log_level" in text and "--wandb" not in text


TEMPLATE = """{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def test_a_chat_template_writes_what_a_model_is_asked_and_every_listed_end_ends_it(
    run, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "checkpoints/chat_template.jinja").write_text(TEMPLATE)
    greedy = {"tokens": 12, "sampling": Sampling(temperature=0.0)}
    first = "system: s\nuser: the cat\nassistant: "
    (answer,) = generate(folder, [first], **greedy)
    assert generate(folder, "the cat", chat=True, system="s", **greedy) == [answer]
    (second,) = generate(folder, [f"{first}{answer}\nuser: sat\nassistant: "], **greedy)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the cat\nsat\n")))
    told = printed(capsys, folder, "--chat", "--temperature", 0, "--system", "s")
    assert told == f"{answer}\n{second}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a <|endoftext|>\n")))
    with pytest.raises(UserError, match="^--chat: got a message that spells the special token"):
        command.main(words(folder, "--chat"))
    tokenizer = Tokenizer.from_file(str(folder / "checkpoints/tokenizer.json"))
    ids = tokenizer.encode(answer).ids
    ends = [0, ids[2]]
    (folder / "checkpoints/generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    (shorter,) = generate(folder, [first], **greedy)
    assert len(shorter) < len(answer) and answer.startswith(shorter)


def test_a_chat_that_outgrows_its_room_goes_on_with_the_same_answers(run, capsys, monkeypatch):
    made, own, told = [], command.Trained.running, []

    def noted(trained, texts, longest, tokens):
        made.append(longest)
        return own(trained, texts, longest, tokens)

    monkeypatch.setattr(command.Trained, "running", noted)
    for least in (command.CHAT_TOKENS, 4):
        monkeypatch.setattr(command, "CHAT_TOKENS", least)
        given = b"the cat\nthe dog sat on\n" * 3
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        told.append(printed(capsys, run, "--chat", "--temperature", 0, "--tokens", 4))
    assert told[0] == told[1]
    all_positions, *grown = made
    assert grown == [4, 28, all_positions] and all_positions == 40


def test_a_conversation_has_room_for_what_was_said_and_an_answer_and_for_little_more():
    for said, tokens in ((1, 200), (824, 200), (825, 200), (5000, 1), (3, 8191)):
        longest = command._longest(said, tokens, 40_960)
        assert said <= longest and longest + tokens < 2 * max(said + tokens, 1024)
    assert command._longest(20_000, 20_000, 40_960) == 40_960
    assert command._longest(1, 200, 256) == 256


def test_a_terminal_gets_characters_of_all_languages_and_no_command(capsys, monkeypatch):
    text = "a\u00a0b\u202fc\u3000\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f4bb\n\t"
    for is_terminal, shown in ((True, "\ufffd"), (False, "\x1b")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_so=is_terminal: is_so)
        command.print_text(f"{text}\x1b")
        assert capsys.readouterr().out == text + shown
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command.print_text("\r\x7f\x9b\u202e\u2067")
    assert capsys.readouterr().out == "\ufffd" * 5


WRONG = [
    ({"tokens": 0}, "tokens: got 0; expected a whole number, at least 1."),
    ({"samples": 0}, "samples: got 0; expected a whole number, at least 1."),
    ({"stop": ""}, "stop: got ['']; expected a list of texts, none of them empty."),
    ({"stop": ["a", ""]}, "stop: got ['a', '']; expected a list of texts, none of them empty."),
    ({"chat": True, "system": "s"}, "chat: got it without prompts; expected messages to answer."),
    ({"system": "s"}, "system: got it without chat; expected both or none."),
    ({"data_parallel": 0}, "data_parallel: got 0; expected a whole number, at least 1."),
    ({"seed": -1}, "seed: got -1; expected a whole number, at least 0"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_python_is_told_of_a_wrong_value_as_the_command_is(run, given, says):
    with pytest.raises(UserError) as told:
        generate(run, **given)
    assert str(told.value).startswith(says)

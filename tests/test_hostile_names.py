"""Names and texts from outside that hold commands for a terminal: every program quotes them, and
prints none.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from popxl_gpt.data import prepare
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.demo import convert, evaluate, generate, pretraining, report
from popxl_gpt.execution.checkpoints.manifest import manifest_text, read_manifest
from popxl_gpt.utils.errors import ConfigError, UserError, exit_on_user_error
from popxl_gpt.utils.escaping import EscapedStream, as_it_is
from popxl_gpt.utils.log import set_up_logging
from tests.integration.runs import run_job
from tests.terminal import commands_in

HOSTILE = (
    "\x1b]0;owned\x07\x9b31m\x90\x08\x7f\u202eowned\u2066\u200f\u2028\r\nerror: all is well\x1b[2J"
)
"""Sets the title of a terminal, colours, goes back, turns the direction of writing, begins a line
of its own and clears the screen.
"""
TINY = """
    --config tiny --name run --layers 1 --hidden_size 8 --heads 1 --dropout 0 --warmup_steps 0
    --global_batch_size 2 --micro_batch_size 2 --sequence_length 8 --data_parallel 1
    --tensor_parallel_1 1 --tensor_parallel_2 1 --steps 1 --validate_every 0
""".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, a run of it, and a folder of Hugging Face's."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "a.txt").write_text("What a run writes.\n" * 500)
    words = "--sequence_length 8 --vocabulary_size 300 --workers 1 --output"
    assert prepare.main(["text", str(folder / "a.txt"), *words.split(), str(folder / "data")]) == 0
    run_job(*TINY, "--samples", 0, "--input_files", folder / "data", "--run_folder", folder)
    assert convert.main(["to_hugging_face", str(folder / "run"), str(folder / "theirs")]) == 0
    return folder


def called(main: "Callable[[list[str]], int]", words: "list[object]") -> int:
    """A program's exit code, as its command line gives it."""
    with pytest.raises(SystemExit) as stop, exit_on_user_error():
        sys.exit(main([str(word) for word in words]))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def copied(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def preparing(content: bytes, name: str, *flags: str, command: str = "text"):
    """A preparation of a file in a folder."""

    def words(folder: Path, made: Path) -> "list[object]":
        (folder / "in").mkdir()
        (folder / "in" / name).write_bytes(content)
        sizes = ("--sequence_length", 8, "--vocabulary_size", 300, "--workers", 1)
        return [command, folder / "in", "--output", folder / "out", *sizes, *flags]

    return prepare.main, words


def table_of(columns: "dict[str, list]"):
    def words(folder: Path, made: Path) -> "list[object]":
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return ["text", folder / "a.parquet", "--output", folder / "out", "--vocabulary_size", 300]

    return prepare.main, words


def theirs(file: str, changed: "Callable[[dict], object]", *, command: str = "from_hugging_face"):
    """A conversion of Hugging Face's folder, of which a JSON file is changed."""

    def words(folder: Path, made: Path) -> "list[object]":
        source = copied(made / "theirs", folder / "theirs")
        (source / file).write_text(json.dumps(changed(json.loads((source / file).read_text()))))
        return [command, source, folder / "out"]

    return convert.main, words


def tensors_of_theirs(folder: Path, made: Path) -> "list[object]":
    source = copied(made / "theirs", folder / "theirs")
    header = {HOSTILE: {"dtype": "F32", "shape": [3], "data_offsets": [0, 999]}}
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    return ["from_hugging_face", source, folder / "out"]


def checkpoint_of(made: Path, folder: Path, changed: "Callable[[dict], dict]") -> Path:
    """A run whose checkpoint's description is changed, with the right checksum."""
    (before,) = (made / "run/checkpoints").glob("step_*")
    after = copied(before, folder / "run/checkpoints" / before.name)
    (folder / "run/config.yml").write_bytes((made / "run/config.yml").read_bytes())
    manifest = read_manifest(after / "checkpoint.json")
    del manifest["sha256"]
    (after / "checkpoint.json").write_text(manifest_text(changed(manifest)), "utf-8")
    return folder / "run"


def checkpoint(main, changed: "Callable[[dict], dict]", *flags: object):
    def words(folder: Path, made: Path) -> "list[object]":
        run = checkpoint_of(made, folder, changed)
        name = "--init_from" if main is pretraining.main else "--checkpoint"
        (folder_of_step,) = (run / "checkpoints").glob("step_*")
        return [name, folder_of_step, *flags]

    return main, words


def trained(*flags: object, **files: "bytes | str"):
    """The training program with files of its own: names with _ for the last dot."""

    def words(folder: Path, made: Path) -> "list[object]":
        for name, content in files.items():
            path = folder / ".".join(name.rsplit("_", 1))
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        given = [str(flag).format(folder=folder, made=made) for flag in flags]
        return [*TINY, "--run_folder", folder / "runs", *given]

    return pretraining.main, words


def tokens_in(folder: Path, content: bytes, name: str = f"train-{HOSTILE}.tfrecord") -> Path:
    (folder / "tokens").mkdir()
    path = folder / "tokens" / name
    with RecordWriter(path) as writer:
        writer.write(content)
    return path


def damaged_tokens(folder: Path, made: Path) -> "list[object]":
    tokens_in(folder, b"no tokens")
    pattern = folder / "tokens/*.tfrecord"
    return [*TINY, "--run_folder", folder / "runs", "--input_files", pattern]


def checked_tokens(folder: Path, made: Path) -> "list[object]":
    tokens_in(folder, b"no tokens")
    return ["check", folder / "tokens/*.tfrecord"]


def broken_tokens(folder: Path, made: Path) -> "list[object]":
    path = tokens_in(folder, b"no tokens")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    path.with_suffix(".tfindex").unlink()
    return ["check", folder / "tokens/*.tfrecord"]


def tokenized(changed: "Callable[[dict], dict]"):
    """A preparation with a tokenizer that is changed."""

    def words(folder: Path, made: Path) -> "list[object]":
        values = changed(json.loads((made / "data/tokenizer.json").read_text()))
        (folder / "t.json").write_text(json.dumps(values))
        tokenizer = ("--tokenizer", folder / "t.json", "--output", folder / "out")
        return ["text", made / "a.txt", *tokenizer, "--sequence_length", 8]

    return prepare.main, words


LINE = json.dumps({HOSTILE: "text"}).encode()
ROLES = json.dumps({"messages": [{"role": HOSTILE, "content": "a"}] * 2}).encode()
CASES = {
    # names of files that a program finds by itself
    "prepare: a file that is no text": preparing(b"\xff\xfe\0", f"{HOSTILE}.txt"),
    "prepare: a line that is no JSON": preparing(b"{", f"{HOSTILE}.jsonl"),
    "prepare: a damaged archive": preparing(b"no archive", f"{HOSTILE}.txt.gz"),
    "prepare: a damaged table": preparing(b"no table", f"{HOSTILE}.parquet"),
    "prepare: damaged lines that are left out": preparing(
        b'{"text": "a text to train on"}\n' * 50 + b"{\n", f"{HOSTILE}.jsonl", "--skip_damaged"
    ),
    "check: the name of a file": (prepare.main, checked_tokens),
    "check: the name of a damaged file": (prepare.main, broken_tokens),
    "train: the name of a file": (pretraining.main, damaged_tokens),
    # what files hold
    "prepare: fields of JSON lines": preparing(LINE, "a.jsonl"),
    "prepare: columns of a table": table_of({HOSTILE: ["a"]}),
    "prepare: roles of a conversation": preparing(ROLES, "a.jsonl", command="conversations"),
    "prepare: fields of a conversation": preparing(LINE, "a.jsonl", command="conversations"),
    "prepare: a merge of a tokenizer": tokenized(
        lambda values: {**values, "model": {**values["model"], "merges": [[HOSTILE, "a"]]}}
    ),
    "train: a setting that there is not": trained(
        "--config", "{folder}/a.yml", a_yml=json.dumps({HOSTILE: 1})
    ),
    "train: a value of a setting": trained(
        "--config", "{folder}/a.yml", a_yml=json.dumps({"model": {"activation": HOSTILE}})
    ),
    "train: a flag that there is not": trained(f"--{HOSTILE}", 1),
    "train: a value of a flag": trained("--activation", HOSTILE),
    "train: a path": trained("--input_files", HOSTILE),
    "train: a name": trained("--name", HOSTILE),
    "convert: the name of a tensor": (convert.main, tensors_of_theirs),
    "convert: the kind of a model": theirs("config.json", lambda c: {**c, "model_type": HOSTILE}),
    "convert: an activation": theirs(
        "config.json", lambda c: {**c, "activation_function": HOSTILE, "hidden_act": HOSTILE}
    ),
    "train: a setting of a checkpoint": checkpoint(
        pretraining.main, lambda m: {**m, "config": {**m["config"], HOSTILE: 1}}
    ),
    "generate: a setting of a checkpoint": checkpoint(
        generate.main, lambda m: {**m, "config": {**m["config"], HOSTILE: 1}}
    ),
    "evaluate: a setting of a checkpoint": checkpoint(
        evaluate.main, lambda m: {**m, "config": {**m["config"], HOSTILE: 1}}
    ),
    "generate: a command": (generate.main, lambda folder, made: [HOSTILE]),
    "convert: a command": (convert.main, lambda folder, made: [HOSTILE]),
    "prepare: a command": (prepare.main, lambda folder, made: [HOSTILE]),
    "report: a folder": (report.main, lambda folder, made: [HOSTILE]),
    "evaluate: a flag": (evaluate.main, lambda folder, made: [f"--{HOSTILE}"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_messages_quote_names_and_obey_none(
    name: str, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main, words = CASES[name]
    arguments = words(tmp_path, made)
    capfd.readouterr()
    code = called(main, arguments)
    said = capfd.readouterr()
    told = said.out + said.err
    assert code in (0, 2) and "owned" in told, f"{code}: {told!r}"
    assert not commands_in(told), repr(told)
    assert not any(line.startswith("error: all is well") for line in told.splitlines()), told


def test_a_stream_escapes_what_commands_a_terminal_and_tqdm_still_draws(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with exit_on_user_error():
        print("name", HOSTILE, "ä😀\t|")
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE])
        sys.stdout.write("\r 50%|")
        sys.stdout.write("\n\n\x1b[A\x1b[A")
        with as_it_is():
            print(HOSTILE)
    said = capfd.readouterr()
    before, _, drawn = said.out.partition("\r 50%|")
    shown = HOSTILE.encode("unicode_escape").decode().replace("\\n", "\n")
    assert before == f"name {shown} ä😀\t|\n{shown}" and said.err == f"{shown}\n"
    assert drawn == f"\n\n\x1b[A\x1b[A{HOSTILE}\n"


def test_an_error_has_the_lines_that_it_was_written_with() -> None:
    assert str(UserError("a\nb", "c")) == "a\\nb\nc"
    assert str(ConfigError(["one\nerror: two", "three"], "where")) == (
        "where: 2 problems.\n  1. one\\nerror: two\n  2. three"
    )


def test_a_message_of_the_log_has_the_lines_that_it_was_written_with(
    capfd: pytest.CaptureFixture[str],
) -> None:
    handlers, level = logging.root.handlers, logging.root.level
    try:
        set_up_logging()
        logging.warning("%s: got\n%s", "a name", HOSTILE)
        logging.warning(HOSTILE.replace("\n", ""))
    finally:
        logging.root.handlers, logging.root.level = handlers, level
    told = capfd.readouterr().err
    assert not commands_in(told) and len(told.splitlines()) == 3 and "\\nerror: all" in told


@pytest.mark.slow
def test_texts_of_a_model_command_no_terminal_and_reach_a_file_as_they_are(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is part of what is printed, and its bytes are tokens of the model's."""
    words = ["--checkpoint", made / "run", "--prompt", HOSTILE, "--tokens", 1]
    capfd.readouterr()
    assert called(generate.main, words) == 0
    assert capfd.readouterr().out.startswith(HOSTILE)
    monkeypatch.setattr(EscapedStream, "isatty", lambda stream: True, raising=False)
    assert called(generate.main, words) == 0
    said = capfd.readouterr().out
    assert "owned" in said and not commands_in(said)


@pytest.mark.slow
def test_samples_of_a_run_command_no_terminal(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(f"{HOSTILE}\n" * 300, "utf-8")
    words = "--sequence_length 8 --vocabulary_size 400 --workers 1 --validation 0 --output"
    words = ["text", tmp_path / "a.txt", *words.split(), tmp_path / "data"]
    assert called(prepare.main, words) == 0
    runs = ["--input_files", tmp_path / "data", "--run_folder", tmp_path]
    assert called(pretraining.main, [*TINY, "--samples", 1, *runs]) == 0
    told = "".join(capfd.readouterr())
    assert "owned" in told and not commands_in(told)
    kept = (tmp_path / "run/samples.jsonl").read_text()
    assert commands_in("".join(json.loads(line)["prompt"] for line in kept.splitlines()))

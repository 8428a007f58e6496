"""Models from and to Hugging Face: the same weights bit for bit, the same logits, and refusals in
words.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later
from safetensors.torch import load_file, save_file

from popxl_gpt.config.presets import preset
from popxl_gpt.config.schema import Config
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo.convert import main
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, write_hugging_face
from popxl_gpt.execution.exchange.initial_weights import initial_weights, settings_of_model
from popxl_gpt.execution.inference.inference import generation, logits
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError
from tests.integration.runs import run_job

transformers = Later("transformers")

ROOT = Path(__file__).parents[3]
SIZES = {"vocab_size": 270, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3}


def gpt2(seed: int = 1, **changes) -> torch.nn.Module:
    torch.manual_seed(seed)
    values = {**SIZES, "bos_token_id": 0, "eos_token_id": 0, **changes}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**values)).eval()
    with torch.no_grad():  # nothing is zero or one
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A folder as transformers saves it, with a tokenizer."""
    folder = tmp_path / "theirs"
    gpt2().save_pretrained(folder)
    train_tokenizer(["def f():\n    return 1\n"], 270).save(str(folder / "tokenizer.json"))
    return folder


def tensors(folder: Path) -> "dict[str, torch.Tensor]":
    found = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    found.pop("lm_head.weight", None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_there_and_back_is_the_same_bits(tmp_path, dtype, sharded):
    kind = getattr(torch, dtype)
    gpt2().to(kind).save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB" if sharded else "5GB"
    )
    assert (tmp_path / "theirs/model.safetensors.index.json").exists() == sharded
    main(["from_hugging_face", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    limit = ["--file_bytes", "20000"] if sharded else []
    main(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back"), *limit])
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 1) == sharded
    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == kind and torch.equal(after[name], tensor), name


@pytest.mark.slow
def test_a_trained_model_gives_its_logits_in_transformers(tmp_path):
    flags = ("--config", "tiny", "--steps", 3, "--validate_every", 0, "--run_folder", tmp_path)
    run_job(*flags, "--learning_rate", 0.05, "--name", "run")
    main(["to_hugging_face", str(tmp_path / "run"), str(tmp_path / "theirs")])
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "theirs").eval()
    config = preset("tiny", global_batch_size=8, micro_batch_size=4)
    words = np.random.default_rng(1).integers(0, 128, (8, 8)).astype(np.int32)
    session = generation(config, 32)
    write_whole_weights(session, config, find_trained(tmp_path / "run").weights())
    rows = np.tile(np.arange(32, dtype=np.int32), (2, 1))
    with session:
        ours = logits(session, config, words, rows).reshape(8, 8, 128)
    with torch.no_grad():
        found = model(torch.from_numpy(words).long()).logits.numpy()
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(ours, found, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_tokenizer_goes_both_ways(theirs, tmp_path):
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    main(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
    for path in (tmp_path / "ours/checkpoints", tmp_path / "back"):
        assert (path / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded.decode(loaded("def f():")["input_ids"]) == "def f():"
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back")
    ends = (loaded.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    assert ends == (loaded.convert_tokens_to_ids("<|endoftext|>"),) * 3
    assert loaded.bos_token == loaded.eos_token == "<|endoftext|>"


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])
def test_the_export_says_that_transformers_lets_documents_attend_to_each_other(
    theirs, tmp_path, monkeypatch, capsys, is_apart
):
    model = replace(HuggingFaceFolder(theirs).model, document_attention=is_apart)
    monkeypatch.setattr(HuggingFaceFolder, "model", model)
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    main(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
    assert ("note: documents of one sequence attended" in capsys.readouterr().out) == is_apart


@pytest.mark.slow
@pytest.mark.parametrize("positions", [5, 12, 20])
def test_positions_are_cropped_or_extended_where_that_is_asked_for(theirs, tmp_path, positions):
    words = ["from_hugging_face", theirs, tmp_path / "ours", "--positions", positions]
    main([*map(str, words)])
    saved = find_trained(tmp_path / "ours")
    found = dict(saved.weights())["embedding.position.weight"]
    before = tensors(theirs)["transformer.wpe.weight"].numpy()
    assert saved.config.model.positions == len(found) == positions
    np.testing.assert_array_equal(found[:12], before[:positions])
    assert np.isfinite(found).all() and (found[12:].std() > 0.01 if positions > 12 else True)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("source", ["theirs", "ours"])
@pytest.mark.parametrize("layout", [(), ("--tensor_parallel_1", 3, "--tensor_parallel_2", 2)])
def test_a_run_begins_with_the_weights_of_another_model(theirs, tmp_path, source, layout):
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    flags = (
        "--config", tmp_path / "ours/config.yml", "--name", "new", "--run_folder", tmp_path,
        "--global_batch_size", 2, "--steps", 1, "--dropout", 0, "--learning_rate", 1e-3,
        "--schedule", "constant", "--validate_every", 0, "--init_from", tmp_path / source,
    )  # fmt: skip
    run_job(*flags, *layout)
    line = json.loads((tmp_path / "new/metrics.jsonl").read_text())
    assert line["step"] == 1
    from popxl_gpt.data.in_memory import SyntheticDataset
    from popxl_gpt.data.loader import BatchLoader

    words, labels = BatchLoader(SyntheticDataset(12, 270, 42), 2, seed=42, shuffle=True).batch(0)
    with torch.no_grad():
        found = gpt2()(torch.from_numpy(words).long()).logits
    loss = torch.nn.functional.cross_entropy(
        found.reshape(-1, 270), torch.from_numpy(labels).long().reshape(-1)
    )
    assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_weights_alone_is_not_continued(theirs, tmp_path):
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    flags = ("--config", tmp_path / "ours/config.yml", "--global_batch_size", 1, "--steps", 1)
    with pytest.raises(UserError, match="weights alone; .* --init_from instead of --checkpoint"):
        run_job(*flags, "--run_folder", tmp_path, "--name", "ours", "--checkpoint.load", "auto")


def change(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def untie(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    found["lm_head.weight"] = found["transformer.wte.weight"] + 1.0
    save_file(found, folder / "model.safetensors")


class Harm:
    def __init__(self, *called):
        self.called = called

    def __reduce__(self):
        return self.called


def pickle(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    made = Harm(os.mkdir, (str(folder / "harmed"),))
    torch.save({**state, "more": made}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def spoil(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    found["transformer.wpe.weight"][0] = float("nan")
    save_file(found, folder / "model.safetensors")


REFUSED = {
    "another architecture": (lambda f: change(f, model_type="mamba"), 'got model_type "mamba"; expected one of gpt2, llama'),
    "no architecture": (lambda f: change(f, model_type=None), "got model_type null"),
    "another activation": (lambda f: change(f, activation_function="relu"), '"relu"; expected one of gelu_new'),
    "untied by its configuration": (lambda f: change(f, tie_word_embeddings=False), "lm_head.weight is missing"),
    "tensors of another": (lambda f: change(f, model_type="llama"), "model.embed_tokens.weight is missing"),
    "untied by its tensors": (untie, "lm_head.weight that is not transformer.wte.weight"),
    "a pickle that runs something": (
        pickle, "pytorch_model.bin: got a pickle that asks for code of posix.mkdir; expected tensors"),
    "another shape": (lambda f: change(f, n_positions=13), r"transformer.wpe.weight has shape [12, 24], not [13, 24]"),
    "a layer too many": (lambda f: change(f, n_layer=3), "transformer.h.2.ln_1.weight is missing"),
    "odd numbers": (spoil, "transformer.wpe.weight: got numbers that are not finite"),
    "a size that is none": (lambda f: change(f, n_head="many"), "heads: got 'many'"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "got no JSON"),
    "a cut file": (lambda f: os.truncate(f / "model.safetensors", 5000), "got no whole safetensors file"),
    "an index that leads elsewhere": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'), "got no weight_map"),
    "no folder": (lambda f: f.rename(f.with_name("away")), "config.json: got 'No such file"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("damage", REFUSED)
def test_what_is_no_gpt2_is_refused_in_words(theirs, tmp_path, damage):
    harm, words = REFUSED[damage]
    harm(theirs)
    with pytest.raises(UserError) as found:
        main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    assert words in str(found.value)
    assert not (tmp_path / "ours").exists()
    assert not list(tmp_path.glob(".ours*"))


@pytest.mark.slow
def test_a_run_refuses_weights_of_another_model(theirs, tmp_path):
    with pytest.raises(UserError, match="--init_from: got .* with layers 2, not 3; .* settings"):
        run_job(
            "--config", "tiny", "--layers", 3, "--hidden_size", 24, "--heads", 3,
            "--vocabulary_size", 270, "--tensor_parallel_1", 1, "--tensor_parallel_2", 1,
            "--init_from", theirs, "--run_folder", tmp_path,
        )  # fmt: skip


@pytest.mark.slow
def test_the_command_is_answered_in_one_line(theirs, tmp_path):
    def convert(*words):
        command = [sys.executable, str(ROOT / "demo/convert.py"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    done = convert("from_hugging_face", "theirs", "ours")
    assert done.returncode == 0, done.stderr
    assert "21.3 k parameters" in done.stdout and "--init_from ours" in done.stdout, done.stdout
    done = convert("from_hugging_face", "theirs", "ours")
    assert done.returncode == 2 and "got a folder that is there" in done.stderr
    for words, said in (
        (("from_hugging_fase",), "Did you mean 'from_hugging_face'?"),
        (
            (),
            "command: got none; expected one of from_hugging_face, from_nanogpt, to_hugging_face, "
            "to_peft, to_ipu_config, to_gguf",
        ),
        (("to_hugging_face", "ours"), "PATHS: got 1; expected two"),
        (("to_hugging_face", "nothing", "out"), "CHECKPOINT: got nothing, no folder"),
        (("to_hugging_face", "ours", "out", "--positons", 3), "Did you mean '--positions'?"),
    ):
        done = convert(*words)
        assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
        assert len(done.stderr.strip().splitlines()) <= 2 and "Traceback" not in done.stderr
    assert convert("--help").returncode == convert("to_hugging_face", "--help").returncode == 0


@pytest.mark.slow
def test_a_whole_checkpoint_is_read_by_name(theirs, tmp_path):
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    saved = find_trained(tmp_path / "ours")
    assert isinstance(saved, SavedRun) and saved.position.step == 0
    with pytest.raises(
        UserError, match=r"got \S+, a model of Hugging Face's; expected a checkpoint"
    ):
        find_trained(theirs)


def small_gpt2(folder: Path) -> Path:
    """A folder as transformers saves it, made without it."""
    folder.mkdir()
    model = preset(
        "tiny", layers=1, hidden_size=8, heads=2, vocabulary_size=257, sequence_length=4,
        tensor_parallel_1=1, tensor_parallel_2=1, tied_head=True,
    ).model  # fmt: skip
    weights = ((name, np.zeros(p.shape, np.float32)) for name, p in model_table(model).items())
    write_hugging_face(folder, model, weights, None, 10**9)
    return folder


@pytest.mark.parametrize(
    "named, found",
    [
        (5, 5),
        (256, 256),
        (257, 0),
        (-1, 0),
        ([5, 6], 5),
        ([5, 257], 0),
        ([], 0),
        (True, 0),
        (None, 0),
    ],
)
def test_documents_end_with_the_token_that_their_configuration_names(tmp_path, named, found):
    theirs = small_gpt2(tmp_path / "theirs")
    change(theirs, eos_token_id=named)
    assert HuggingFaceFolder(theirs).model.end_of_text == found


@pytest.mark.parametrize(
    "named, added, begin, end",
    [
        (2, {1: "<s>", 2: "</s>"}, None, 2),
        (2, None, None, 2),
        (5, {4: "<|endoftext|>", 5: "<|im_end|>"}, 4, 5),
        (None, {0: "<|endoftext|>"}, 0, 0),
        (None, {1: "<s>"}, None, None),
    ],
    ids=["llama", "no tokenizer", "qwen3", "ours", "none"],
)
def test_an_export_has_the_end_of_texts_that_the_import_had(tmp_path, named, added, begin, end):
    theirs = small_gpt2(tmp_path / "theirs")
    change(theirs, eos_token_id=named)
    if added is not None:
        tokens = [{"id": number, "content": text} for number, text in added.items()]
        (theirs / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    main(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
    values = json.loads((tmp_path / "back/config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == (begin, end)
    if added is not None:
        told = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
        assert (told.get("bos_token"), told.get("eos_token")) == (added.get(begin), added.get(end))


@pytest.mark.parametrize(
    "begin, end, kept",
    [(3, [5, 6], (3, [5, 6])), (3, 5, (3, 5)), ([3, 4], [5], ([3, 4], [5])), (300, [5, 300], (1, 1))],
    ids=["llama 3", "one", "lists", "no tokens"],
)  # fmt: skip
def test_an_export_begins_and_ends_texts_as_the_import_did(tmp_path, begin, end, kept):
    theirs = small_gpt2(tmp_path / "theirs")
    change(theirs, bos_token_id=begin, eos_token_id=end)
    texts = {1: "<|endoftext|>", 3: "<|begin_of_text|>", 5: "<|end_of_text|>", 6: "<|eot_id|>"}
    tokens = [{"id": number, "content": text} for number, text in texts.items()]
    (theirs / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    main(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
    values = json.loads((tmp_path / "back/config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == kept
    told = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    first = [texts[tokens[0] if isinstance(tokens, list) else tokens] for tokens in kept]
    assert [told["bos_token"], told["eos_token"]] == first
    ends = find_trained(tmp_path / "ours").ends
    assert ends == ([] if end == [5, 300] else end if isinstance(end, list) else [end])


def test_a_run_drops_as_many_units_as_the_gpt2_that_it_begins_with(tmp_path):
    theirs = small_gpt2(tmp_path / "theirs")
    change(theirs, resid_pdrop=0.25, attn_pdrop=0.0)
    assert settings_of_model(theirs)["dropout"] == 0.25


def test_settings_that_the_weights_are_not_for_are_told_by_name(tmp_path):
    theirs = small_gpt2(tmp_path / "theirs")
    model = replace(HuggingFaceFolder(theirs).model, key_value_heads=1, feed_forward_size=9)
    with pytest.raises(UserError, match="with key_value_heads 2, not 1; feed_forward_size 32, not"):
        initial_weights(theirs, Config(model=model))


def test_what_goes_on_with_a_model_is_told_as_a_shell_takes_it(tmp_path, capsys):
    out = tmp_path / "my runs/it's"
    main(["from_hugging_face", str(small_gpt2(tmp_path / "theirs")), str(out)])
    told = shlex.split(capsys.readouterr().out.splitlines()[-1].rstrip("."))
    assert told[-2:] == ["--init_from", str(out)]


def contents(folder: Path) -> "dict[str, bytes | None]":
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", ["from_hugging_face", "to_hugging_face"])
def test_overwriting_replaces_what_the_command_made_and_nothing_else(tmp_path, name):
    theirs, out = small_gpt2(tmp_path / "theirs"), tmp_path / "out"
    ours = tmp_path / "ours"
    main(["from_hugging_face", str(theirs), str(ours)])
    source = theirs if name == "from_hugging_face" else ours
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    for taken in ("foreign", "foreign/checkpoints"):
        (tmp_path / taken).mkdir()
    (tmp_path / "foreign/config.json").write_text("{}")  # without weights it is no model
    command = [name, str(source)]
    out.mkdir()
    for _ in range(2):  # an empty folder, and one that the command made
        main([*command, str(out), "--overwrite"])
    within = next(path for path in source.rglob("*.safetensors")).parent
    (out / "notes.md").write_text("mine")
    before = contents(tmp_path)
    for target, says in {
        out: "got a folder with notes.md; expected a folder that this command made",
        tmp_path / "foreign": "got a folder with c",
        tmp_path / "file": "got a file; expected",
        source: "is, holds or lies in",
        tmp_path / "link": "is, holds or lies in",
        tmp_path: "is, holds or lies in",
        within / "new": "is, holds or lies in",
    }.items():
        with pytest.raises(UserError) as found:
            main([*command, str(target), "--overwrite"])
        assert says in str(found.value) and "\n" not in str(found.value), target
        assert contents(tmp_path) == before, target


@pytest.mark.parametrize("name", ["config.json", "config.yml", "model.safetensors"])
def test_a_folder_that_is_no_whole_model_is_not_replaced(tmp_path, name):
    theirs, out = small_gpt2(tmp_path / "theirs"), tmp_path / "out"
    ours = tmp_path / "ours"
    main(["from_hugging_face", str(theirs), str(ours)])
    out.mkdir()
    (out / name).write_text("{}")
    for command in (["from_hugging_face", str(theirs)], ["to_hugging_face", str(ours)]):
        with pytest.raises(UserError, match="out: got a folder with "):
            main([*command, str(out), "--overwrite"])
    assert (out / name).read_text() == "{}"


@pytest.mark.parametrize(
    "tokens", [None, 1, [1], [None], [{}], [{"content": 1, "id": 0}], [{"content": "a", "id": "0"}]]
)
def test_a_tokenizer_whose_added_tokens_are_none_is_refused_in_words(tmp_path, tokens):
    main(["from_hugging_face", str(small_gpt2(tmp_path / "theirs")), str(tmp_path / "ours")])
    file = tmp_path / "ours/checkpoints/tokenizer.json"
    file.write_text(json.dumps({"added_tokens": tokens}))
    with pytest.raises(UserError, match="tokenizer.json: got added_tokens that are none; expected"):
        main(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["a\0", "\ud800", "\udcff", "../b", 1, None])
def test_an_index_with_names_that_no_file_has_is_refused_in_words(tmp_path, file):
    theirs = small_gpt2(tmp_path / "theirs")
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UserError, match="index.json: got no weight_map of files in its folder"):
        main(["from_hugging_face", str(theirs), str(tmp_path / "ours")])

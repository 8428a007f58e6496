"""Files and folders as Hugging Face's hub, its libraries and Git LFS leave them: what each is said
to be in one line, and that what the line says to do helps.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later
from safetensors.torch import load_file, save_file

from popxl_gpt.config.presets import preset
from popxl_gpt.config.yaml_files import read_yaml
from popxl_gpt.data import example
from popxl_gpt.data.conversations import conversation_source
from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.data.nanogpt import read_bins
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.records import RecordFile, RecordWriter
from popxl_gpt.data.sources import text_source
from popxl_gpt.data.tokenisation import load_tokenizer, train_tokenizer
from popxl_gpt.data.wikipedia import wikipedia_source
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.demo.job.text import read_tokenizer
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, write_hugging_face
from popxl_gpt.execution.exchange.initial_weights import initial_weights
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import read_bounded

transformers = Later("transformers")
huggingface_hub = Later("huggingface_hub")
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
"""As docs/spec.md of git-lfs has it."""


def model_in(folder: Path) -> Path:
    """A small GPT-2 with a tokenizer, as transformers saves it, made without it."""
    folder.mkdir(parents=True)
    model = preset(
        "tiny", layers=1, hidden_size=8, heads=2, vocabulary_size=300, sequence_length=4,
        tensor_parallel_1=1, tensor_parallel_2=1, tied_head=True,
    ).model  # fmt: skip
    weights = ((name, p.initial(name, 1)) for name, p in model_table(model).items())
    write_hugging_face(folder, model, weights, None, 10**9)
    train_tokenizer(["def f():\n    return 1\n"], 300).save(str(folder / "tokenizer.json"))
    return folder


def files_in(folder: Path) -> None:
    """What programs read, each file as it must be."""
    theirs = model_in(folder / "theirs")
    convert(["from_hugging_face", str(theirs), str(folder / "ours")])
    with RecordWriter(folder / "a.tfrecord") as writer:
        for payload in example.encode(np.zeros((2, 9), np.int64)):
            writer.write(payload)
    (folder / "meta.pkl").write_bytes(b"\x80\x04}\x94\x8c\nvocab_size\x94KAs.")
    np.zeros(9, "<u2").tofile(folder / "train.bin")


def first_weight(folder: Path) -> object:
    return next(HuggingFaceFolder(folder).weights())


STEP = "ours/checkpoints/step_00000000"
READERS = {
    "theirs/model.safetensors": lambda f: first_weight(f / "theirs"),
    "theirs/config.json": lambda f: first_weight(f / "theirs"),
    "theirs/model.safetensors.index.json": lambda f: first_weight(f / "theirs"),
    "theirs/pytorch_model.bin": lambda f: [
        (f / "theirs/model.safetensors").unlink(), first_weight(f / "theirs")],
    "theirs/tokenizer.json": lambda f: convert(["from_hugging_face", str(f / "theirs"), str(f / "new")]),
    "tokenizer.json": lambda f: read_tokenizer(f / "tokenizer.json"),
    "merges.txt": lambda f: load_tokenizer(f / "merges.txt"),
    "my.yml": lambda f: read_yaml(f / "my.yml"),
    "dataset.json": read_info,
    "a.tfrecord": lambda f: RecordFile(f / "a.tfrecord"),
    "a.tfindex": lambda f: RecordFile(f / "a.tfrecord"),
    "text.txt": lambda f: text_source([str(f / "text.txt")]),
    "rows.parquet": lambda f: text_source([str(f / "rows.parquet")]),
    "rows.jsonl.gz": lambda f: text_source([str(f / "rows.jsonl.gz")]),
    "chats.jsonl": lambda f: conversation_source([str(f / "chats.jsonl")]),
    "dump.xml.bz2": lambda f: wikipedia_source(f / "dump.xml.bz2"),
    "train.bin": lambda f: read_bins(f, f / "new"),
    "meta.pkl": lambda f: read_bins(f, f / "new"),
    f"{STEP}/checkpoint.json": lambda f: find_trained(f / "ours"),
    f"{STEP}/head.safetensors": lambda f: find_trained(f / "ours"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    files_in(folder)
    return folder


@pytest.mark.slow
def test_a_pointer_of_git_lfs_in_place_of_any_file_is_named_with_what_fetches_it(files, tmp_path):
    for number, (name, read) in enumerate(READERS.items()):
        folder = tmp_path / str(number)
        shutil.copytree(files, folder)
        (folder / name).write_text(POINTER)
        with pytest.raises(UserError) as found:
            read(folder)
        told = str(found.value)
        assert Path(name).name in told and "git lfs pull" in told and "Git LFS" in told, told
        assert "\n" not in told and not (folder / "new").exists(), told
        assert "damaged" not in told and "codec" not in told, told


def test_what_only_begins_as_a_pointer_is_an_ordinary_file(tmp_path):
    for text in (POINTER[:40], POINTER + "x" * 1024, "x" + POINTER):
        (tmp_path / "a.txt").write_text(text)
        assert list(text_source([str(tmp_path / "a.txt")]).documents()) == [text]
        assert read_bounded(tmp_path / "a.txt", 10_000) == text.encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F64"])
def test_weights_of_8_and_64_bits_are_read_once_transformers_has_converted_them(tmp_path, kind):
    torch.manual_seed(1)
    sizes = {"vocab_size": 37, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "a")
    file = tmp_path / "a/model.safetensors"
    types = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F64": torch.float64}
    narrow = {name: tensor.to(types[kind]) for name, tensor in load_file(file).items()}
    save_file(narrow, file, {"format": "pt"})
    with pytest.raises(UserError) as found:
        first_weight(tmp_path / "a")
    assert f": got {kind}; expected float32, float16 or bfloat16. Convert the model" in str(
        found.value
    )
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "b")
    words = dict(HuggingFaceFolder(tmp_path / "b").weights())["embedding.word.weight"]
    expected = narrow["transformer.wte.weight"].to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(words, expected)


def sentencepiece() -> bytes:
    """A tokenizer.model, as the message of SentencePiece's schema that transformers has."""
    from transformers.utils import sentencepiece_model_pb2_new as schema

    model = schema.ModelProto()
    for piece, score, kind in (("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("▁the", -1.5, 1)):
        model.pieces.add(piece=piece, score=score, type=kind)
    return model.SerializeToString()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_model_is_named_with_what_makes_a_tokenizer_json(tmp_path, kind, name):
    content = sentencepiece() if kind == "sentencepiece" else b"IQ== 0\nIg== 1\nIw== 2\n"
    (tmp_path / name).write_bytes(content)
    is_what = {"sentencepiece": "a SentencePiece model", "tiktoken": "tiktoken's ranks"}[kind]
    for read in (read_tokenizer, load_tokenizer):
        with pytest.raises(UserError) as found:
            read(tmp_path / name)
        assert (
            f"{is_what}; expected a tokenizer.json. Make one in a folder OUT with transformers"
            in str(found.value)
        )
    if name == "tokenizer.model":
        with pytest.raises(UserError, match="a folder without tokenizer.json; expected one. Make"):
            read_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_folder_is_taken_for_the_tokenizer_in_it(files, tmp_path, capsys):
    whole = load_tokenizer(files / "theirs/tokenizer.json")
    expected, vocabulary = whole.to_str(), whole.get_vocab()
    for folder in (files / "theirs", files / "ours"):  # a model's, a run's
        assert read_tokenizer(folder).get_vocab() == vocabulary
        assert load_tokenizer(folder).to_str() == expected
    (tmp_path / "text.txt").write_text("def f():\n    return 1\n" * 20)
    words = f"--tokenizer {files / 'theirs'} --sequence_length 8 --workers 1 --validation 0"
    command = [
        "text",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "out"),
        *words.split(),
    ]
    assert prepare(command) == 0
    assert load_tokenizer(tmp_path / "out").to_str() == expected  # a prepared one's
    config = parse_training(["--config", "tiny", "--tokenizer", str(files / "theirs")]).config
    assert config.data.tokenizer == str(files / "theirs/tokenizer.json")
    capsys.readouterr()
    with pytest.raises(UserError, match=f"--tokenizer: got {tmp_path}, a folder without tokenizer"):
        parse_training(["--config", "tiny", "--tokenizer", str(tmp_path)])


def refusals(path: Path) -> "list[str]":
    """What programs say of a path that is to be a model."""
    told = []
    for read in (
        lambda: convert(["from_hugging_face", str(path), "new"]),
        lambda: initial_weights(path, preset("tiny")),
        lambda: find_trained(path),
    ):
        with pytest.raises(UserError) as found:
            read()
        assert str(path) in str(found.value) and "\n" not in str(found.value)
        told.append(str(found.value))
    return told


def test_an_adapter_of_peft_is_named_with_what_merges_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    for told in refusals(tmp_path):
        assert "an adapter of peft; expected a whole model. Merge it: python -c" in told


@pytest.mark.slow
@pytest.mark.parametrize("main", [True, False])
def test_a_folder_of_the_hubs_cache_is_named_with_its_newest_version(tmp_path, main):
    cache = tmp_path / "hub/models--org--name"
    commits = [letter * 40 for letter in "bac"]
    for commit in commits:
        model_in(cache / "snapshots" / commit)
    (cache / "blobs").mkdir()
    for file in list((cache / "snapshots" / commits[0]).iterdir()):  # as the hub's client does
        blob = file.rename(cache / "blobs" / file.name)
        file.symlink_to(blob)
    if main:
        (cache / "refs").mkdir()
        (cache / "refs/main").write_text(commits[0])
        found = huggingface_hub.scan_cache_dir(tmp_path / "hub")
        assert not found.warnings and {repo.repo_id for repo in found.repos} == {"org/name"}
        (revision,) = (r for repo in found.repos for r in repo.revisions if r.refs)
        expected = revision.snapshot_path
    else:
        expected = cache / "snapshots" / max(commits)
    for path in (cache, cache / "snapshots"):
        for told in refusals(path):
            assert (
                f"the hub's cache of a model; expected one version of it. Give {expected}." in told
            )
    with pytest.raises(UserError, match=f"Give {expected}."):
        read_tokenizer(cache)
    assert len(dict(HuggingFaceFolder(expected).weights())) == 16
    assert read_tokenizer(expected).get_vocab()


def test_a_file_in_place_of_a_models_folder_is_named_with_its_folder(files):
    for told in refusals(files / "theirs/model.safetensors"):
        assert f"a file; expected the folder that it lies in. Give {files / 'theirs'}." in told


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "meta-llama/Llama-3.2-1B"])
def test_a_name_at_the_hub_is_told_with_the_command_that_downloads_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    says = f"run `hf download {name} --local-dir FOLDER` and give FOLDER."
    told = refusals(Path(name))
    if "/" in name:  # a model's name with its owner's is looked for
        says = f"run `hf download {name}` where there is a network and copy the cache"
    assert [says in text for text in told] == [True, True, False]  # `find_trained` takes runs alone
    says = f"run `hf download {name} --local-dir FOLDER` and give FOLDER."
    for read in (read_tokenizer, lambda path: prepare(["text", "a", "--tokenizer", str(path)])):
        with pytest.raises(UserError) as found:
            read(Path(name))
        assert says in str(found.value) or name == "gpt2"
    Path(name).parent.mkdir(exist_ok=True)
    (Path(name).parent / "runs").mkdir()
    assert not any("hf download runs" in text for text in refusals(Path(name).parent / "runs"))


@pytest.mark.slow
def test_a_model_that_has_only_another_kind_of_tokenizer_says_so(tmp_path, capsys):
    theirs = model_in(tmp_path / "theirs")
    (theirs / "tokenizer.json").rename(theirs / "tokenizer.model")
    convert(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    assert "note: tokenizer.model is no tokenizer.json, which is read here. Make one in" in (
        capsys.readouterr().out
    )
    assert json.loads((theirs / "config.json").read_text())["model_type"] == "gpt2"

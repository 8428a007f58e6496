"""Models of Hugging Face's as they are found: in one file or several, in any type, pickled, by name;
they come in as the same numbers, and go out as they came.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later
from safetensors.torch import load_file, save_file

from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.masking import ids_of
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.data.tokenisation import train_tokenizer
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.demo.evaluate import evaluate
from popxl_gpt.demo.generate import generate
from popxl_gpt.execution.exchange.hub import model_folder
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.utils.errors import UserError
from tests.integration.runs import run_job

pytestmark = pytest.mark.slow
transformers = Later("transformers")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
SIZES = {
    "vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 16,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def llama(folder: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """A model with a tokenizer of fewer words, as transformers saves both."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    train_tokenizer(["def f():\n    return 1\n"], 270).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}\n\n")
    (folder / "special_tokens_map.json").write_text('{"eos_token":   "<|endoftext|>"}')
    change(folder, unknown_key={"a": [1, 2]}, task_specific_params=None)
    return folder


def change(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def state(folder: Path) -> "dict[str, torch.Tensor]":
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save_as(folder: Path, tensors: "dict[str, torch.Tensor]", name: str = WEIGHTS) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    if name == WEIGHTS:
        save_file(tensors, folder / name, {"format": "pt"})
    else:
        torch.save(tensors, folder / name)


def halves(folder: Path, index: str, pattern: str, save) -> None:
    found, where = state(folder), {}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for part in range(2):
        held = dict(list(found.items())[part::2])
        name = pattern.format(part + 1)
        where |= dict.fromkeys(held, name)
        save(held, folder / name)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def of_torch(folder: Path, **options) -> None:
    found = state(folder)
    (folder / WEIGHTS).unlink()
    torch.save(found, folder / PICKLED, **options)


def no_heads_of_keys(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    del values["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(values))


def one_in_float32(folder: Path) -> None:
    found = state(folder)
    save_as(folder, {**found, "model.norm.weight": found["model.norm.weight"].float()})


FOUND = {
    "one file": ({}, lambda f: None),
    "float16": ({"dtype": torch.float16}, lambda f: None),
    "bfloat16": ({"dtype": torch.bfloat16}, lambda f: None),
    "bfloat16, but for a norm": ({"dtype": torch.bfloat16}, one_in_float32),
    "several files": ({}, lambda f: halves(f, INDEX, "model-{:05d}-of-00002.safetensors", lambda t, p: save_file(t, p, {"format": "pt"}))),
    "tied": ({"tie_word_embeddings": True}, lambda f: None),
    "tied, with a head": ({"tie_word_embeddings": True}, lambda f: save_as(f, {**state(f), "lm_head.weight": state(f)["model.embed_tokens.weight"].clone()})),
    "frequencies": ({}, lambda f: save_as(f, {**state(f), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)})),
    "no heads of keys": ({"num_key_value_heads": 4}, no_heads_of_keys),
    "pickled": ({"dtype": torch.bfloat16}, of_torch),
    "pickled as before": ({}, lambda f: of_torch(f, _use_new_zipfile_serialization=False)),
    "pickled in several files": ({}, lambda f: halves(f, f"{PICKLED}.index.json", "pytorch_model-{:05d}-of-00002.bin", torch.save)),
}  # fmt: skip


@pytest.mark.parametrize("found", FOUND)
def test_a_folder_as_it_is_found_goes_out_as_it_came(tmp_path, found):
    changes, spoil = FOUND[found]
    theirs = llama(tmp_path / "theirs", **changes)
    before = state(theirs)
    spoil(theirs)
    if found == "bfloat16, but for a norm":
        before = state(theirs)
    convert(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    convert(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
    after = state(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    weights = {".safetensors", ".bin"}
    beside = {p.name for p in theirs.iterdir() if not weights & {*p.suffixes}} - {INDEX}
    for name in beside - {f"{PICKLED}.index.json"}:
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes(), name


def test_another_precision_and_other_positions_change_their_entries_alone(tmp_path):
    theirs = llama(tmp_path / "theirs")
    convert(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    flags = ["--precision", "bfloat16", "--positions", "20"]
    convert(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back"), *flags])
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (theirs, tmp_path / "back")
    )
    assert after == {**before, "max_position_embeddings": 20, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "yarn", "original_max_position_embeddings": 8},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=["yarn without its positions", "yarn without a factor", "llama3 without its positions"],
)
def test_with_other_positions_what_followed_from_them_stays_as_it_was(tmp_path, rope):
    theirs = llama(tmp_path / "theirs")
    change(theirs, rope_parameters=None, rope_theta=1e4, rope_scaling=rope)
    convert(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    out = tmp_path / "back"
    convert(["to_hugging_face", str(tmp_path / "ours"), str(out), "--positions", "20"])
    before, after = (HuggingFaceFolder(folder).model for folder in (theirs, out))
    assert after == replace(before, sequence_length=20)
    assert json.loads((out / "config.json").read_text())["unknown_key"] == {"a": [1, 2]}


@pytest.mark.parametrize("way", ["a link", "."])
def test_what_lies_beside_a_checkpoint_goes_out_whichever_way_leads_there(
    tmp_path, monkeypatch, way
):
    theirs = llama(tmp_path / "theirs")
    convert(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    checkpoint = tmp_path / "ours/checkpoints/step_00000000"
    (tmp_path / "a link").symlink_to(checkpoint)
    monkeypatch.chdir(checkpoint if way == "." else tmp_path)
    convert(["to_hugging_face", way, str(tmp_path / "back")])
    convert(["to_gguf", way, str(tmp_path / "gguf/out.gguf")])
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes(), name


def test_a_folder_is_read_where_a_checkpoint_is(tmp_path):
    theirs = llama(tmp_path / "theirs")
    convert(["from_hugging_face", str(theirs), str(tmp_path / "ours")])
    sampling, text = Sampling(temperature=0.0), tmp_path / "text.txt"
    text.write_text("def f():\n    return 1\n" * 5)
    for use in (
        lambda model: generate(model, "def", tokens=6, sampling=sampling),
        lambda model: evaluate(model, text=text, sequence_length=8).measured.loss,
    ):
        assert use(theirs) == use(tmp_path / "ours")


def test_a_run_takes_the_settings_of_the_model_that_it_begins_with(tmp_path):
    theirs = llama(tmp_path / "theirs")
    begun = ["--init_from", str(theirs), "--sequence_length", "8", "--global_batch_size", "2"]
    model = parse_training(["--config", "tiny", *begun]).config.model
    assert (model.hidden_size, model.activation, model.max_positions) == (24, "swiglu", 16)
    assert parse_training(["--config", "tiny", *begun, "--layers", "3"]).config.model.layers == 3
    flags = ("--tensor_parallel_1", 1, "--tensor_parallel_2", 1, "--micro_batch_size", 1)
    run_job(
        "--config", "tiny", *begun, *flags, "--steps", 1, "--warmup_steps", 0, "--learning_rate", 1e-12,
        "--schedule", "constant", "--validate_every", 0, "--run_folder", tmp_path, "--name", "run",
    )  # fmt: skip
    convert(["to_hugging_face", str(tmp_path / "run"), str(tmp_path / "back")])
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes(), name


def cached(hub: Path, folder: Path, commit: str, ref: str) -> None:
    """Put a folder into the cache of the hub's library, as that does."""
    repo = hub / "models--org--name"
    snapshot = repo / "snapshots" / commit
    for place in (repo / "blobs", repo / "refs", snapshot):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = repo / "blobs" / f"{commit[0]}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (repo / "refs" / ref).write_text(commit)


def test_a_model_is_found_by_its_name_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    hub, theirs = tmp_path / "hub", llama(tmp_path / "theirs")
    cached(hub, theirs, "a" * 40, "main")
    change(theirs, max_position_embeddings=12)
    cached(hub, theirs, "b" * 40, "v2")
    (theirs / WEIGHTS).unlink()
    cached(hub, theirs, "c" * 40, "cut")
    for name, value in (("HF_HUB_CACHE", str(hub)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(tmp_path)
    for name, positions in (("org/name", 16), ("org/name@v2", 12), (f"org/name@{'b' * 40}", 12)):
        convert(["from_hugging_face", name, str(tmp_path / name.replace("/", "-"))])
        assert HuggingFaceFolder(model_folder(Path(name), "")).model.positions == positions
    assert generate("org/name", "def", tokens=3)
    assert (
        parse_training(["--init_from", "org/name", "--sequence_length", "8"]).config.model.layers
        == 2
    )
    for name in ("org/name@cut", "org/other", "org/name@v3"):
        with pytest.raises(UserError) as found:
            convert(["from_hugging_face", name, "out"])
        told = str(found.value)
        assert (
            f"FOLDER: got {name}, which is no folder here, is not whole in the hub's cache" in told
        )
        assert "\n" not in told and str(hub) in told and "run `hf download org/" in told, told


@pytest.mark.parametrize("is_there", [False, True])
def test_a_copy_without_a_tokenizer_is_taken_where_the_hub_has_none(
    tmp_path, monkeypatch, is_there
):
    tokenizer = llama(tmp_path / "theirs") / "tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.unlink()

    def snapshot_download(name, local_files_only, **_):
        if not local_files_only and not is_there:
            raise OSError("no network")
        if not local_files_only:
            tokenizer.write_bytes(content)
        return str(tokenizer.parent)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert model_folder(Path(f"org/bare_{is_there}"), "") == tokenizer.parent
    assert tokenizer.exists() == is_there


def test_adapters_in_the_form_of_peft_make_the_merged_model(tmp_path, capsys):
    theirs = llama(tmp_path / "theirs", tie_word_embeddings=True)
    flags = ("--tensor_parallel_1", 2, "--tensor_parallel_2", 1, "--micro_batch_size", 1)
    run_job(
        "--config", "tiny", "--init_from", theirs, "--sequence_length", 8, "--global_batch_size", 2,
        *flags, "--steps", 2, "--warmup_steps", 0, "--learning_rate", 0.1, "--schedule", "constant",
        "--validate_every", 0, "--run_folder", tmp_path, "--name", "run", "--lora_rank", 3,
    )  # fmt: skip
    convert(["to_hugging_face", str(tmp_path / "run"), str(tmp_path / "merged")])
    convert(["to_peft", str(tmp_path / "run"), str(tmp_path / "adapters")])
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(theirs) and not config["fan_in_fan_out"]
    parts = "down gate k o q up v".split()
    assert config["target_modules"] == [f"{part}_proj" for part in parts]
    adapters, before, after = (state(tmp_path / f) for f in ("adapters", "theirs", "merged"))
    scale, changed = config["lora_alpha"] / config["r"], 0
    for name, weight in before.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapters:
            down, up = (adapters.pop(f"{layer}.lora_{part}.weight") for part in "AB")
            assert down.shape == (3, weight.shape[1]) and up.abs().max() > 0.01
            weight, changed = weight + scale * up @ down, changed + 1
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)
    assert changed == 14 and not adapters
    assert "note:" not in capsys.readouterr().out
    convert(["from_hugging_face", str(theirs), str(tmp_path / "plain")])
    with pytest.raises(
        UserError, match="step_00000000, which has no adapters; expected those of a"
    ):
        convert(["to_peft", str(tmp_path / "plain"), str(tmp_path / "none")])
    (theirs / "config.json").unlink()  # as a run has it not
    convert(["to_peft", str(tmp_path / "run"), str(tmp_path / "of_run")])
    told = capsys.readouterr().out
    assert f"Export it, to_hugging_face {theirs} OUT, and write the path of OUT into" in told


CHAT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_model_that_learned_conversations_goes_out_with_its_template(tmp_path, place):
    theirs = llama(tmp_path / "theirs", max_position_embeddings=64)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(theirs / "tokenizer.json"),
        eos_token="<|endoftext|>",
        chat_template=CHAT,
    )
    (theirs / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(theirs, save_jinja_files=place.endswith("jinja"))
    settings = {"eos_token_id": [0, 7], "do_sample": True, "temperature": 0.3, "top_k": 5}
    transformers.GenerationConfig(**settings).save_pretrained(theirs)
    asked = [{"role": "user", "content": " return 1? "}]
    told = [*asked, {"role": "assistant", "content": "def f(): return 1"}]
    (tmp_path / "told.jsonl").write_text(json.dumps({"messages": told}) + "\n")
    prepare([
        "conversations", str(tmp_path / "told.jsonl"), "--tokenizer", str(theirs), "--output",
        str(tmp_path / "data"), "--sequence_length", "64", "--workers", "1", "--validation", "0",
    ])  # fmt: skip
    (record,) = ids_of(TokenDataset(str(tmp_path / "data/train-*"), 64, 300).read(np.arange(1)))
    expected = tokenizer.apply_chat_template(told)["input_ids"]
    assert record[: len(expected)].tolist() == expected
    run_job(
        "--config", "tiny", "--init_from", theirs, "--input_files", tmp_path / "data",
        "--sequence_length", 64, "--global_batch_size", 2, "--micro_batch_size", 1, "--steps", 2,
        "--tensor_parallel_1", 1, "--tensor_parallel_2", 1, "--warmup_steps", 0, "--validate_every",
        0, "--masked_labels", "--run_folder", tmp_path, "--name", "run", "--samples", 0,
    )  # fmt: skip
    convert(["to_hugging_face", str(tmp_path / "run"), str(tmp_path / "back")])
    beside = {path.name for path in theirs.iterdir()} - {WEIGHTS}
    assert {place, "generation_config.json"} <= beside
    for name in beside:
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes(), name
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for messages, prompted in ((told, False), (asked, True)):
        texts = (
            t.apply_chat_template(messages, add_generation_prompt=prompted)["input_ids"]
            for t in (tokenizer, again)
        )
        assert next(texts) == next(texts)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.generation_config.to_diff_dict().items() >= settings.items()
    assert not torch.equal(model.lm_head.weight, state(theirs)["lm_head.weight"])

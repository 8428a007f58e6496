"""Every tensor of a folder is used, is known to be no weight, or is refused by its name, as
transformers reports what a model of its own does not take.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later
from safetensors.torch import load_file, save_file

from popxl_gpt.demo.convert import main as convert
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.checkpoints.manifest import manifest_text
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError
from tests.faults import tensors_changed

pytestmark = pytest.mark.slow
transformers = Later("transformers")
SIZES = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 16, "head_dim": 6,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 37, "n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 4}
LAST = {"gpt2": "transformer.h.2.", "llama": "model.layers.2.", "qwen3": "model.layers.2."}
"""How tensors of the last layer begin."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def model_of(kind: str, **changes) -> torch.nn.Module:
    torch.manual_seed(1)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes}))
    name = {"llama": "Llama", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.fixture(params=LAST)
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(kind, tmp_path) -> Path:
    """A model of three layers, as transformers saves it."""
    model_of(kind).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def change(folder: Path, **values) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(folder / WEIGHTS), **named}, folder / WEIGHTS, {"format": "pt"})


def refusal(folder: Path) -> str:
    """What is said of a folder, of which nothing is read before."""
    weights = HuggingFaceFolder(folder).weights
    with pytest.raises(UserError) as found:
        next(weights())
    assert str(folder) in str(found.value) and "\n" not in str(found.value)
    return str(found.value)


def unexpected(folder: Path) -> "set[str]":
    """The tensors of a folder that transformers does not take."""
    kind = transformers.AutoModelForCausalLM
    return set(kind.from_pretrained(folder, output_loading_info=True)[1]["unexpected_keys"])


def test_a_layer_that_the_configuration_lacks_is_refused_by_its_tensors(kind, folder, tmp_path):
    whole = HuggingFaceFolder(folder).weights()
    assert sum(name.startswith("decoder.2.") for name, _ in whole) > 0
    layers = {"n_layer": 2} if kind == "gpt2" else {"num_hidden_layers": 2}
    change(folder, **layers, **({"layer_types": None} if kind == "qwen3" else {}))
    dropped = {name for name in load_file(folder / WEIGHTS) if name.startswith(LAST[kind])}
    # whose pattern for masks, attn.bias, fits c_attn.bias, too
    assert unexpected(folder) == dropped - {"transformer.h.2.attn.c_attn.bias"}
    told = refusal(folder)
    assert sum(f"{name} is none of its tensors" in told for name in dropped) == 3
    assert f" and {len(dropped) - 3} more. Use the config.json of these weights." in told
    with pytest.raises(UserError, match="none of its tensors"):
        convert(["from_hugging_face", str(folder), str(tmp_path / "ours")])
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "name",
    ["score.weight", "lora", "extra.bias", "transformer.h.0.attn.c_attn.weight_scale", "attn.bias"],
)
def test_what_is_no_tensor_of_the_model_is_refused_by_name(kind, folder, name):
    if name == "lora":
        name = f"base_model.model.{LAST[kind]}attn.lora_A.weight"
    add(folder, **{name: torch.ones(2, 2)})
    if name != "attn.bias":  # which transformers takes to be anybody's mask
        assert unexpected(folder) == {name}
    assert f"{name} is none of its tensors. Use" in refusal(folder)


def test_masks_and_frequencies_are_known_to_be_no_weights(kind, folder):
    before = dict(HuggingFaceFolder(folder).weights())
    for layer in range(3):
        if kind == "gpt2":
            names = [f"transformer.h.{layer}.attn.{name}" for name in ("bias", "masked_bias")]
        else:
            names = [
                f"model.layers.{layer}.self_attn.rotary_emb.inv_freq",
                "model.rotary_emb.inv_freq",
            ]
        add(folder, **{name: torch.rand(3) for name in names})
    assert not {name for name in unexpected(folder) if not name.endswith("masked_bias")}
    after = dict(HuggingFaceFolder(folder).weights())
    assert before.keys() == after.keys()
    assert all(array.tobytes() == after[name].tobytes() for name, array in before.items())


@pytest.mark.parametrize("harm", [None, "a bit", "a sign", "a shape", "a type"])
def test_a_head_beside_a_tied_embedding_is_the_same_bits(kind, tmp_path, harm):
    model_of(kind, tie_word_embeddings=True).save_pretrained(tmp_path)
    words = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    embedding = load_file(tmp_path / WEIGHTS)[words]
    embedding[0, 0] = 0.0
    add(tmp_path, **{words: embedding})
    before = dict(HuggingFaceFolder(tmp_path).weights())
    head = embedding.clone()
    if harm == "a bit":
        head.view(torch.int32)[5, 5] += 1
    if harm == "a sign":
        head[0, 0] = -0.0
    head = {"a shape": head[:-1].clone(), "a type": head.double()}.get(harm, head)
    add(tmp_path, **{"lm_head.weight": head})
    if harm is None:
        after = dict(HuggingFaceFolder(tmp_path).weights())
        assert all(np.array_equal(after[name], array) for name, array in before.items())
        return
    says = {
        "a shape": "lm_head.weight has shape [36, 24], not [37, 24]",
        "a type": "lm_head.weight: got F64; expected float32, float16 or bfloat16.",
    }
    assert says.get(harm, f"got lm_head.weight that is not {words}; expected one") in refusal(
        tmp_path
    )


def shards(folder: Path, kind: str) -> "list[Path]":
    """Lets transformers save the model in several files."""
    (folder / WEIGHTS).unlink()
    model_of(kind).save_pretrained(folder, max_shard_size="8KB")
    return sorted(folder.glob("model-*.safetensors"))


def rename(name: str, tensor: str) -> "Callable[[Path, str], None]":
    def harm(folder: Path, kind: str) -> None:
        found = load_file(folder / WEIGHTS)
        add(folder, **{name: found[tensor if kind == "gpt2" else "model.norm.weight"]})

    return harm


def name_one_more(folder: Path, kind: str) -> None:
    shards(folder, kind)
    index = json.loads((folder / INDEX).read_text())
    last = max(index["weight_map"].values())
    index["weight_map"]["model.layers.9.weight"] = last
    (folder / INDEX).write_text(json.dumps(index))


def drop_a_shard_of_the_index(folder: Path, kind: str) -> None:
    last = shards(folder, kind)[-1]
    index = json.loads((folder / INDEX).read_text())
    kept = {n: file for n, file in index["weight_map"].items() if file != last.name}
    (folder / INDEX).write_text(json.dumps({"weight_map": kept}))


def double(folder: Path, kind: str) -> None:
    first, second, *_ = shards(folder, kind)
    more = next(iter(load_file(second).items()))
    save_file({**load_file(first), more[0]: more[1]}, first)


HARMS = {
    "a tensor under two names": (
        rename("ln_f.weight", "transformer.ln_f.weight"), ("ln_f.weight", "norm.weight")),
    "a tensor in two files": (double, (" has, too, as ",)),
    "a tensor that the index alone has": (name_one_more, ("got no model.layers.9.weight, which the index names",)),
    "a file that the index has not": (drop_a_shard_of_the_index, (" beside model-00001-of-",)),
    "files of another model": (
        lambda folder, kind: [shards(folder, kind), model_of(kind).save_pretrained(folder.with_name("b")),
            shutil.copy(folder.with_name("b") / WEIGHTS, folder)],
        ("got model.safetensors beside model-00001-of-",)),
    "files without their index": (
        lambda folder, kind: [shards(folder, kind), (folder / INDEX).unlink()],
        ("got model-00001-of-", f"without {INDEX}; expected both")),
    "an adapter beside the model": (
        lambda folder, kind: (folder / "adapter_config.json").write_text("{}"),
        ("got an adapter of peft; expected a whole model",)),
    "floats that are to be quantized": (
        lambda folder, kind: change(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ("config.json: got quantization_config; expected a model whose weights are floats",)),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"], indirect=True)
def test_a_folder_of_which_a_part_would_be_left_out_is_refused(kind, folder, harm):
    if harm == "a tensor under two names" and kind == "llama":
        add(folder, **{"norm.weight": load_file(folder / WEIGHTS)["model.norm.weight"]})
    else:
        HARMS[harm][0](folder, kind)
    told = refusal(folder)
    assert any(words in told for words in HARMS[harm][1]), told


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_a_checkpoint_with_tensors_that_its_model_has_not_is_refused(folder, tmp_path):
    convert(["from_hugging_face", str(folder), str(tmp_path / "ours")])
    saved = find_trained(tmp_path / "ours")
    assert [name for name, _ in saved.weights()] == [*model_table(saved.config.model)]
    file = saved.folder / "decoder.1.safetensors"
    for name in ("weights.attention.qkv.lora_a", "weights.gate.weight", "more"):
        whole = {path: path.read_bytes() for path in saved.folder.iterdir()}
        tensors_changed(str(file), **{name: np.zeros((24, 2), np.float32)})(Path())
        with pytest.raises(UserError) as found:
            list(find_trained(tmp_path / "ours").weights())
        says = f"decoder.1.safetensors: got tensors that its model has not: {name}; expected"
        assert says in str(found.value)
        with pytest.raises(UserError, match="tensors that its model has not"):
            convert(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_a_checkpoint_of_more_layers_than_it_says_is_refused(folder, tmp_path):
    convert(["from_hugging_face", str(folder), str(tmp_path / "ours")])
    path = find_trained(tmp_path / "ours").folder / "checkpoint.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    content["config"]["model"]["layers"] = 2
    path.write_text(manifest_text(content))
    with pytest.raises(UserError, match="a list without all files; expected one for each layer"):
        find_trained(tmp_path / "ours")

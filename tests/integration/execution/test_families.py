"""Families of models: loss, gradients, logits and texts of transformers, and folders both ways."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.quick import Later, cases
from safetensors.torch import load_file, save_file

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.gemma import GEMMA2, GEMMA3
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.execution.exchange.families.gpt_neox import GPT_NEOX
from popxl_gpt.execution.exchange.families.known import family_of
from popxl_gpt.execution.exchange.families.llama import LLAMA
from popxl_gpt.execution.exchange.families.mistral import MISTRAL
from popxl_gpt.execution.exchange.families.olmo2 import OLMO2
from popxl_gpt.execution.exchange.families.olmo3 import OLMO3
from popxl_gpt.execution.exchange.families.phi3 import PHI3
from popxl_gpt.execution.exchange.families.qwen2 import QWEN2
from popxl_gpt.execution.exchange.families.qwen3 import QWEN3
from popxl_gpt.execution.exchange.families.smollm3 import SMOLLM3
from popxl_gpt.execution.exchange.hugging_face import HuggingFaceFolder, write_hugging_face
from popxl_gpt.execution.exchange.hugging_face_files import as_precision
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.inference import generation, logits
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import UserError
from tests.integration.gpt_oracle import distance, random_batch, random_weights, small
from tests.integration.plain_adamw import PlainAdamW
from tests.integration.runs import batches, own_gradients_of, run_job, train

transformers = Later("transformers")
SIZES = {
    "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 16, "head_dim": 6,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
OURS = {
    "heads": 4, "key_value_heads": 2, "feed_forward_size": 40, "norm": "rms_norm",
    "position_embedding": "rotary", "activation": "swiglu", "biases": False,
}  # fmt: skip


def rope(kind: str, **values: object) -> "dict[str, object]":
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **values}}


PLAIN = {
    "key_value_heads": 4, "norm": "layer_norm", "position_embedding": "learned",
    "activation": "gelu", "biases": True,
}  # fmt: skip
NEOX = {"position_embedding": "rotary", "rotary_base": 100.0, "rotary_fraction": 0.4}


def by_kind(full: "dict[str, object]", base: float) -> "dict[str, object]":
    sliding = {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


# of each: the family, their settings, ours
MODELS = {
    "tied llama": (
        LLAMA,
        {"tie_word_embeddings": True, **rope("default")},
        {"rotary_base": 100.0, "layer_norm_eps": 1e-6},
    ),
    "llama 3.1": (
        LLAMA,
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=0.5,
            high_freq_factor=2.0,
            original_max_position_embeddings=8,
        ),
        {
            "tied_head": False,
            "layer_norm_eps": 1e-6,
            "rotary_base": 100.0,
            "rotary_scaling": "llama3",
            "rotary_factor": 8.0,
            "rotary_slow_turns": 0.5,
            "rotary_fast_turns": 2.0,
            "rotary_original_positions": 8,
        },
    ),
    "llama, linear": (
        LLAMA,
        {"rms_norm_eps": 1e-5, **rope("linear", factor=4.0)},
        {
            "tied_head": False,
            "rotary_base": 100.0,
            "rotary_scaling": "linear",
            "rotary_factor": 4.0,
        },
    ),
    "mistral nemo": (
        MISTRAL,
        {"rms_norm_eps": 1e-5, "head_dim": 10, "num_attention_heads": 2, "sliding_window": None},
        {"tied_head": False, "heads": 2, "head_size": 10},
    ),
    "qwen2, yarn": (
        QWEN2,
        {
            "rms_norm_eps": 1e-5,
            **rope("yarn", factor=2.0, original_max_position_embeddings=8, beta_fast=4.0),
        },
        {
            "tied_head": False,
            "qkv_biases": True,
            "rotary_base": 100.0,
            "rotary_scaling": "yarn",
            "rotary_factor": 2.0,
            "rotary_fast_turns": 4.0,
            "rotary_original_positions": 8,
        },
    ),
    "qwen3": (
        QWEN3,
        {"rms_norm_eps": 1e-5, "head_dim": 10},
        {"tied_head": False, "qk_norm": True, "head_size": 10},
    ),
    "gpt2, exact gelu": (
        GPT2,
        {
            "n_embd": 24,
            "n_head": 4,
            "n_layer": 2,
            "n_inner": 40,
            "n_positions": 16,
            "activation_function": "gelu",
        },
        {**PLAIN, "max_positions": 16, "activation": "gelu_exact"},
    ),
    "pythia": (
        GPT_NEOX,
        rope("default", partial_rotary_factor=0.4),
        {
            **PLAIN,
            **NEOX,
            "tied_head": False,
            "activation": "gelu_exact",
            "parallel_branches": True,
        },
    ),
    "gpt-neox, tied, linear, one branch after the other": (
        GPT_NEOX,
        {
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            **rope("linear", factor=4.0, partial_rotary_factor=0.4),
        },
        {**PLAIN, **NEOX, "rotary_scaling": "linear", "rotary_factor": 4.0},
    ),
    "phi-3": (
        PHI3,
        {"sliding_window": 5, **rope("default", partial_rotary_factor=0.4)},
        {
            "tied_head": False,
            "rotary_base": 100.0,
            "rotary_fraction": 0.4,
            "layer_pattern": ("sliding",),
            "window": 5,
        },
    ),
    "mistral with windows": (
        MISTRAL,
        {"rms_norm_eps": 1e-5, "head_dim": 6, "sliding_window": 5},
        {"tied_head": False, "layer_pattern": ("sliding",), "window": 5},
    ),
    "qwen2 with windows in upper layers": (
        QWEN2,
        {
            "rms_norm_eps": 1e-5,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        {
            "tied_head": False,
            "qkv_biases": True,
            "layers": 3,
            "layer_pattern": ("full", "sliding", "sliding"),
            "window": 4,
        },
    ),
    "olmo 2": (OLMO2, {"head_dim": 6}, {"tied_head": False, **OLMO2.settings}),
    "olmo 3": (
        OLMO3,
        {
            "num_hidden_layers": 5,
            "sliding_window": 3,
            **by_kind(
                {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "factor": 2.0,
                    "beta_fast": 4.0,
                    "original_max_position_embeddings": 8,
                },
                100.0,
            ),
        },
        {
            **OLMO3.settings,
            "tied_head": False,
            "layers": 5,
            "layer_pattern": ("sliding", "sliding", "sliding", "full"),
            "window": 3,
            "rotary_base": 100.0,
            "rotary_scaling": "yarn",
            "rotary_factor": 2.0,
            "rotary_fast_turns": 4.0,
            "rotary_original_positions": 8,
            "sliding_rotary_scaling": False,
        },
    ),
    "smollm3": (
        SMOLLM3,
        {"rms_norm_eps": 1e-5, "no_rope_layers": [1, 0]},
        {"layer_pattern": ("full", "nope"), "rotary_base": 2e6},
    ),
    "gemma 2": (
        GEMMA2,
        {
            "rms_norm_eps": 1e-5,
            "head_dim": 10,
            "query_pre_attn_scalar": 17,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 3,
        },
        {
            **GEMMA2.settings,
            "head_size": 10,
            "embedding_scale": math.sqrt(24),
            "attention_scale": 17**-0.5,
            "score_softcap": 2.0,
            "logit_softcap": 3.0,
            "layer_pattern": ("sliding", "full"),
            "window": 3,
        },
    ),
    "gemma 3": (
        GEMMA3,
        {
            "rms_norm_eps": 1e-5,
            "head_dim": 10,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 12,
            "sliding_window": 3,
            **by_kind({"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}, 10.0),
        },
        {
            **GEMMA3.settings,
            "layers": 3,
            "head_size": 10,
            "embedding_scale": math.sqrt(24),
            "attention_scale": 12**-0.5,
            "layer_pattern": ("sliding", "full"),
            "window": 3,
            "rotary_base": 100.0,
            "rotary_scaling": "linear",
            "rotary_factor": 4.0,
            "sliding_rotary_base": 10.0,
            "sliding_rotary_scaling": False,
        },
    ),
}
DYNAMIC = (
    LLAMA,
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 8, **rope("dynamic", factor=2.0)},
    {
        "tied_head": False,
        "rotary_base": 100.0,
        "rotary_scaling": "dynamic",
        "rotary_factor": 2.0,
        "rotary_original_positions": 8,
    },
)
"""Its texts are longer than its positions."""
HEAD = "lm_head.weight"
LAYOUTS = {
    "one": {},
    "tp": {"tensor_parallel_1": 2, "tensor_parallel_2": 2},
    "dp": {"data_parallel": 2},
}
ALL = {"data_parallel": 2, "tensor_parallel_1": 2, "tensor_parallel_2": 2}


def their_model(family: Family, **changes: object) -> torch.nn.Module:
    values = {**SIZES, **changes}
    kind = getattr(transformers, family.architecture)
    torch.manual_seed(1)
    model = kind(kind.config_class(**values))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # gains are not one
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def in_module(
    family: Family, arrays: "dict[str, np.ndarray]", table: dict
) -> "dict[str, np.ndarray]":
    """Of our parameters, by the names of the class in transformers, which may be others in files."""
    found = {}
    for name, array in arrays.items():
        found.update(family.split(name, table[name], array))
    return {HEAD if name == family.head_matrix else name: a for name, a in found.items()}


def with_weights(
    family: Family, config: dict, weights: "dict[str, np.ndarray]", table: dict
) -> torch.nn.Module:
    """Their model in float64 with our weights."""
    model = their_model(family, **config)
    tensors = in_module(family, weights, table)
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(array) for name, array in tensors.items()}, strict=False
    )
    assert not unexpected and set(missing) <= {HEAD}
    return model.double()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases(LAYOUTS, lambda layout: layout == "tp"))
@pytest.mark.parametrize("name", [*MODELS, "llama, dynamic"])
def test_loss_and_every_gradient_equal_those_of_transformers(name, layout):
    family, theirs, ours = {**MODELS, "llama, dynamic": DYNAMIC}[name]
    config = small(**{**OURS, **ours, **LAYOUTS[layout]})
    table, weights = model_table(config.model), random_weights(config.model)
    model = with_weights(family, theirs, weights, table)
    words, labels = (torch.from_numpy(array) for array in random_batch(config))
    found = model(input_ids=words).logits
    expected = torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())
    expected.backward()
    loss, gradients, _ = own_gradients_of(config)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    got = in_module(family, gradients, table)
    wanted = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert got.keys() == wanted.keys()
    worst = max((distance(got[name], array), name) for name, array in wanted.items())
    assert worst[0] < 1e-5, worst


TP = {"tensor_parallel_1": 2, "tensor_parallel_2": 2}
# how each model's steps are executed
EXECUTIONS: "dict[str, dict[str, object]]" = {
    "tied llama": {"data_parallel": 2, "device_iterations": 2},
    "llama 3.1": {**TP, "host_memory": 200_000},
    "llama, linear": {"tensor_parallel_2": 2},
    "mistral nemo": {"data_parallel": 2, "recomputation": False},
    "qwen2, yarn": {**ALL, "widening": 2, "micro_batch_size": 1},
    "qwen3": {"tensor_parallel_1": 2, "device_iterations": 4, "host_memory": 200_000},
    "gpt2, exact gelu": {**TP, "widening": 2, "micro_batch_size": 1},
    "pythia": {**TP, "host_memory": 250_000},
    "gpt-neox, tied, linear, one branch after the other": {"data_parallel": 2},
    "phi-3": {**TP, "recomputation": False},
    "mistral with windows": {"data_parallel": 2, "widening": 2, "micro_batch_size": 1},
    "qwen2 with windows in upper layers": {"tensor_parallel_1": 2, "host_memory": 200_000},
    "olmo 2": {**ALL, "recomputation": False},
    "olmo 3": TP,
    "smollm3": {"data_parallel": 2, "recomputation": False},
    "gemma 2": {**TP, "head_serialisation": 3},
    "gemma 3": {"data_parallel": 2, "device_iterations": 4},
}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twelve_steps_are_those_of_a_plain_loop(name, tmp_path):
    family, theirs, ours = MODELS[name]
    files = {"memmap_dir": str(tmp_path)} if "host_memory" in EXECUTIONS[name] else {}
    config = small(
        **{**OURS, **ours, "micro_batch_size": 2, **EXECUTIONS[name], **files},
        **{"steps": 12, "learning_rate": 2e-3, "epsilon": 1e-6, "weight_decay": 0.0},
        max_norm=0.0,
    )
    results, after = train(config)
    table, weights = model_table(config.model), random_weights(config.model)
    model, rates = with_weights(family, theirs, weights, table), config.training
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = PlainAdamW(groups, 0.0, (rates.beta1, rates.beta2), rates.epsilon)
    for step, (words, labels) in enumerate(batches(config)):
        found = model(input_ids=torch.from_numpy(words)).logits
        loss = torch.nn.functional.cross_entropy(
            found.flatten(0, 1), torch.from_numpy(labels).flatten()
        )
        model.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = learning_rate(rates, step)
        optimizer.step()
        assert results[step].loss == pytest.approx(loss.item(), rel=2e-5), step
    expected = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for name, part in in_module(family, after, table).items():
        np.testing.assert_allclose(part, expected[name], rtol=1e-3, atol=2e-5)


@pytest.fixture(params=MODELS)
def folder(request, tmp_path) -> "tuple[Path, torch.nn.Module]":
    """A folder as transformers saves it, and its model."""
    return saved_by_them(request.param, tmp_path / "theirs")


def saved_by_them(name: str, path: Path, kind: str = "float32") -> "tuple[Path, torch.nn.Module]":
    family, theirs, _ = MODELS[name]
    their_model(family, **theirs).to(getattr(torch, kind)).save_pretrained(
        path, max_shard_size="8KB"
    )
    return path, loaded_by_them(path, kind)


def loaded_by_them(path: Path, kind: str) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, kind), attn_implementation="eager"
    )
    return model.eval()


def tensors(path: Path) -> "dict[str, torch.Tensor]":
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def their_logits(model: torch.nn.Module, words: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(words)).logits.double().numpy()


def own_logits(saved: SavedRun, words: np.ndarray, **changes: object) -> np.ndarray:
    sizes = {"sequence_length": 8, "global_batch_size": 2, "micro_batch_size": 1}
    positions = {"max_positions": saved.config.model.positions}
    config = override(saved.config, **{**sizes, **positions, **TP, **changes})
    session = generation(config, 8)
    write_whole_weights(session, config, saved.weights())
    with session:
        return logits(session, config, words, np.tile(np.arange(8), (2, 1))).reshape(2, 8, 37)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_gives_its_logits_and_goes_back_bit_by_bit(name, kind, tmp_path, capsys):
    path, model = saved_by_them(name, tmp_path / "theirs", kind)
    convert(["from_hugging_face", str(path), str(tmp_path / "ours")])
    saved = find_trained(tmp_path / "ours")
    words = np.random.default_rng(1).integers(0, 37, (2, 8))
    rounded, expected = (
        their_logits(loaded_by_them(path, dtype), words) for dtype in (kind, "float32")
    )
    np.testing.assert_allclose(own_logits(saved, words), expected, rtol=1e-5, atol=1e-5)
    if kind == "bfloat16":  # as far from the numbers as theirs, which round as often
        ours = own_logits(saved, words, precision="bfloat16", **dict.fromkeys(TP, 1))
        assert 1e-4 < distance(ours, expected) < 1.25 * distance(rounded, expected)

    convert(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back")])
    # without windows, a Mistral that a Llama can be is one
    has_windows = getattr(model.config, "sliding_window", None) is not None
    loaded = type(model).__name__
    loaded = loaded if has_windows else loaded.replace("Mistral", "Llama")
    assert f"transformers.{loaded}.from_pretrained" in capsys.readouterr().out
    before, after = tensors(path), tensors(tmp_path / "back")
    before.pop("lm_head.weight", None) if model.config.tie_word_embeddings else None
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[name]) for name, t in before.items())
    assert {t.dtype for t in after.values()} == {getattr(torch, kind)}
    own = ["--family", model.config.model_type, "--overwrite"]
    convert(["to_hugging_face", str(tmp_path / "ours"), str(tmp_path / "back"), *own])
    again = loaded_by_them(tmp_path / "back", kind)
    assert type(again) is type(model)
    assert np.array_equal(their_logits(again, words), rounded)


@pytest.mark.sampled(3)
@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers(folder, tmp_path):
    path, model = folder
    convert(["from_hugging_face", str(path), str(tmp_path / "ours")])
    saved = find_trained(tmp_path / "ours")
    config = override(saved.config, **{**ALL, "data_parallel": 1})
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5], [3, 5], [8, 9, 7, 9], [3, 2], [3, 8, 4, 6, 2], [6]]
    cached = CachedModel(config, len(prompts), 5, 10)
    write_whole_weights(cached.session, cached.config, saved.weights())
    got = [[] for _ in prompts]
    with cached.session:
        rows = cached.start(prompts)
        for _ in range(10):
            for text, row in zip(got, rows, strict=True):
                text.append(int(row.argmax()))
            rows = cached.append([text[-1] for text in got])
    for prompt, text in zip(prompts, got):
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found[0, len(prompt) :].tolist() == text


def change(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


REFUSED = {
    "another activation": ({"hidden_act": "gelu"}, 'got hidden_act "gelu"; expected silu'),
    "biases": ({"attention_bias": True}, "got attention_bias true; expected false"),
    "positions that are scaled otherwise": (
        {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
        'got rope_type "longrope"; expected one of default, linear, dynamic, llama3, yarn, as',
    ),
    "positions of an older form": (
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        'got rope_type "su"; expected one of',
    ),
    "scaled positions without a factor": (
        {"rope_scaling": {"type": "linear"}},
        "config.json: rotary_factor: got None; expected a number, more than 0.",
    ),
    "positions by kinds of layers": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "got rope_parameters with several values of full_attention; expected one kind of",
    ),
    "positions of a Gemma that are not by kinds of layers": (
        {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default", "rope_theta": 9}},
        "for all layers, which transformers passes over in this family; expected a record for each",
    ),
    "yarn of another form": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
        "got mscale 0.7; expected null, as models have that are known here.",
    ),
    "half of a head turns": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "got partial_rotary_factor 0.5; expected 1.0",
    ),
    "wider heads": ({"head_dim": 8}, "q_proj.weight has shape [24, 24], not [32, 24]"),
    "heads that do not fit": ({"num_key_value_heads": 3}, "multiple of key_value_heads = 3"),
    "a tied head": ({"tie_word_embeddings": True}, "lm_head.weight that is not model.embed_tokens"),
    "another type": ({"model_type": "qwen3"}, "self_attn.q_norm.weight is missing"),
    "experts": ({"model_type": "mixtral"}, 'got model_type "mixtral"; expected one of gpt2, llama'),
    "a window of no tokens": (
        {"model_type": "mistral", "sliding_window": 0},
        "window: got 0; expected a whole number, at least 1",
    ),
    "windows that are not used": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]},
        "got sliding_attention among layer_types with use_sliding_window null; expected true",
    ),
    "kinds of more layers than there are": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
        "got 3 layer_types for 2 layers; expected one a layer",
    ),
    "other attention in named layers": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
        'got layer_types "chunked_attention"; expected one of full_attention, sliding_attention',
    ),
}


@pytest.mark.slow
def test_what_is_another_model_is_refused_in_words(tmp_path):
    path = tmp_path / "theirs"
    their_model(LLAMA).save_pretrained(path)
    kept = (path / "config.json").read_text()
    for name, (values, words) in REFUSED.items():
        (path / "config.json").write_text(kept)
        change(path, **values)
        with pytest.raises(UserError) as found:
            convert(["from_hugging_face", str(path), str(tmp_path / "ours")])
        assert words in str(found.value), (name, str(found.value))
        assert not (tmp_path / "ours").exists()


LINEAR = {"rotary_scaling": "linear", "rotary_factor": 2.0}
YARN = {
    "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_positions": 16,
    "rotary_slow_turns": 1.0, "rotary_fast_turns": 32.0,
}  # fmt: skip
# what is in a folder's config.json, and what of our model follows
FOUND = {
    "a base beside": ({"rope_parameters": None, "rope_theta": 321.0}, {"rotary_base": 321.0}),
    "an older record": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 321.0},
        {"rotary_base": 321.0, **LINEAR},
    ),
    "an older record with today's name of the kind": (
        {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "beta_fast": None}},
        YARN,
    ),
    "yarn whose factor follows": (
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 8}},
        {**YARN, "rotary_factor": 2.0, "rotary_original_positions": 8},
    ),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rotary_scaling": "dynamic", "rotary_factor": 2.0, "rotary_original_positions": 16},
    ),
    "the base of a Gemma's windows beside an OLMo": (
        {"model_type": "olmo3", "rope_local_base_freq": 7.0, "rope_parameters": None},
        {"sliding_rotary_base": None},
    ),
    "no heads of keys and values": ({"num_key_value_heads": ...}, {"key_value": 4}),
    "no size of a head": ({"head_dim": ...}, {"head_size": None}),
    "no size of a head, in words": ({"head_dim": None}, {"head_size": None}),
    "a Mistral without windows": ({"model_type": "mistral", "sliding_window": None}, {}),
    "a Mistral with windows as long as its texts": (
        {"model_type": "mistral", "sliding_window": 16},
        {},
    ),
    "a Mistral that does not say how long windows are": (
        {"model_type": "mistral", "max_position_embeddings": 32768},
        {"layer_pattern": ("sliding",), "window": 4096},
    ),
    "windows in named layers": (
        {
            "model_type": "qwen3",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "use_sliding_window": True,
        },
        {"kinds": ("sliding", "full"), "window": 8},
    ),
    "a Qwen2 that names windows and has none": (
        {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1},
        {"has_qkv_biases": True},
    ),
    "a Qwen2 whose windows begin above its layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
        {"has_qkv_biases": True},
    ),
    "a Qwen3 that does not say how wide heads are": (
        {"model_type": "qwen3", "head_dim": ...},
        {"head_size": 128, "qk_norm": True},
    ),
}


@pytest.mark.slow
def test_configurations_are_read_as_they_are_found(tmp_path):
    their_model(LLAMA).save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    for name, (changes, expected) in FOUND.items():
        values = {n: v for n, v in {**kept, **changes}.items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        model = HuggingFaceFolder(tmp_path).model
        assert {n: getattr(model, n) for n in expected} == expected, name


@pytest.mark.slow
def test_a_folder_in_bfloat16_of_several_files_with_other_tensors_is_read(tmp_path):
    path = tmp_path / "theirs"
    model = their_model(QWEN2).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="8KB")
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    file, beside = path / values["weight_map"]["model.norm.weight"], "model.rotary_emb.inv_freq"
    save_file({**load_file(file), beside: torch.ones(3)}, file, {"format": "pt"})
    values["weight_map"][beside] = file.name
    index.write_text(json.dumps(values))
    convert(["from_hugging_face", str(path), str(tmp_path / "ours")])
    before = tensors(path)
    assert before.pop(beside) is not None and len({*path.glob("*.safetensors")}) > 2
    for precision in ("none", "float32", "bfloat16"):
        out = tmp_path / precision
        words = ["to_hugging_face", tmp_path / "ours", out, "--precision", precision]
        convert([*map(str, words)])
        after = tensors(out)
        assert before.keys() == after.keys()
        kind = torch.float32 if precision == "float32" else torch.bfloat16
        assert all(torch.equal(t.to(kind), after[name]) for name, t in before.items())
        assert {t.dtype for t in after.values()} == {kind}
        assert transformers.AutoConfig.from_pretrained(out).dtype == kind


@pytest.mark.slow
def test_a_gpt_neox_is_read_whichever_name_its_head_has(tmp_path):
    _, theirs, _ = MODELS["pythia"]
    model, of_name = their_model(GPT_NEOX, **theirs), {}
    for name, is_original in (("embed_out.weight", True), (HEAD, False)):
        path = tmp_path / name
        model.save_pretrained(path, save_original_format=is_original)
        assert name in tensors(path)
        of_name[name] = dict(HuggingFaceFolder(path).weights())
    one, other = of_name.values()
    assert all(np.array_equal(other[name], array) for name, array in one.items())
    assert np.array_equal(one["head.output.weight"], model.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_weights_are_rounded_as_torch_rounds_and_those_beyond_are_refused(precision):
    kind, generator = getattr(torch, precision), np.random.default_rng(3)
    array = (generator.standard_normal((64, 33)) * 10.0 ** generator.integers(-9, 4)).astype("f4")
    array[0, :3] = 0.0, -0.0, 1.00390625  # half way between two of bfloat16
    found = as_precision("weight", array, precision)
    back = torch.from_numpy(found)
    expected = torch.from_numpy(array).to(kind)
    assert torch.equal(back.view(torch.int16), expected.view(torch.int16))
    with pytest.raises(UserError, match=f"--precision: got {precision} for weight, which has"):
        as_precision("weight", np.array([3.4e38], np.float32), precision)


@pytest.mark.slow
def test_a_llama_whose_width_is_no_multiple_of_its_heads_goes_out_as_a_mistral(tmp_path):
    config = small(**{**OURS, "heads": 5, "key_value_heads": 1, "head_size": 6}, tied_head=False)
    weights = random_weights(config.model)
    family = write_hugging_face(tmp_path, config.model, iter(weights.items()), None, 10**9)
    assert family is MISTRAL
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.head_dim == 6 and model.config.sliding_window is None
    with pytest.raises(
        UserError, match="--family: got llama; expected one .*: mistral, phi3, popxl_gpt"
    ):
        family_of(config.model, "llama")
    again = dict(HuggingFaceFolder(tmp_path).weights())
    assert all(np.array_equal(again[name], array) for name, array in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_few_words_that_was_trained_here_is_loaded_and_pads_with_none(name, tmp_path):
    family, _, ours = MODELS[name]
    model = small(**{**OURS, **ours}).model
    weights = iter(random_weights(model).items())
    write_hugging_face(tmp_path, model, weights, None, 10**9, family_name=family.model_type)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == family.architecture
    assert theirs.get_input_embeddings().padding_idx is None


@pytest.mark.slow
def test_a_run_begins_with_a_llama_and_its_model_loads_in_transformers(tmp_path):
    model = their_model(LLAMA)
    model.save_pretrained(tmp_path / "theirs")
    convert(["from_hugging_face", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    run_job(
        "--config", tmp_path / "ours/config.yml", "--name", "run", "--run_folder", tmp_path,
        "--global_batch_size", 2, "--steps", 2, "--learning_rate", 0.01, "--validate_every", 1,
        "--sequence_length", 8, "--init_from", tmp_path / "theirs", "--tensor_parallel_1", 2,
    )  # fmt: skip
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    words, labels = BatchLoader(SyntheticDataset(8, 37, 42), 2, seed=42, shuffle=True).batch(0)
    with torch.no_grad():
        found = model(torch.from_numpy(words).long()).logits
    expected = torch.nn.functional.cross_entropy(
        found.reshape(-1, 37), torch.from_numpy(labels).long().reshape(-1)
    )
    assert first["loss"] == pytest.approx(expected.item(), abs=1e-5)
    convert(["to_hugging_face", str(tmp_path / "run"), str(tmp_path / "back")])
    trained = type(model).from_pretrained(tmp_path / "back")
    assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)

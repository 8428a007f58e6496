"""Configurations of published models, and such as nobody should write."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.known import FAMILIES, family_of
from popxl_gpt.execution.exchange.hugging_face_config import config_of, model_in
from popxl_gpt.execution.exchange.peft import write_peft
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.utils.errors import UserError

FILE = Path("config.json")
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 8,
}  # fmt: skip
ROPES = (LLAMA3, YARN)
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
# of each: type, sizes as above, what else is in its config.json, its parameters
PUBLISHED = {
    "Llama 2 7B": ("llama", (32000, 4096, 11008, 32, 32, 32), {}, 6_738_415_616),
    "Llama 3.2 1B": (
        "llama",
        (128256, 2048, 8192, 16, 32, 8),
        {"head_dim": 64, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "SmolLM2 135M": (
        "llama",
        (49152, 576, 1536, 30, 9, 3),
        {"tie_word_embeddings": True},
        134_515_008,
    ),
    "Mistral 7B v0.3": (
        "mistral",
        (32768, 4096, 14336, 32, 32, 8),
        {"sliding_window": None},
        7_248_023_552,
    ),
    "Mistral Nemo": (
        "mistral",
        (131072, 5120, 14336, 40, 32, 8),
        {"sliding_window": None, "head_dim": 128},
        12_247_782_400,
    ),
    "Qwen2.5 0.5B": (
        "qwen2",
        (151936, 896, 4864, 24, 14, 2),
        {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768},
        494_032_768,
    ),
    "Qwen3 0.6B": (
        "qwen3",
        (151936, 1024, 3072, 28, 16, 8),
        {"tie_word_embeddings": True, "head_dim": 128, "sliding_window": None},
        596_049_920,
    ),
    "Pythia 70m": ("gpt_neox", (50304, 512, 2048, 6, 8, 8), {}, 70_426_624),
    "Pythia 1.4b": ("gpt_neox", (50304, 2048, 8192, 24, 16, 16), {}, 1_414_647_808),
    "GPT-NeoX 20B": (
        "gpt_neox",
        (50432, 6144, 24576, 44, 64, 64),
        {"hidden_act": "gelu_fast"},
        20_554_567_680,
    ),
    "Phi-3 mini": (
        "phi3",
        (32064, 3072, 8192, 32, 32, 32),
        {"sliding_window": 2047},
        3_821_079_552,
    ),
    "Phi-4": ("phi3", (100352, 5120, 17920, 40, 40, 10), {}, 14_659_507_200),
    "OLMo 2 7B": ("olmo2", (100352, 4096, 11008, 32, 32, 32), {}, 7_298_617_344),
    "SmolLM3 3B": ("smollm3", (128256, 2048, 11008, 36, 16, 4), {}, 3_075_098_624),
    "Gemma 2 2B": ("gemma2", (256000, 2304, 9216, 26, 8, 4), {}, 2_614_341_888),
    "Gemma 3 1B": (
        "gemma3_text",
        (262144, 1152, 6912, 26, 4, 1),
        {"sliding_window": 512, "rope_local_base_freq": 1e4},
        999_885_952,
    ),
}


ALIKE = {"mistral": ("llama",), "phi3": ("llama", "mistral")}
"""Families that a model of another may go out as."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_and_go_out_as_themselves(name):
    kind, sizes, others, parameters = PUBLISHED[name]
    values = {"model_type": kind, "rope_theta": 1e6, **dict(zip(SIZES, sizes, strict=True))}
    model = model_in(FILE, {**values, **others})
    assert parameter_count(model) == parameters
    family = family_of(model)
    assert family.model_type in (kind, *ALIKE.get(kind, ()))
    back = model_in(FILE, json.loads(json.dumps(config_of(model, family, "float32", None, None))))
    told = ("head_width", "key_value", "feed_forward", "positions", "has_qkv_biases", "tied_head")
    assert [getattr(back, n) for n in told] == [getattr(model, n) for n in told]
    rotary = [n for n in model.__dataclass_fields__ if n.startswith("rotary_")]
    assert [getattr(back, n) for n in rotary] == [getattr(model, n) for n in rotary]


def test_a_window_that_no_layer_has_stays_here():
    values = {**PLAIN, "model_type": "mistral"}
    model = replace(model_in(FILE, values), window=4)
    assert family_of(model).model_type == "llama"
    told = config_of(model, family_of(model, "mistral"), "float32", None, None)
    assert told["sliding_window"] is None


NEW = {
    "norm_placement": "after", "zero_centered_gains": True, "parallel_branches": True,
    "embedding_scale": 2.0, "rotary_fraction": 0.5, "qk_norm_over": "all", "activation": "geglu",
}  # fmt: skip


@pytest.mark.parametrize("name", NEW)
def test_a_model_with_a_setting_that_no_family_has_is_refused_by_its_name(name):
    with pytest.raises(UserError, match=f"^{name}: got {NEW[name]}; expected .* known family"):
        family_of(Model(**{name: NEW[name]}))


def test_adapters_of_a_model_of_ours_alone_are_refused_with_the_families_that_have_some(tmp_path):
    others = "gpt2, llama, mistral, .*, gemma3_text, gpt_neox, phi3"
    with pytest.raises(UserError, match=f"expected one of a family that .* has: {others}. Export"):
        write_peft(tmp_path, Model(convolution_size=2, lora_rank=4), [], None)


@pytest.mark.parametrize(
    "named, name, version",
    [
        ("org/model@v2", "org/model", "v2"),
        ("org/model", "org/model", None),
        ("there/model", "{here}/there/model", None),
        ("there/gone", "there/gone", None),
        (None, None, None),
    ],
)
def test_adapters_name_their_model_as_peft_finds_it(tmp_path, monkeypatch, named, name, version):
    monkeypatch.chdir(tmp_path)
    Path("there/model").mkdir(parents=True)
    write_peft(tmp_path, Model(lora_rank=4), [], named)
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = name and name.format(here=tmp_path)
    assert (found["base_model_name_or_path"], found.get("revision")) == (expected, version)


PLAIN = {
    **dict(zip(SIZES, (37, 24, 40, 2, 4, 2), strict=True)),
    **{"max_position_embeddings": 16, "head_dim": 6, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"sliding_window": None, "use_sliding_window": False, "max_window_layers": 1},
    **{"layer_types": None, "rope_theta": 1e4, "rope_scaling": None, "rope_parameters": None},
    **{"partial_rotary_factor": None, "original_max_position_embeddings": None},
    **{"tie_word_embeddings": False, "attention_bias": False, "eos_token_id": 1},
}
UNKNOWN = (
    ("num_local_experts", 8, "a mixture of experts; expected one feed-forward layer"),  # Mixtral
    ("num_experts", 128, "a mixture of experts; expected one feed-forward layer"),  # Qwen3
    ("n_routed_experts", 256, "a mixture of experts; expected one feed-forward layer"),  # DeepSeek
    ("moe_num_experts", 64, "a mixture of experts; expected one feed-forward layer"),  # Ernie
    ("kv_lora_rank", 512, "latent attention; expected keys and values that are projected"),
    ("q_lora_rank", 1536, "latent attention; expected keys and values that are projected"),
    ("layer_types", ["linear_attention", "full_attention"], "linear attention; expected softmax"),
    ("linear_attn_config", {"num_heads": 32}, "linear attention; expected softmax attention"),
    ("linear_conv_kernel_dim", 4, "linear attention; expected softmax attention"),  # Qwen3-Next
    ("mamba_d_state", 16, "state spaces; expected softmax attention"),
    ("is_encoder_decoder", True, "cross attention; expected decoders alone"),
    ("add_cross_attention", True, "cross attention; expected decoders alone"),
    ("cross_attention_layers", [3, 8], "cross attention; expected decoders alone"),
    ("vision_config", {"hidden_size": 1152}, "a vision tower; expected text alone"),
    ("audio_config", {"hidden_size": 1152}, "an audio tower; expected text alone"),
)


@pytest.mark.parametrize("name, value, words", UNKNOWN, ids=[name for name, *_ in UNKNOWN])
def test_an_architecture_that_no_family_has_is_refused_by_its_setting(name, value, words):
    told = "linear_attention" if name == "layer_types" else value
    problem = f"config.json: got {name} {told}, which is {words}"
    for kind in (*FAMILIES, "another", None):
        with pytest.raises(UserError, match=re.escape(problem)):
            model_in(FILE, {**PLAIN, "model_type": kind, name: value})
    for none in (None, 0, False, [], {}):
        assert model_in(FILE, {**PLAIN, "model_type": "llama", name: none}).layers == 2


VALUES = (
    *(None, True, False, 0, 1, -1, 3, 3.5, 10**400, float("inf"), float("nan"), "8", ""),
    *([], [1], [[1]], ["sliding_attention"], {}, {"a": 1}, {"rope_type": [1]}),
)


def test_no_value_of_a_configuration_is_more_than_refused():
    refused = 0
    changes = [(None, name, value) for name in PLAIN for value in VALUES]
    changes += [(rope, name, value) for rope in ROPES for name in rope for value in VALUES]
    for kind, (rope, name, value) in itertools.product(FAMILIES, changes):
        values = {**PLAIN, "model_type": kind, "rope_scaling": {**(rope or YARN)}}
        (values if rope is None else values["rope_scaling"])[name] = value
        try:
            model_in(FILE, values)
        except UserError as error:
            refused += 1
            assert str(error).startswith("config.json: "), error
    assert len(FAMILIES) * len(changes) / 4 < refused

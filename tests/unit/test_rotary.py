"""Angles of rotary positions, and the same from transformers."""

import math

import numpy as np
import pytest
import torch
from helpers.quick import Later

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.rotary import speeds, table_factor

rope = Later("transformers.modeling_rope_utils")
transformers = Later("transformers")
own_family = Later("popxl_gpt.modelling.modeling_popxl_gpt")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "linear": ("linear", {"factor": 4.0}, {"rotary_factor": 4.0}),
    "dynamic": ("dynamic", {"factor": 2.0}, {"rotary_factor": 2.0}),
    "llama3": (
        "llama3",
        {**LLAMA3, "original_max_position_embeddings": 8192},
        {"rotary_factor": 8.0, "rotary_fast_turns": 4.0, "rotary_original_positions": 8192},
    ),
    "yarn": (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"rotary_factor": 4.0, "rotary_original_positions": 32768},
    ),
    "yarn with all that it may say": (
        "yarn",
        {
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
        {
            "rotary_factor": 16.0,
            "rotary_original_positions": 4096,
            "rotary_fast_turns": 20.0,
            "rotary_slow_turns": 2.0,
            "rotary_attention_factor": 1.25,
        },
    ),
    "yarn of few positions": (
        "yarn",
        {"factor": 2.0, "original_max_position_embeddings": 3},
        {"rotary_factor": 2.0, "rotary_original_positions": 3},
    ),
}
ORIGINAL = 2048
"""Positions of transformers' configuration, which dynamic scaling compares with."""


def model_of(name: str, **changes: object) -> Model:
    kind, _, ours = CASES[name]
    values = {"rotary_original_positions": ORIGINAL, **ours, **changes}
    return Model(
        hidden_size=256, heads=4, position_embedding="rotary", rotary_scaling=kind,
        rotary_base=5e5, **values,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("length", [ORIGINAL, 3 * ORIGINAL])
@pytest.mark.parametrize("name", CASES)
def test_scaled_speeds_and_factors_are_those_of_transformers(name, length):
    kind, theirs, _ = CASES[name]
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **theirs},
    )  # fmt: skip
    expected, factor = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    model = model_of(name)
    found = speeds(model, length)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-6)
    assert table_factor(model) == pytest.approx(factor)
    assert (kind == "yarn") == (table_factor(model) != 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("length", [ORIGINAL, 3 * ORIGINAL])
@pytest.mark.parametrize("name", CASES)
def test_exported_code_has_the_same_tables(name, length):
    model = model_of(name)
    names = [n for n in Model.__dataclass_fields__ if n.startswith("rotary_")]
    config = own_family.PopxlGPTConfig(
        hidden_size=256, num_attention_heads=4, **{n: getattr(model, n) for n in names}
    )
    found = own_family.angles_of(config, torch.arange(length)[None])
    angles = np.outer(np.arange(length), speeds(model, length))
    for table, wave in zip(found, (np.cos, np.sin), strict=True):
        expected = wave(angles) * table_factor(model)
        np.testing.assert_allclose(table[0, :, 0].numpy(), expected, atol=1e-6)


def test_positions_that_are_not_scaled_turn_by_powers_of_the_base():
    model = Model(hidden_size=24, heads=4, position_embedding="rotary", rotary_base=100.0)
    expected = [1.0, 100.0 ** (-1 / 3), 100.0 ** (-2 / 3)]
    np.testing.assert_allclose(speeds(model, 7), expected)
    assert table_factor(model) == 1.0
    scaled = Model(
        hidden_size=24, heads=4, position_embedding="rotary", rotary_scaling="yarn",
        rotary_factor=math.e, rotary_original_positions=64,
    )  # fmt: skip
    assert table_factor(scaled) == pytest.approx(1.1)

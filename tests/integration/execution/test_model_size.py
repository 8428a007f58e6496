"""How large models are: counts of parameters and of work."""

import dataclasses

import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.execution.planning.model_size import flops_per_token, parameter_count
from tests.integration.gpt_oracle import hugging_face, random_weights, small


@pytest.mark.slow
def test_parameters_equal_gpt2s_published_counts():
    counts = {
        "gpt2_small": 124_439_808,
        "gpt2_medium": 354_823_168,
        "gpt2_large": 774_030_080,
        "gpt2_xl": 1_557_611_200,
    }
    assert {name: parameter_count(preset(name).model) for name in counts} == counts


@pytest.mark.slow
def test_parameters_are_those_of_hugging_faces_model_of_the_same_sizes():
    model = small(feed_forward_size=40).model
    theirs = hugging_face(model, random_weights(model))
    assert parameter_count(model) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    "changes", [{}, {"feed_forward_size": 40, "attention_serialisation": 3}, {"head_size": 10}]
)
def test_work_is_six_per_weight_of_a_product_and_that_of_attention(changes):
    """Chowdhery et al. 2022, arXiv:2204.02311, appendix B."""
    model = small(layers=5, **changes).model
    hidden, wide = model.hidden_size, model.feed_forward
    heads = model.heads * model.head_width
    weights = model.layers * (4 * heads + 2 * wide) * hidden + model.vocabulary_size * hidden
    attention = 12 * model.layers * heads * model.sequence_length
    assert flops_per_token(model) == 6 * weights + attention


def test_work_does_not_depend_on_dropout_or_precision():
    model = small().model
    other = dataclasses.replace(model, dropout=0.1, precision="bfloat16")
    assert flops_per_token(other) == flops_per_token(model)


def test_attention_counts_as_many_keys_as_each_layer_sees():
    changes = {"window": 3, "position_embedding": "rotary"}
    full, mixed = (
        small(layers=5, layer_pattern=pattern, **changes).model
        for pattern in (("full",), ("sliding", "full", "nope"))
    )
    hidden = full.sequence_length - 3
    saved = 12 * 2 * full.heads * full.head_width * hidden  # of two layers
    assert flops_per_token(full) - flops_per_token(mixed) == saved

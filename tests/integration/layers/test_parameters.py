"""Parameters as whole tensors: how they are cut, start, decay, and what Hugging Face calls them."""

import dataclasses
import math

import numpy as np
import pytest
from helpers.quick import Later

from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Role
from tests.integration.gpt_oracle import hugging_face_name, random_weights

transformers = Later("transformers")
MODEL = Model(
    layers=2, hidden_size=24, heads=4, sequence_length=6, vocabulary_size=37, max_positions=9
)
SPLITS = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (4, 8)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_joining_undoes_cutting(split):
    weights = random_weights(MODEL)
    for name, parameter in model_table(MODEL).items():
        back = parameter.unshard(parameter.shard(weights[name], *split), *split)
        np.testing.assert_array_equal(back, weights[name], err_msg=name)


def test_a_replica_holds_its_heads_of_query_key_and_value():
    table = model_table(MODEL)["decoder.0.attention.qkv.weight"]
    whole = np.broadcast_to(np.arange(72, dtype=np.float32), (24, 72))
    pieces = table.shard(whole, 2, 3)  # two tp1 pieces of 36 columns, three tp2 pieces of 8 rows
    assert pieces.shape == (6, 8, 36)
    second_of_tp1 = [*range(12, 24), *range(36, 48), *range(60, 72)]
    np.testing.assert_array_equal(pieces[3][0], second_of_tp1)


def test_the_vocabulary_is_padded_with_zeros_at_its_end():
    table = model_table(MODEL)["embedding.word.weight"]
    pieces = table.shard(np.ones((37, 24), np.float32), 4, 1)
    assert pieces.shape == (4, 10, 24)
    np.testing.assert_array_equal(pieces.reshape(40, 24).sum(axis=1), [24.0] * 37 + [0.0] * 3)


@pytest.mark.slow
def test_names_and_shapes_are_those_of_hugging_face():
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=37,
            n_positions=9,
            n_embd=24,
            n_layer=2,
            n_head=4,
            n_inner=MODEL.feed_forward,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    ours = {hugging_face_name(n): p.shape for n, p in model_table(MODEL).items()}
    theirs = {
        name: tuple(t.shape) for name, t in gpt.state_dict().items() if name != GPT2.head_matrix
    }
    assert ours == theirs


def test_fresh_weights_follow_their_roles():
    model = dataclasses.replace(MODEL, hidden_size=256, layers=8, vocabulary_size=2000)
    model = dataclasses.replace(model, token_shift=True, convolution_size=4)
    for name, parameter in model_table(model).items():
        role, array = parameter.role, parameter.initial(name, seed=3)
        if role is Role.BIAS:
            assert not array.any(), name
        elif "convolution" in name:
            assert len(array) == 3 and not array.any(), name
        elif role is Role.GAIN:
            assert (array == 1).all(), name
        elif name == "embedding.shift.weight":
            assert (array == 0.5).all(), name
        else:
            into_the_residual_stream = name.endswith(
                ("attention.output.weight", "feed_forward.down.weight")
            )
            expected = 0.02 / 4 if into_the_residual_stream else 0.02
            assert array.std() == pytest.approx(expected, rel=0.05), name
            assert abs(array.mean()) < 4 * expected / np.sqrt(array.size), name


def test_fresh_embeddings_of_values_are_as_large_as_fresh_values():
    model = dataclasses.replace(
        MODEL, hidden_size=256, vocabulary_size=2000, value_embeddings=True, key_value_heads=2
    )
    table, prefix = model_table(model), "decoder.1.attention.value_embedding"
    rows = table[f"{prefix}.weight"].initial("rows", seed=3)
    assert rows.shape == (2000, 128)
    normal = np.random.default_rng(1).standard_normal((500, 256))
    values = normal @ table["decoder.1.attention.qkv.weight"].initial("qkv", seed=3)[:, -128:]
    assert rows.std() == pytest.approx(values.std(), rel=0.03)
    assert (table[f"{prefix}.mix"].initial("mix", seed=3) == 1).all()


def test_projections_into_the_residual_stream_may_start_at_zero():
    zeros = dataclasses.replace(MODEL, zero_init_residual=True)
    for name, parameter in model_table(zeros).items():
        is_last = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        expected = (
            np.zeros(parameter.shape) if is_last else model_table(MODEL)[name].initial(name, 3)
        )
        np.testing.assert_array_equal(parameter.initial(name, seed=3), expected, err_msg=name)


def test_by_width_matrices_of_blocks_start_with_one_over_the_root_of_their_inputs():
    width = dataclasses.replace(MODEL, initialisation="width")
    for name, parameter in model_table(width).items():
        expected = model_table(MODEL)[name]
        if parameter.role is Role.WEIGHT:
            is_last = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            std = parameter.shape[0] ** -0.5 / (math.sqrt(2 * MODEL.layers) if is_last else 1)
            assert parameter.std == pytest.approx(std, rel=1e-12), name
            expected = dataclasses.replace(expected, std=parameter.std)
        assert parameter == expected, name


def test_by_width_a_hidden_layer_keeps_the_size_of_what_goes_through_it_at_any_width():
    for hidden in (64, 1024):
        model = dataclasses.replace(MODEL, hidden_size=hidden, initialisation="width")
        name = "decoder.0.attention.qkv.weight"
        x = np.random.default_rng(0).standard_normal((256, hidden), np.float32)
        y = x @ model_table(model)[name].initial(name, seed=3)
        assert y.std() == pytest.approx(1.0, rel=0.05), hidden


def test_fresh_weights_depend_on_the_seed_and_the_name_alone():
    def fresh(model, seed):
        return {
            name: parameter.initial(name, seed) for name, parameter in model_table(model).items()
        }

    first, again, other = (fresh(MODEL, seed) for seed in (3, 3, 4))
    deeper = fresh(dataclasses.replace(MODEL, layers=3), 3)
    name = "decoder.1.attention.qkv.weight"
    np.testing.assert_array_equal(first[name], again[name])
    np.testing.assert_array_equal(first[name], deeper[name])
    assert not np.array_equal(first[name], other[name])
    assert not np.array_equal(first[name], first["decoder.0.attention.qkv.weight"])


@pytest.mark.parametrize(
    "others",
    [{}, {"token_shift": True, "value_embeddings": True, "convolution_size": 4}],
    ids=str,
)
def test_exactly_the_matrices_decay(others):
    table = model_table(dataclasses.replace(MODEL, **others))
    decaying = {name for name, parameter in table.items() if parameter.decays}
    two_axes = {name for name, parameter in table.items() if len(parameter.shape) == 2}
    assert decaying == {name for name in two_axes if "convolution" not in name}

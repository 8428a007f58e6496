"""`--gradient_precision bfloat16`: gradients that wait in 16 bits, rounded at random from float32."""

import functools

import numpy as np
import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.pretraining import pretraining, training_program
from popxl_gpt.execution.variables import read_gradients, write_whole_weights
from tests.integration.gpt_oracle import distance, random_batch, random_weights
from tests.integration.runs import TRAINED, own_gradients_of, train

WIDE = override(TRAINED, tied_head=False, precision="float32", dropout=0.0)
NARROW = {"gradient_precision": "bfloat16", "stochastic_rounding": True}
of_float32 = functools.cache(own_gradients_of)


def unit(x: np.ndarray) -> np.ndarray:
    """The distance of bfloat16's numbers on both sides of x."""
    return np.spacing(np.abs(x).astype(np.float32)) * np.float32(2.0**16)


def is_bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32) & 0xFFFF == 0


def gradients_in_turn(config: Config, steps: int) -> "list[dict[str, np.ndarray]]":
    """The rows of gradients after steps that change no weight."""
    session = pretraining(config)
    write_whole_weights(session, config, random_weights(config.model).items())
    words, labels = random_batch(config)
    found = []
    with session:
        for _ in range(steps):
            run_steps(session, config, words, labels, [0.0])
            found.append(read_gradients(session, config))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bfloat16", "master_weights": True, "recomputation": False},
        {"lora_rank": 2},
    ],
    ids=["float32", "bfloat16, keeping activations", "adapters"],
)
def test_rows_are_neighbours_of_the_gradients_of_which_the_norm_is(changes):
    config = override(WIDE, **{"stochastic_rounding": True, **changes})
    loss, gradients, norm = own_gradients_of(config)
    assert (loss, norm) == (found := own_gradients_of(override(config, **NARROW)))[::2]
    assert found[1].keys() == gradients.keys()
    for name, x in gradients.items():
        y = found[1][name]
        assert is_bfloat16(y).all() and (np.abs(y - x) < unit(x)).all(), name
        np.testing.assert_array_equal(y[is_bfloat16(x)], x[is_bfloat16(x)], err_msg=name)
    if not config.model.lora_rank:
        unused = gradients["embedding.position.weight"][config.model.sequence_length :]
        assert unused.size and not unused.any(), "some elements need no rounding"


@pytest.mark.slow
def test_the_mean_over_seeds_is_the_gradient():
    """A row is off by up to a unit of its last bit, with a standard deviation of a half at most. So
    the mean of n is off by five times 0.5 / sqrt(n) in one of a million elements.
    """
    steps = 100
    gradients = of_float32(WIDE)[1]
    rows = gradients_in_turn(override(WIDE, **NARROW), steps)
    errors = {}
    for name, x in gradients.items():
        seen = np.stack([each[name] for each in rows])
        errors[name] = (seen.astype(np.float64).mean(0) - x)[x != 0] / unit(x[x != 0])
        assert np.abs(errors[name]).max() < 5.5 * 0.5 / np.sqrt(steps), name
    everything = np.concatenate(list(errors.values()))
    assert abs(everything.mean()) < 5 * 0.5 / np.sqrt(steps * everything.size)
    # layers with equal gradients would round apart, and a layer in the next step
    up = [f"decoder.{n}.feed_forward.up.weight" for n in range(2)]
    up_errors = [(rows[0][name] - gradients[name]) / unit(gradients[name]) for name in up]
    later = (rows[1][up[0]] - gradients[up[0]]) / unit(gradients[up[0]])
    for other in (up_errors[1], later):
        assert abs(np.corrcoef(up_errors[0].ravel(), other.ravel())[0, 1]) < 0.1


def test_a_tied_word_embedding_waits_in_16_bits_for_the_sum_with_the_embeddings_gradient():
    """The norm is that of the sum before it is rounded; the head's part was."""
    tied = override(WIDE, tied_head=True)
    _, gradients, norm = of_float32(tied)
    _, rows, narrow_norm = own_gradients_of(override(tied, **NARROW))
    assert norm != narrow_norm == pytest.approx(norm, rel=1e-4)
    word = "embedding.word.weight"
    assert is_bfloat16(rows[word]).all() and distance(rows[word], gradients[word]) < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"data_parallel": 2}, {"tensor_parallel_1": 2, "tensor_parallel_2": 2}],
    ids=["dp", "tp"],
)
def test_rows_of_layouts_are_neighbours_of_the_same_gradients(layout):
    """With data parallelism they have the same random bits, too."""
    alone = override(WIDE, micro_batch_size=1)
    loss, rows, norm = own_gradients_of(override(alone, **NARROW, **layout))
    expected_loss, gradients, expected_norm = of_float32(alone)
    assert (loss, norm) == pytest.approx((expected_loss, expected_norm), rel=1e-5)
    for name, x in gradients.items():
        assert (np.abs(rows[name] - x) < 1.01 * unit(x) + 1e-5 * np.abs(x).max()).all(), name
    if "data_parallel" in layout:
        _, others, _ = own_gradients_of(override(alone, **NARROW))
        same = [(rows[name] == others[name]).mean() for name in gradients if "weight" in name]
        assert np.mean(same) > 0.99


def test_what_is_saved_is_the_same():
    states = [training_program(override(WIDE, **c))[2].to_dict().keys()
              for c in ({"stochastic_rounding": True}, NARROW)]  # fmt: skip
    assert states[0] == states[1] and not any("grad" in name for name in states[0])


def test_the_state_is_two_bytes_of_each_parameter_smaller_where_gradients_are_the_most():
    config = override(WIDE, hidden_size=256)
    saved = state_bytes(config) - state_bytes(override(config, **NARROW))
    assert saved == 2 * parameter_count(config.model)


@pytest.mark.slow
def test_a_short_run_tracks_gradients_in_float32():
    """A gradient is off by up to 2**-7 of itself without a bias, and moments are means of many."""
    config = override(WIDE, steps=30)
    expected, found = (
        np.array([result.loss for result in train(override(config, **changes))[0]])
        for changes in ({}, NARROW)
    )
    assert 0 < np.abs(found - expected).max() < 0.01

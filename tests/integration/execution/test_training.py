"""Steps of training against a plain PyTorch loop, dropout, precision."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from helpers.quick import cases
from popxl_engine.codegen import op_writer

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import StepResult, run_steps
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.execution.variables import read_weights, write_whole_weights
from tests.integration.gpt_oracle import distance, random_batch, random_weights, small
from tests.integration.plain_training import TRAINED, train_plainly
from tests.integration.runs import TRAINED as RANDOM
from tests.integration.runs import batches, train, train_session

plainly = functools.cache(train_plainly)
"""As `train_plainly`, which knows neither runs of several steps nor recomputation."""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    cases(
        [
            {},
            {"device_iterations": 5},
            {"max_norm": 0.0, "recomputation": False},
            {"embedding_rate_multiplier": 5.0},
        ],
        lambda changes: not changes,
    ),
)
def test_fifty_steps_equal_a_plain_pytorch_loop(changes):
    config = override(TRAINED, **changes)
    results, weights = train(config)
    expected, expected_weights = plainly(override(config, device_iterations=1, recomputation=True))
    assert expected[-1].loss < expected[0].loss - 0.5, "the text can be learned"
    assert any(result.gradient_norm > TRAINED.training.max_norm for result in expected), (
        "clipping is active"
    )
    np.testing.assert_allclose([r.loss for r in results], [r.loss for r in expected], rtol=1e-4)
    np.testing.assert_allclose(
        [r.gradient_norm for r in results], [r.gradient_norm for r in expected], rtol=1e-3
    )
    # A key's bias moves every score of a query alike, so its true gradient is zero and Adam scales
    # up rounding errors.
    compared = [name for name in expected_weights if not name.endswith("qkv.bias")]
    assert max(distance(weights[name], expected_weights[name]) for name in compared) < 1e-4


SOME = {"data_parallel": 2, "micro_batch_size": 1}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    cases(
        [
            {"moment_precision": "bfloat16"},
            {"moment_precision": "8bit", "data_parallel": 2, "micro_batch_size": 1},
            {"optimizer": "muon", "moment_precision": "bfloat16"},
            {
                "moment_precision": "bfloat16",
                "precision": "float32",
                "dropout": 0.0,
                "max_norm": 0.0,
            },
            {"recomputation": False, "widening": 2},
            {**SOME, "tensor_parallel_1": 2, "layers": 2},
            {**SOME, "replicated_tensor_sharding": False},
        ],
        lambda changes: len(changes) == 1,
    ),
)
def test_bits_do_not_depend_on_the_steps_of_a_run(changes):
    """Two runs of three steps; in one case also three of two, whose loop has one round, and one of
    six.
    """
    config = override(RANDOM, steps=6, **changes)
    results, weights = train(config)
    for iterations in (2, 3, 6) if len(changes) == 1 else (3,):
        again, others = train(override(config, device_iterations=iterations))
        assert again == results
        for name, array in weights.items():
            np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 4])
def test_every_layer_of_every_step_rounds_from_a_seed_of_its_own(iterations, monkeypatch):
    seeds, of_seed = [], op_writer.of_seed

    def noted(seed):
        seeds.append(tuple(seed.tolist()))
        return of_seed(seed)

    monkeypatch.setattr(op_writer, "of_seed", noted)
    config = override(RANDOM, device_iterations=iterations)
    train(config)
    layers = config.model.layers + 2
    assert len(set(seeds)) == config.training.steps * layers
    assert seeds.count(seeds[0]) > 1, (
        "one seed for all parameters of a layer, which are told apart by their places"
    )


@pytest.mark.slow
def test_training_twice_gives_the_same_bits():
    config = override(TRAINED, steps=5, dropout=0.2, warmup_steps=0)
    (first, first_weights), (second, second_weights) = train(config), train(config)
    assert first == second
    for name, array in first_weights.items():
        np.testing.assert_array_equal(array, second_weights[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("recomputation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dropout_changes_from_step_to_step_and_with_the_seed(recomputation):
    config = override(
        TRAINED,
        steps=2,
        dropout=0.2,
        warmup_steps=0,
        learning_rate=1e-12,
        minimum_learning_rate=0.0,
    )
    config = override(config, recomputation=recomputation, weight_decay=0.0)
    same_words = [batches(config)[0]] * 2
    losses = {}
    for seed in (1, 2):
        seeded = override(config, seed=seed)
        session = pretraining(seeded)
        write_whole_weights(session, seeded, random_weights(config.model).items())
        with session:
            losses[seed] = [
                run_steps(session, seeded, *batch, [0.0])[0].loss for batch in same_words
            ]
    assert len({*losses[1], *losses[2]}) == 4


@pytest.mark.slow
def test_dropout_in_recomputation_drops_what_the_forward_pass_dropped():
    config = override(TRAINED, steps=3, dropout=0.3, warmup_steps=0)
    kept, kept_weights = train(override(config, recomputation=False))
    again, again_weights = train(override(config, recomputation=True))
    assert kept == again
    for name, array in kept_weights.items():
        np.testing.assert_array_equal(array, again_weights[name], err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"device_iterations": 2, "optimizer": "muon"}])
def test_without_updates_gradients_are_the_same_and_nothing_changes(changes):
    found = {}
    for updates in (True, False):
        config = small(**changes, steps=2, updates=updates)
        session = pretraining(config)
        before = read_weights(session, config)
        (words, labels), steps = random_batch(config), config.execution.device_iterations
        with session:
            results = run_steps(
                session, config, np.tile(words, (steps, 1)), np.tile(labels, (steps, 1)),
                [1e-2] * steps,
            )  # fmt: skip
            after = read_weights(session, config)
        found[updates] = results
        is_same = all(np.array_equal(before[name], after[name]) for name in before)
        assert is_same != updates
    assert found[True][0] == found[False][0] == found[False][-1]


@functools.cache
def thirty_steps() -> "list[StepResult]":
    """In float32, with which narrower types are compared."""
    return train(override(TRAINED, steps=30, warmup_steps=3))[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bit_training_tracks_float32(precision):
    scaling = {"loss_scaling": 64.0, "stochastic_rounding": True}
    expected = thirty_steps()
    results, _ = train(override(TRAINED, steps=30, warmup_steps=3, precision=precision, **scaling))
    differences = np.abs(np.array([r.loss for r in results]) - [r.loss for r in expected])
    # bfloat16 has 8 bits of mantissa: single products are off by up to 2^-9, and losses of about 3
    # by some hundredths.
    assert differences.max() < 0.1


@pytest.mark.slow
def test_remote_memory_on_files_gives_the_same_bits(tmp_path):
    config = override(TRAINED, steps=5, warmup_steps=0)
    (expected, expected_weights), (results, weights) = (
        train(config),
        train(override(config, memmap_dir=str(tmp_path))),
    )
    assert any(tmp_path.iterdir())
    assert results == expected
    for name, array in expected_weights.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)


@pytest.mark.slow
def test_a_fresh_run_takes_nothing_from_the_files_of_an_earlier_one(tmp_path):
    config = override(TRAINED, steps=2, warmup_steps=0)
    expected, expected_weights = train(config)
    files = override(config, memmap_dir=str(tmp_path))
    (tmp_path / "notes.npy").write_text("not the run's")
    train(override(files, steps=1, seed=7))
    left = [
        path for path in tmp_path.glob("**/optimizer.*.npy") if np.fromfile(path, np.uint8).any()
    ]
    for change in (lambda: None, lambda: left[0].write_bytes(b"of another configuration")):
        change()
        results, weights = train(files)
        assert results == expected
        for name, array in expected_weights.items():
            np.testing.assert_array_equal(weights[name], array, err_msg=name)
    assert (tmp_path / "notes.npy").read_text() == "not the run's"


def curve(config: Config) -> np.ndarray:
    """Losses of a run, running mean over 25 steps."""
    return running_mean(train(config)[0])


def running_mean(results: "list[StepResult]") -> np.ndarray:
    return np.convolve([result.loss for result in results], np.full(25, 1 / 25), "valid")


NARROW_MOMENTS = {"moment_precision": "bfloat16", "stochastic_rounding": True}


@pytest.mark.slow
def test_moments_in_bfloat16_are_those_of_float32_rounded():
    config = override(TRAINED, steps=30, warmup_steps=3)
    expected = thirty_steps()
    results, _ = train(override(config, **NARROW_MOMENTS))
    differences = np.abs(np.array([r.loss for r in results]) - [r.loss for r in expected])
    # A moment is off by up to 2**-7 of itself, and so is an update; together they have moved
    # weights by 0.05 or so.
    assert 0 < differences.max() < 0.01


LONG = override(
    TRAINED, steps=500, warmup_steps=20, beta2=0.999, micro_batch_size=8, recomputation=False
)
"""Without recomputation, which changes no bit and takes time."""


@functools.cache
def curve_and_second_moments(config: Config) -> "tuple[np.ndarray, float]":
    """As `curve`, and the sum of all second moments at the end. Two tests compare with one run."""
    results, session = train_session(config)
    data = session.get_tensors_data(session.state.optimizer.to_dict().values())
    squares = sum(
        float(array.sum()) for v, array in data.items() if v.name.endswith("second_order")
    )
    return running_mean(results), squares


@pytest.mark.exhaustive
@pytest.mark.slow
def test_moments_in_bfloat16_track_float32_over_500_steps():
    """The band is 0.001 nats around a curve that falls from 3.4 to 1.16.

    A moment has 8 bits: each step it is off by up to 2**-7 of itself, without a bias, and with it
    the step's update. That much of an update of some thousandths is nothing beside a weight, and
    its mean over steps is nearer to zero. Without a bias the second moments have the sum that they
    have in float32. Rounded to the nearest they grow and do not fall, for beta2 takes less from
    them than half of what their last bit stands for.
    """
    expected, squares = curve_and_second_moments(LONG)
    assert expected[-1] < expected[0] - 2
    narrow = override(LONG, **NARROW_MOMENTS)
    stochastic, narrow_squares = curve_and_second_moments(narrow)
    assert 0 < np.abs(stochastic - expected).max() < 0.001
    assert narrow_squares == pytest.approx(squares, rel=0.002)
    nearest = replace(narrow, training=replace(narrow.training, stochastic_rounding=False))
    assert curve_and_second_moments(nearest)[1] > 1.02 * squares
    eight = override(LONG, moment_precision="8bit", stochastic_rounding=True)
    # a moment is off by up to an eighth of itself: sixteen times as much
    assert 0 < np.abs(curve(eight) - expected).max() < 0.01


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bfloat16_with_stochastic_rounding_tracks_float32_over_500_steps():
    """The band is 0.01 nats around a curve that falls from 3.7 to 1.15.

    Activations and weights have 8 bits of mantissa: one product is off by up to 2**-9, without a
    bias, which a mean over hundreds of tokens takes to some thousandths of the loss. Updates below
    half a step of bfloat16 are where a
    bias could come in: rounded to nearest they are lost, and the curve leaves the band.
    """
    expected, _ = curve_and_second_moments(LONG)
    assert expected[-1] < expected[0] - 2
    stochastic = curve(override(LONG, precision="bfloat16", stochastic_rounding=True))
    nearest = curve(override(LONG, precision="bfloat16", master_weights=False))
    assert np.abs(stochastic - expected).max() < 0.01
    assert np.abs(nearest - expected).max() > 0.03


def test_a_session_is_expected_before_its_program_is_built(monkeypatch):
    events = []

    def build(config):
        events.append("program")
        raise InterruptedError

    expected = "popxl_gpt.execution.pretraining.expect_session"
    monkeypatch.setattr(expected, lambda *of: events.append(of))
    monkeypatch.setattr("popxl_gpt.execution.pretraining.training_program", build)
    with pytest.raises(InterruptedError):
        pretraining(override(TRAINED, device="cpu"))
    assert events == [("cpu", TRAINED.model.precision), "program"]

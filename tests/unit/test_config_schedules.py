"""Learning rates against their published formulas."""

import math

import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.config.schedules import learning_rate, stage_of, tokens_ahead
from popxl_gpt.config.schema import Config, Training

STEPS, WARMUP, HIGH, LOW = 100, 10, 1e-3, 1e-4


def training(schedule: str, **values) -> Training:
    settings = {
        "steps": STEPS,
        "warmup_steps": WARMUP,
        "learning_rate": HIGH,
        "minimum_learning_rate": LOW,
    }
    return Training(schedule=schedule, **{**settings, **values})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_in_equal_steps_to_the_highest_rate(schedule):
    rates = [learning_rate(training(schedule), step) for step in range(WARMUP + 1)]
    assert rates[0] == pytest.approx(HIGH / (WARMUP + 1))
    assert rates[-1] == HIGH
    assert [b - a for a, b in zip(rates, rates[1:])] == pytest.approx(
        [HIGH / (WARMUP + 1)] * WARMUP
    )


def test_constant_stays():
    assert {learning_rate(training("constant"), step) for step in range(WARMUP, 2 * STEPS)} == {
        HIGH
    }


def test_linear_is_a_straight_line_to_the_lowest_rate():
    for step in range(WARMUP, STEPS):
        expected = HIGH * (STEPS - step) / (STEPS - WARMUP) + LOW * (step - WARMUP) / (
            STEPS - WARMUP
        )
        assert learning_rate(training("linear"), step) == pytest.approx(expected, rel=1e-12)


def test_cosine_is_half_a_cosine_to_the_lowest_rate():
    for step in range(WARMUP, STEPS):  # Loshchilov & Hutter 2017, equation 5
        expected = LOW + (HIGH - LOW) / 2 * (
            1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))
        )
        assert learning_rate(training("cosine"), step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [60, 200])
def test_a_rate_falls_over_its_own_steps_however_long_the_run_is(schedule, steps):
    settings = training(schedule, steps=steps, decay_steps=STEPS - WARMUP)
    rates = [learning_rate(settings, step) for step in range(steps)]
    whole = [learning_rate(training(schedule), step) for step in range(STEPS)]
    assert rates == [*whole, *[LOW] * 100][:steps]


@pytest.mark.parametrize("rule, factor", [("linear", 16), ("sqrt", 4)])
def test_rates_are_scaled_with_the_batch_by_the_rule(rule, factor):
    settings = training("cosine", global_batch_size=64, base_batch_size=4, batch_scaling=rule)
    for step in range(STEPS):
        expected = factor * learning_rate(training("cosine"), step)
        assert learning_rate(settings, step) == pytest.approx(expected, rel=1e-12)


def test_wsd_stays_and_falls_in_a_straight_line_over_its_last_steps():
    rates = [learning_rate(training("wsd", decay_steps=40), step) for step in range(STEPS + 1)]
    assert rates[WARMUP:61] == [HIGH] * 51  # Hu et al. 2024, section 4: warm-up, stable, decay
    falling = [HIGH - (HIGH - LOW) * (step - 60) / 40 for step in range(60, STEPS + 1)]
    assert rates[60:] == pytest.approx(falling, rel=1e-12)


def test_wsd_falls_over_a_fifth_of_the_steps_where_nothing_else_is_said():
    rates = [learning_rate(training("wsd", steps=101), step) for step in range(102)]
    assert [rate < HIGH for rate in rates[WARMUP:]] == [step > 80 for step in range(WARMUP, 102)]


def test_wsd_with_more_steps_goes_the_same_way_until_the_shorter_one_falls():
    short, long = (training("wsd", steps=n, decay_steps=20) for n in (STEPS, 3 * STEPS))
    rates = [[learning_rate(t, step) for step in range(81)] for t in (short, long)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_lowest_rate_is_kept_after_the_end(schedule):
    assert [learning_rate(training(schedule), step) for step in (STEPS, STEPS + 1, 10 * STEPS)] == [
        LOW
    ] * 3


def test_a_run_may_be_warm_up_alone_or_have_none():
    assert learning_rate(training("cosine", warmup_steps=STEPS), STEPS - 1) == pytest.approx(
        HIGH * STEPS / (STEPS + 1)
    )
    assert learning_rate(training("cosine", warmup_steps=0), 0) == HIGH


def growing(**values) -> Config:
    sizes = {"global_batch_size": 20, "rampup_batch_size": 4, "rampup_tokens": 1000}
    return preset("tiny", data_parallel=1, sequence_length=16, **{**sizes, **values})


def test_a_batch_that_grows_has_the_sizes_of_megatrons_formula():
    # rampup_batch_size 4 4 samples: start + consumed // (samples / increments) * increment
    settings = growing(rampup_increment=4)
    for tokens in range(0, 1200, 7):
        expected = 20 if tokens >= 1000 else 4 + int(tokens / (1000 / ((20 - 4) / 4))) * 4
        stage = stage_of(settings, tokens)
        assert stage.training.global_batch_size == expected, tokens


def test_a_batch_without_an_increment_doubles():
    sizes = [
        stage_of(growing(global_batch_size=32), tokens).training.global_batch_size
        for tokens in (0, 333, 334, 666, 667, 999, 1000, 10**15)
    ]
    assert sizes == [4, 4, 8, 8, 16, 16, 32, 32]


@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("begin", [0, 64, 900, 1000])
def test_tokens_ahead_are_those_of_steps_one_by_one(begin, iterations):
    settings, seen = growing(rampup_increment=4, device_iterations=iterations), begin
    for calls in range(1, 12):
        seen += stage_of(settings, seen).tokens_per_step * iterations
        assert tokens_ahead(settings, begin, calls * iterations) == seen - begin

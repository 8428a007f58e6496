"""Runs that have so many minutes: what is chosen for them, and when they end, by a clock that is told."""

import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.quick import cases

from popxl_gpt.config import preparing
from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.saving import to_yaml
from popxl_gpt.config.schedules import learning_rate
from popxl_gpt.config.schema import Config, Training
from popxl_gpt.config.validation import validate
from popxl_gpt.data import example
from popxl_gpt.data.known_text import Text, text_of
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.demo import commands, pretraining, starting
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.demo.job import part, run_clock
from popxl_gpt.demo.job.choice import chooses_model
from popxl_gpt.demo.job.options import TrainOptions
from popxl_gpt.demo.job.run_clock import RunClock
from popxl_gpt.demo.job.timed_schedule import TimedSchedule
from popxl_gpt.demo.job.training_data import open_data
from popxl_gpt.demo.pretraining import choose as choose_in_job
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.planning import machine, sizing, training_axes
from popxl_gpt.execution.planning.memory import state_bytes
from popxl_gpt.execution.planning.sizing import Trial, chosen
from popxl_gpt.utils import program_clock
from popxl_gpt.utils.errors import ConfigError, UserError

TRAINING = Training(
    steps=1000, decay_steps=400, schedule="wsd", warmup_steps=10, learning_rate=1.0, minimum_learning_rate=0.1
)  # fmt: skip
SECONDS, CLOSING = 1000.0, 7.0


def run(
    pace, schedule: TimedSchedule, step: int = 0, elapsed: float = 20.0, until: float = math.inf
):
    """Steps that take `pace(elapsed)` seconds each. Returns steps, seconds, rates, and states."""
    rates, states = [], []
    while step < schedule.end and elapsed < until:
        for _ in range(schedule.iterations):
            rates.append(schedule.learning_rate(step))
            elapsed, step = elapsed + pace(elapsed), step + 1
        schedule.tell(step, elapsed, CLOSING)
        states.append(schedule.state)
    return step, elapsed, rates, states


PACES = {
    "even": lambda elapsed: 0.5,
    "slower half way": lambda elapsed: 0.5 if elapsed < 500 else 1.1,
    "faster half way": lambda elapsed: 0.9 if elapsed < 500 else 0.3,
    "slower near the end": lambda elapsed: 0.4 if elapsed < 850 else 2.0,
    "a little slower in its decay": lambda elapsed: 0.5 if elapsed < 700 else 0.53,
    "with a pause each 100 seconds": lambda elapsed: 0.5 if elapsed % 100 > 0.6 else 4.0,
    "never as expected": lambda elapsed: 0.05,
}


@pytest.mark.sampled(3)
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("name", cases(PACES, lambda name: name != "never as expected"))
@pytest.mark.parametrize("iterations", [1, 4])
def test_a_run_ends_with_its_time_whatever_its_pace(name, iterations):
    schedule = TimedSchedule(TRAINING, SECONDS, iterations)
    step, elapsed, rates, _ = run(PACES[name], schedule)
    assert elapsed + CLOSING == pytest.approx(SECONDS, rel=0.01)
    assert step == schedule.end and step % iterations == 0
    assert rates[:10] == pytest.approx([(n + 1) / 11 for n in range(10)])
    falls = [b - a for a, b in zip(rates[10:], rates[11:])]
    assert max(falls) <= 1e-12 and rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=0.03)


def test_the_rate_stays_until_the_decays_share_of_the_time_and_falls_in_a_straight_line():
    schedule = TimedSchedule(TRAINING, SECONDS)
    _, _, rates, _ = run(PACES["even"], schedule)
    first = next(n for n, rate in enumerate(rates) if n > 10 and rate < 1.0)
    assert 20 + 0.5 * first == pytest.approx(0.6 * (SECONDS - CLOSING), rel=0.01)
    begin, end = schedule.begin, schedule.end
    expected = [1.0 - 0.9 * (n + 0.5 - begin) / (end - begin) for n in range(begin, end)]
    assert rates[begin:] == pytest.approx(expected)


def test_a_run_that_goes_on_in_its_decay_has_the_same_rates_and_end():
    whole = TimedSchedule(TRAINING, SECONDS)
    step, _, rates, states = run(PACES["even"], whole)
    stopped = TimedSchedule(TRAINING, SECONDS)
    done, elapsed, _, before = run(PACES["even"], stopped, until=800.0)
    again = TimedSchedule(TRAINING, SECONDS, state=before[-1])
    last, _, rest, _ = run(PACES["even"], again, done, elapsed)
    assert (last, again.state) == (step, states[-1])
    assert rest == rates[done:]


def test_a_run_that_gets_more_time_does_not_end_where_it_would_have():
    done, elapsed, _, states = run(PACES["even"], TimedSchedule(TRAINING, SECONDS))
    longer = TimedSchedule(TRAINING, 2 * SECONDS, done=done, state=states[-1])
    assert longer.begin is None and longer.learning_rate(done) == 1.0
    _, elapsed, _, _ = run(PACES["even"], longer, done, elapsed)
    assert elapsed + CLOSING == pytest.approx(2 * SECONDS, rel=0.01)


@pytest.mark.parametrize("scaling, factor", [("linear", 4.0), ("sqrt", 2.0)])
def test_rates_are_scaled_to_the_batch_as_without_a_clock(scaling, factor):
    batches = {"base_batch_size": 8, "global_batch_size": 32, "batch_scaling": scaling}
    scaled = replace(TRAINING, **batches)
    _, _, rates, _ = run(PACES["even"], TimedSchedule(TRAINING, SECONDS))
    _, _, found, _ = run(PACES["even"], TimedSchedule(scaled, SECONDS))
    assert found == pytest.approx([factor * rate for rate in rates])
    assert found[:50] == [learning_rate(scaled, step) for step in range(50)]


@pytest.mark.parametrize("decay_steps, share", [(400, 0.4), (None, 0.2)])
@pytest.mark.parametrize("warmup", [900, 1000, 1200])
def test_a_warmup_of_all_expected_steps_leaves_the_decay_its_share(warmup, decay_steps, share):
    training = replace(TRAINING, decay_steps=decay_steps, warmup_steps=warmup)
    schedule = TimedSchedule(training, SECONDS)
    _, _, rates, _ = run(lambda elapsed: 1.0, schedule)
    highest = int(np.argmax(rates))
    assert 20 + highest == pytest.approx((1 - share) * (SECONDS - CLOSING), rel=0.01)
    assert rates[-1] == pytest.approx(0.1, abs=0.01) and schedule.begin - highest in (0, 1)


@pytest.mark.parametrize("seconds", [60.0, 90.0, 130.0, 170.0])
@pytest.mark.parametrize("pace", [8.0, 20.0, 35.0])
def test_a_run_of_few_slow_steps_ends_with_its_time_and_falls(pace, seconds):
    schedule = TimedSchedule(replace(TRAINING, warmup_steps=0), seconds)
    steps, elapsed, rates, _ = run(lambda elapsed: pace, schedule, elapsed=10.0)
    assert elapsed + CLOSING <= seconds + (0.5 if steps > 2 else 1.0) * pace
    assert elapsed + CLOSING >= seconds - pace
    assert steps <= 2 or rates[-1] < 0.6


def test_every_step_of_a_decay_falls_and_be_it_the_only_one():
    state = {"seconds": SECONDS, "begin": 100, "rate": 1.0, "end": 101}
    assert TimedSchedule(TRAINING, SECONDS, state=state).learning_rate(100) == 0.55
    state["end"] = 102
    two = TimedSchedule(TRAINING, SECONDS, state=state)
    assert [two.learning_rate(n) for n in (100, 101)] == pytest.approx([0.775, 0.325])


def test_a_decay_is_not_cut_for_less_than_the_tolerance():
    schedule = TimedSchedule(TRAINING, SECONDS)
    step, elapsed, rates, states = run(lambda elapsed: 0.5 if elapsed < 980 else 0.6, schedule)
    assert {state["end"] for state in states if state is not None} == {step}
    assert elapsed + CLOSING > SECONDS and rates[-1] == pytest.approx(0.1, abs=0.001)


def test_a_run_whose_time_is_over_ends_with_its_call():
    schedule = TimedSchedule(TRAINING, SECONDS, iterations=4)
    assert schedule.tell(4, SECONDS, CLOSING) == 4
    assert schedule.state is not None and schedule.state["end"] == 4


@pytest.mark.parametrize("elapsed, told", [(None, 30.0), (45.0, 45.0)])
def test_a_run_goes_on_from_the_seconds_that_its_checkpoint_has(monkeypatch, elapsed, told):
    monkeypatch.setattr("popxl_gpt.demo.job.run_clock.since_start", lambda: 5.0)
    config = preset("tiny", schedule="wsd", minutes=1.0)
    position = Position(7, "data", elapsed=elapsed)
    clock = RunClock(config, SimpleNamespace(position=position))
    clock.go_on(30.0)  # as metrics.jsonl has it, where it has anything
    assert clock.seconds == pytest.approx(told + 5.0, abs=0.5)
    assert clock.elapsed == pytest.approx(told + 5.0, abs=0.5)
    alone = RunClock(preset("tiny"), SimpleNamespace(position=position))
    alone.go_on(30.0)
    assert alone.elapsed is None and alone.seconds == pytest.approx(30.0, abs=0.5)


def test_minutes_count_from_the_program_and_not_from_its_process(monkeypatch):
    heard, hour = [], time.monotonic() - 3600.0
    monkeypatch.setattr(program_clock._Clock, "begun", hour)
    assert program_clock.since_start() >= 3600.0
    monkeypatch.setattr(pretraining, "run", lambda *_: heard.append(program_clock.since_start()))
    monkeypatch.setattr(commands, "train", lambda: pretraining.run())
    before = signal.getsignal(signal.SIGUSR1)
    for begin in (starting.train, lambda: pretraining.main(["--minutes", "1"])):
        monkeypatch.setattr(program_clock._Clock, "begun", hour)
        begin()
    signal.signal(signal.SIGUSR1, before)
    assert len(heard) == 2 and max(heard) < 60.0


@pytest.mark.parametrize(
    "samples, tokenizer, texts", [(2, object(), 5.0), (0, object(), 0.0), (2, None, 0.0)]
)
def test_the_end_is_expected_to_take_one_validation_and_one_build_where_texts_are_written(
    samples, tokenizer, texts, monkeypatch
):
    class Run(part.RunState):
        session = None

        def build(self, saved):
            self.built = {"build_seconds": 3.0, "compile_seconds": 2.0}

    monkeypatch.setattr(part.Skipped, "of", lambda session: None)
    config, told = preset("tiny", schedule="wsd", minutes=1.0), []
    options, data = TrainOptions(samples=samples), SimpleNamespace(fingerprint="data")
    given = {"config": config, "options": options, "data": data, "tokenizer": tokenizer}
    job = SimpleNamespace(**given, folder=None, saved=None, is_leader=True)
    clock = Run(job, ()).clock
    monkeypatch.setattr(clock.schedule, "tell", lambda *given: told.append(given[-1]))
    with clock.validating():  # --validate_first
        time.sleep(0.3)
    clock.called(1)
    saving = state_bytes(config) / run_clock.WRITTEN
    assert told == [pytest.approx(sizing.ENDING + 0.3 + saving + texts, abs=0.1)]


@pytest.mark.slow
def test_a_decay_keeps_its_share_where_the_steps_of_a_run_become_known():
    config = preset("tiny", schedule="wsd", steps=40, decay_steps=8, minutes=1.0)
    clock = RunClock(config, None)
    known = clock.training(400)
    assert (known.steps, known.decay_steps) == (400, 80)
    long = replace(config, training=replace(config.training, warmup_steps=40))
    assert RunClock(long, None).training(400).decay_steps == 80
    again = TimedSchedule(known, 2 * SECONDS)
    _, _, rates, _ = run(PACES["even"], again)
    first = next(n for n, rate in enumerate(rates) if rate < rates[0])
    assert 20 + 0.5 * first == pytest.approx(0.8 * (2 * SECONDS - CLOSING), rel=0.01)


class Machine:
    """One on which a step takes what its products do, in bfloat16 so many times as fast, and so
    many seconds of its own and for each row of bigrams.
    """

    def __init__(self, speed: float, narrow: float = 1.0, own: float = 0.0, row: float = 0.0):
        self.speed, self.narrow, self.own, self.row, self.tried = speed, narrow, own, row, []

    def __call__(self, config: Config) -> Trial:
        self.tried.append(config)
        model = config.model
        matrices = 12 * model.layers * model.hidden_size**2
        products = matrices + model.vocabulary_size * model.hidden_size
        attention = 12 * model.layers * model.sequence_length * model.hidden_size
        speed = self.speed * (self.narrow if model.precision == "bfloat16" else 1.0)
        seconds = (6 * products + attention) * config.tokens_per_step / speed
        return Trial(2.0, self.own + self.row * model.bigram_rows + seconds)


TEXT = Text(
    9_000_000, 5000, "data/files/mine/tokenizer.json", ("data/files/mine/validation-0.tfrecord",)
)


def choose(seconds: float, speed: float = 6e10, given=(), text=TEXT, **settings):
    config = preset(
        "modern",
        schedule="wsd",
        input_files=("train",),
        validate_every=0,
        minutes=seconds / 60,
        **settings,
    )
    return chosen(config, {"input_files", "minutes", *given}, text, seconds, Machine(speed))


def test_more_time_and_a_faster_machine_give_larger_models_with_larger_batches():
    sizes = [choose(60 * minutes).config for minutes in (1, 10, 100, 1000)]
    layers = [config.model.layers for config in sizes]
    batches = [config.tokens_per_step for config in sizes]
    assert layers == sorted(layers) and layers[0] < layers[-1]
    assert batches == sorted(batches) and batches[0] < batches[-1]
    rates = [config.training.learning_rate for config in sizes]
    assert rates == sorted(rates, reverse=True)
    fast = choose(600, speed=6e12).config
    assert fast.model.hidden_size > choose(600).config.model.hidden_size


@pytest.mark.parametrize("narrow, precision", [(2.5, "bfloat16"), (0.4, "float32")])
def test_sizes_are_chosen_by_the_speed_of_the_faster_precision(monkeypatch, narrow, precision):
    monkeypatch.setattr(training_axes, "may_narrow", lambda device: True)
    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    given, machine = {"input_files"}, Machine(6e10, narrow)
    found = chosen(config, given, TEXT, 600.0, machine).config
    assert found.model.precision == precision
    assert {each.model.precision for each in machine.tried} == {"bfloat16", "float32"}
    alone = override(config, precision=precision)
    expected = chosen(alone, {*given, "precision"}, TEXT, 600.0, Machine(6e10, narrow)).config
    assert found.model == expected.model


@pytest.mark.parametrize("build", [1.0, 4.0, 9.0, 40.0])
@pytest.mark.parametrize("speed, narrow", [(6e10, 2.5), (6e10, 0.4), (2e9, 1.0), (4e11, 1.0)])
def test_trials_take_no_more_than_their_share_beside_the_first(monkeypatch, build, speed, narrow):
    monkeypatch.setattr(training_axes, "may_narrow", lambda device: True)
    machine, took = Machine(speed, narrow), []

    def try_out(config: Config) -> Trial:
        trial = replace(machine(config), build=build)
        took.append(trial.build + 3 * trial.step)
        return trial

    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    chosen(config, {"input_files"}, TEXT, 120.0, try_out)
    assert sum(took) <= 12.0 or len(took) == 1


@pytest.mark.parametrize("build", [2.0, 50.0])
def test_with_a_search_for_the_way_to_execute_it_that_way_is_tried_and_trained(build):
    machine, asked = Machine(3e11), []

    def execute(config: Config, seconds: float) -> tuple[Config, str]:
        asked.append(seconds)
        width = config.execution.micro_batch_size
        return override(config, micro_batch_size=1, widening=width), f"auto: {config.model.layers}"

    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    found = chosen(
        config,
        {"input_files"},
        TEXT,
        600.0,
        lambda each: replace(machine(each), build=build),
        execute,
    )
    execution = found.config.execution
    assert execution.micro_batch_size == 1 and execution.widening > 1
    assert found.reasons[-1] == f"auto: {found.config.model.layers}"
    assert {each.execution.micro_batch_size for each in machine.tried} == {1}
    # half of what is left of a tenth of the time for each search, nothing after the last trial
    assert asked[0] == 30.0 and asked == sorted(asked, reverse=True)
    assert len(asked) - len(machine.tried) == (asked[-1] == 0.0) == (build == 50.0)


def test_a_slow_step_of_a_trial_decides_nothing(monkeypatch):
    monkeypatch.setattr(sizing, "step_times", lambda *_: [3.0, 1.0, 9.0])
    assert sizing.tried(preset("tiny")).step == 1.0


def test_a_first_trial_that_takes_all_of_the_time_leaves_a_run_of_one_call():
    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    machine = Machine(6e10)
    slow = chosen(
        config, {"input_files"}, TEXT, 36.0, lambda each: replace(machine(each), build=50.0)
    )
    assert slow.config.training.steps == slow.config.execution.device_iterations
    assert len(machine.tried) <= 2


@pytest.mark.parametrize(
    "device, narrow, wide, expected",
    [
        ("cpu", 2e12, 1e12, True),
        ("cpu", 1e12, 2e12, False),  # it has instructions, of half the rate
        ("cuda", 0.0, 0.0, True),
    ],
)
def test_bfloat16_is_tried_where_the_device_may_be_faster(
    monkeypatch, device, narrow, wide, expected
):
    rates = {"bfloat16": narrow, "float32": wide}
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(machine, "multiply_ceiling", lambda precision, _: rates[precision])
    monkeypatch.setattr(machine, "runs_on_gpu", lambda name: name == "cuda")
    assert machine.may_narrow.__wrapped__(device) is expected


def test_a_machine_without_bfloat16_tries_float32_alone(monkeypatch):
    monkeypatch.setattr(training_axes, "may_narrow", lambda device: False)
    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    machine = Machine(6e10, narrow=9.0)
    assert chosen(config, {"input_files"}, TEXT, 600.0, machine).config.model.precision == "float32"
    assert {each.model.precision for each in machine.tried} == {"float32"}


def test_data_say_vocabulary_tokenizer_and_what_is_held_out():
    config = choose(600).config
    assert config.model.vocabulary_size == 5000 and config.data.tokenizer == TEXT.tokenizer
    assert config.data.validation_files == TEXT.validation_files
    assert config.training.validate_every > 0
    alone = choose(600, text=None).config
    assert alone.model.vocabulary_size == 4096 and alone.training.validate_every == 0


@pytest.mark.parametrize(
    "size, device, is_told",
    [(4096, "cpu", False), (8192, "cpu", True), (50257, "cpu", True), (50257, "cuda", False)],
)
def test_a_vocabulary_that_is_too_large_for_the_time_is_told(monkeypatch, size, device, is_told):
    monkeypatch.setattr(preparing, "usable_cores", lambda: 2)
    reasons = " ".join(choose(299, text=Text(10**7, size), device=device).reasons)
    told = f"vocabulary {size}; with one of 2048 it would learn more in the time"
    assert (told in reasons) == is_told == ("(data/prepare.py --minutes 5)" in reasons)


def test_few_data_are_not_seen_more_often_than_is_of_use():
    few, many = (choose(3600, text=Text(tokens, 4096)).config for tokens in (200_000, 10**9))
    assert few.model.hidden_size > many.model.hidden_size


@pytest.mark.parametrize("tokens", [100, 10_000, 200_000])
@pytest.mark.parametrize("seconds, speed", [(60, 6e10), (600, 6e10), (600, 1e9), (36_000, 6e10)])
def test_a_model_of_few_data_makes_more_than_a_handful_of_steps(seconds, speed, tokens):
    found = choose(seconds, speed, text=Text(tokens, 4096)).config
    least = choose(seconds, speed).config
    assert found.training.steps >= min(80, least.training.steps)


@pytest.mark.parametrize("seconds", [40.0, 300.0, 3600.0])
@pytest.mark.parametrize("text", [TEXT, Text(100, 4096)], ids=["usual", "small"])
def test_the_first_trial_fits_whatever_the_machine(seconds, text):
    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    slow = Machine(5e9)
    chosen(config, {"input_files", "precision"}, text, seconds, slow)
    took = slow(slow.tried[0]).step
    assert 4 * took <= 0.1 * seconds or slow.tried[0].model.hidden_size == 128


def test_the_reason_for_a_size_is_the_one_that_it_has():
    small = "a smaller one would see the text more than 4 times"
    for text, is_small in ((TEXT, False), (None, False), (Text(200_000, 4096), True)):
        found = choose(3600, text=text)
        (said,) = [line for line in found.reasons if line.startswith("size ")]
        assert (small in said, "at least 8 where time allows" in said) == (is_small, not is_small)


@pytest.mark.parametrize(
    "batch, length, at_once",
    [(45, 256, 15), (33, 256, 11), (12, 256, 12), (64, 256, 16), (17, 256, 1), (7, 1024, 1), (9, 1024, 3)],
)  # fmt: skip
def test_as_many_sequences_run_at_once_as_divide_the_batch(batch, length, at_once):
    words = f"--global_batch_size {batch} --sequence_length {length}".split()
    assert choose_by_words(*words)[0].execution.micro_batch_size == at_once


def test_weights_decay_by_how_often_a_text_is_seen_again():
    again, shrunk, is_told = [], [], []
    for tokens in (9_000_000, 1_500_000, 5_000):
        found = choose(600, text=Text(tokens, 5000))
        training = found.config.training
        again.append(training.steps * found.config.tokens_per_step / tokens - 1)
        shrunk.append(training.weight_decay * training.steps * training.learning_rate)
        is_told.append(any(line.startswith("decay ") for line in found.reasons))
    assert again[0] < 0 < again[1] < 4 < again[2]
    assert shrunk[:2] == pytest.approx([0.0, 0.4 * again[1]]) and is_told == [False, True, True]
    assert training.weight_decay == 0.2  # of the shortest text: the largest


def test_a_decay_of_weights_that_is_given_stays():
    kept = choose(600, given={"weight_decay"}, text=Text(5_000, 5000), weight_decay=0.02)
    assert kept.config.training.weight_decay == 0.02


def test_small_models_that_see_no_text_twice_have_a_table_of_pairs_of_words():
    small, large = choose(60).config.model, choose(60_000).config.model
    assert small.hidden_size <= 256 < large.hidden_size
    assert (small.bigram_rows, large.bigram_rows) == (16 * 5000, 0)
    assert choose(60, text=Text(10_000, 4096)).config.model.bigram_rows == 0
    assert choose(60, given={"bigram_rows"}, bigram_rows=7).config.model.bigram_rows == 7


def refined(given=(), text=TEXT, **costs):
    """What ten minutes come to on a machine with such costs, and what was tried for it."""
    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    machine = Machine(6e10, **costs)
    names = {"input_files", "precision", *given}
    return chosen(config, names, text, 600.0, machine).config, machine.tried


def test_steps_that_take_time_whatever_their_batch_have_larger_batches():
    alone, beside = (refined(own=own)[0].tokens_per_step for own in (0.0, 1.0))
    assert beside == 2 * alone
    given, _ = refined({"global_batch_size"}, own=1.0)
    assert given.training.global_batch_size == preset("modern").training.global_batch_size


def test_a_table_of_bigrams_has_fewer_rows_where_they_take_more_time_than_they_save():
    (cheap, _), (dear, tried) = refined(), refined(row=2e-6)
    assert cheap.model.bigram_rows == 16 * 5000 and dear.model.bigram_rows == 4 * 5000
    assert {config.model.bigram_rows for config in tried} == {16 * 5000, 4 * 5000}
    kept, _ = refined({"bigram_rows"}, row=2e-6)
    assert kept.model.bigram_rows == preset("modern").model.bigram_rows


def test_what_was_given_stays():
    given = {
        "layers": 3,
        "hidden_size": 96,
        "heads": 3,
        "global_batch_size": 12,
        "micro_batch_size": 4,
    }
    given |= {"learning_rate": 1e-3, "sequence_length": 64}
    choice = choose(600, given=given, **given).config
    for name, value in given.items():
        assert value in (getattr(choice.model, name, None), getattr(choice.training, name, None),
                         getattr(choice.execution, name, None)), name  # fmt: skip


@pytest.mark.parametrize("hidden, heads", [(64, 1), (130, 1), (192, 3), (200, 2), (384, 6)])
def test_heads_follow_from_a_hidden_size_that_was_given(hidden, heads):
    words = ["--minutes", "10", "--hidden_size", str(hidden), "--input_files", "train"]
    config, _, given = parse_training(words)
    model = chosen(config, given, TEXT, 600.0, Machine(6e10)).config.model
    assert (model.hidden_size, model.heads) == (hidden, heads)


def choose_by_words(*words):
    """What a command line comes to, and how many trials it took."""
    words, machine = ["--minutes", "10", "--input_files", "train", *words], Machine(6e10)
    config, _, given = parse_training(words)
    return chosen(config, given, TEXT, 600.0, machine).config, machine.tried


@pytest.mark.parametrize("flag, value", [("heads", 12), ("heads", 3), ("key_value_heads", 2)])
def test_sizes_that_do_not_go_with_what_was_given_are_left_out(flag, value):
    config, _ = choose_by_words(f"--{flag}", str(value))
    assert getattr(config.model, flag) == value
    assert config.model.hidden_size % config.model.heads == 0


@pytest.mark.parametrize(
    "words",
    [
        "--micro_batch_size 16",
        "--micro_batch_size 3",
        "--widening 2",
        "--widening 3 --micro_batch_size 4",
        "--global_batch_size 12",
        "--global_batch_size 12 --widening 3",
        "--device_iterations 4",
        "--device_iterations 7 --widening 2",
    ],
)
def test_what_runs_at_once_need_not_go_with_the_preset_that_sizes_are_chosen_in(words):
    config, _ = choose_by_words(*words.split())
    given = dict(zip(words.split()[::2], map(int, words.split()[1::2])))
    sections = (config.training, config.execution)
    for flag, value in given.items():
        assert value in [getattr(each, flag.removeprefix("--"), None) for each in sections]
    assert config.tokens_per_step >= 1024 and config.training.steps > 100
    assert config.training.steps % config.execution.device_iterations == 0


@pytest.mark.parametrize("flag", ["validate_first", "validate_training"])
def test_held_out_data_that_are_found_are_validated_on_before_the_first_step(flag):
    config, _ = choose_by_words(f"--{flag}")
    assert getattr(config.training, flag) and config.training.validate_every > 1
    config, _ = choose_by_words(f"--{flag}", "--validation_files", "other")
    assert getattr(config.training, flag) and config.data.validation_files == ("other",)
    assert not getattr(choose_by_words(f"--no-{flag}")[0].training, flag)


@pytest.mark.parametrize("flag", ["validate_first", "validate_training"])
@pytest.mark.parametrize("files", ["train", "none"])
def test_a_validation_of_nothing_is_refused_before_the_trials(flag, files):
    words, machine = ["--minutes", "10", "--input_files", files, f"--{flag}"], Machine(6e10)
    config, _, given = parse_training(words)
    text = None if files == "none" else replace(TEXT, validation_files=())
    with pytest.raises(ConfigError, match=f"{flag}: got true while validate_every is 0"):
        chosen(config, given, text, 600.0, machine)
    assert not machine.tried


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        "--rampup_batch_size 2",
        "--rampup_batch_size 3",
        "--rampup_batch_size 8",
        "--rampup_batch_size 64",
        "--rampup_batch_size 3 --rampup_increment 2",
        "--rampup_batch_size 16 --rampup_increment 8",
        "--rampup_batch_size 2 --rampup_increment 1000",
        "--rampup_batch_size 4 --micro_batch_size 2 --widening 2",
        "--rampup_batch_size 6 --rampup_increment 3 --widening 3",
        "--rampup_batch_size 6 --global_batch_size 12",
        "--rampup_batch_size 3 --rampup_increment 3 --global_batch_size 12",
    ],
)
def test_a_batch_is_chosen_that_the_one_that_a_run_begins_with_grows_to(words):
    config, _ = choose_by_words(*words.split(), "--rampup_tokens", "1000000")
    validate(config)
    given = dict(zip(words.split()[::2], map(int, words.split()[1::2])))
    for flag, value in given.items():
        found = flag.removeprefix("--")
        assert value in [getattr(each, found, None) for each in (config.training, config.execution)]
    assert config.tokens_per_step >= 1024 and config.training.steps > 1


def test_a_batch_grows_to_about_what_is_chosen_without_a_ramp():
    alone = choose_by_words()[0].training.global_batch_size
    for first in (
        ("--rampup_batch_size", "2"),
        ("--rampup_batch_size", "3", "--rampup_increment", "1"),
    ):
        found = choose_by_words(*first, "--rampup_tokens", "1000000")[0].training.global_batch_size
        assert alone / 2**0.5 - 0.5 <= found <= alone * 2**0.5 + 0.5  # that is a power of two
    steep = ("--rampup_batch_size", "1", "--rampup_increment", "1", "--rampup_tokens", "1000000")
    config, _ = choose_by_words(*steep, "--sequence_length", "16", "--layers", "2")
    assert config.training.global_batch_size == 1 + 64


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--rampup_batch_size 3 --micro_batch_size 2", "so a stage of 3 sequences; .* = 2"),
        ("--rampup_batch_size 4", "rampup_tokens: got none with rampup_batch_size = 4"),
        ("--rampup_batch_size 8 --global_batch_size 8", "fewer than global_batch_size = 8"),
        ("--rampup_batch_size 5 --global_batch_size 8", "global_batch_size = 8 is reached by"),
    ],
)
def test_a_ramp_that_no_choice_goes_with_is_refused_with_the_command_line(words, problem):
    tokens = [] if "got none" in problem else ["--rampup_tokens", "1000000"]
    with pytest.raises(ConfigError, match=problem):
        parse_training(["--minutes", "10", *words.split(), *tokens])


def test_several_replicas_are_refused_for_what_they_are():
    config = parse_training(["--minutes", "10", "--data_parallel", "3"]).config
    with pytest.raises(UserError, match="--minutes: got several replicas without --config"):
        choose_in_job(config, set(), TrainOptions())


def test_several_replicas_of_one_process_are_refused_in_the_same_words(monkeypatch):
    started = {"RANK": 0, "WORLD_SIZE": 1, "POPDIST_NUM_TOTAL_REPLICAS": 2}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    config = parse_training(["--minutes", "10"]).config
    with pytest.raises(UserError, match="--minutes: got several replicas without --config"):
        choose_in_job(config, set(), TrainOptions())


@pytest.mark.parametrize("words", [["abc"], ["0"], ["-1"], ["nan"], []], ids=str)
def test_minutes_that_are_none_are_refused_in_words(words):
    with pytest.raises(ConfigError, match="^--minutes: got .*; expected") as told:
        parse_training(["--minutes", *words])
    assert len(told.value.problems) == 1


def test_no_minutes_leave_nothing_to_choose():
    config, _, given = parse_training(["--minutes", "none"])
    assert config == parse_training([]).config
    assert not chooses_model(given, config.training.minutes, None)
    assert chooses_model(parse_training(["--minutes", "1"]).given, 1.0, None)


def is_to_choose(line) -> bool:
    return chooses_model(line.given, line.config.training.minutes, line.config.checkpoint.load)


@pytest.mark.parametrize("name", [None, "other"])
def test_a_run_by_the_clock_goes_on_with_what_it_has_chosen(tmp_path, name):
    data = described(tmp_path / "mine", 40)
    words = ["--minutes", "5", "--input_files", str(data), "--run_folder", str(tmp_path / "runs")]
    words += [] if name is None else ["--name", name]
    again = [*words, "--checkpoint.load", "auto", "--log_every", "7"]
    first = parse_training(again)
    assert is_to_choose(first) and first.config.name == (name or "mine_5_minutes")
    was = override(parse_training(words).config, layers=5, hidden_size=320, heads=5)
    folder = tmp_path / "runs" / was.name
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(to_yaml(was))
    assert is_to_choose(parse_training(words))  # another run of the name
    found = parse_training(again)
    assert not is_to_choose(found)
    assert found.config == override(was, load="auto", log_every=7)


def test_a_run_that_the_launcher_starts_again_has_chosen(tmp_path, monkeypatch):
    words = ["--minutes", "5", "--run_folder", str(tmp_path), "--log_every", "7"]
    monkeypatch.setenv("POPDIST_NOTE", str(tmp_path / "note"))
    assert is_to_choose(parse_training(words))  # the first start
    folder = tmp_path / "5_minutes-2"
    (tmp_path / "note").write_text(json.dumps([str(folder), str(folder / "checkpoints")]))
    assert is_to_choose(parse_training(words))  # it has ended before that was written
    was = override(parse_training(words).config, layers=5, hidden_size=320, heads=5)
    folder.mkdir()
    (folder / "config.yml").write_text(to_yaml(was))
    found = parse_training(words)
    assert not is_to_choose(found) and found.config.model == was.model
    assert found.config.logging.log_every == 7


def test_steps_and_validations_are_whole_calls_of_the_program():
    given = {"device_iterations": 4, "every": 0, "steps": 400, "log_every": 1}
    config = choose(600, given={"device_iterations"}, **given).config
    assert config.training.steps % 4 == 0 and config.training.validate_every % 4 == 0


def test_the_steps_that_are_expected_fill_the_time_with_all_else():
    config = preset("modern", schedule="wsd", input_files=("train",), validate_every=0)
    machine = Machine(6e10)
    found = chosen(config, {"input_files"}, TEXT, 600.0, machine).config
    trials = sum(trial.build + 3 * trial.step for trial in map(Machine(6e10), machine.tried))
    step, steps = Machine(6e10)(found).step, found.training.steps
    validations = 1 + steps / found.training.validate_every
    others = trials + 2 * 2.0 + 1.0  # the program of training, and of texts; reports
    assert others + step * (steps + 3 * validations) == pytest.approx(600.0, abs=2 * step)


def test_no_size_at_all_is_refused_with_what_is_wrong_of_the_smallest():
    with pytest.raises(ConfigError, match="hidden_size: got 128; expected a multiple of heads"):
        choose_by_words("--hidden_size", "128", "--heads", "12")


@pytest.mark.parametrize(
    "words", ["--warmup_steps 1000", "--steps 100", "--warmup_steps 80 --steps 100"]
)
def test_a_decay_has_its_share_whatever_warmup_was_given(words):
    training = choose_by_words(*words.split())[0].training
    assert training.decay_share == pytest.approx(0.4, abs=0.01)


def test_the_prediction_is_what_the_machine_does_in_the_time():
    choice = choose(600)
    machine = Machine(6e10)
    step = machine(choice.config).step
    assert choice.config.training.steps * step == pytest.approx(600, rel=0.1)
    said = "\n".join(choice.reasons)
    for word in ("machine", "data", "size", "batch", "rate", "precision", "expected"):
        assert f"{word} " in said
    assert f"{choice.config.training.steps} steps" in said


def test_what_was_given_has_no_other_reason():
    values = {"layers": 3, "hidden_size": 96, "heads": 3, "learning_rate": 1e-3}
    values |= {"global_batch_size": 12, "micro_batch_size": 4, "bigram_rows": 7}
    for given in ((), tuple(values)):
        reasons = choose(600, given=given, **{name: values[name] for name in given}).reasons
        for line in reasons[2:6]:
            assert ("as given" in line) == bool(given), line


@pytest.mark.parametrize("tokens", [7, None])
def test_a_description_without_the_number_of_tokens_tells_nothing(tmp_path, tokens):
    file = tmp_path / "train-00000.tfrecord"
    with RecordWriter(file) as writer:
        for payload in example.encode(np.arange(7)[None]):
            writer.write(payload)
    train = {"files": [{"name": file.name, "bytes": file.stat().st_size, "records": 1}]}
    train |= {} if tokens is None else {"tokens": tokens}
    info = {"vocabulary_size": 300, "splits": {"train": train}}
    (tmp_path / "dataset.json").write_text(json.dumps(info))
    found = text_of(preset("tiny", input_files=(str(file),)))
    assert found == (None if tokens is None else Text(7, 300))


def described(folder: Path, tokens: int, vocabulary: int = 300) -> Path:
    """A folder of so many tokens to train on, and some that are held out."""
    folder.mkdir()
    splits = {}
    for split in ("train", "validation"):
        file = folder / f"{split}-00000.tfrecord"
        with RecordWriter(file) as writer:
            for payload in example.encode(np.arange(tokens)[None]):
                writer.write(payload)
        facts = {"name": file.name, "bytes": file.stat().st_size, "records": 1}
        splits[split] = {"files": [facts], "tokens": tokens}
    (folder / "dataset.json").write_text(
        json.dumps({"vocabulary_size": vocabulary, "splits": splits})
    )
    return folder


def test_of_several_folders_all_tokens_count_and_all_that_is_held_out(tmp_path):
    folders = [described(tmp_path / "a", 40), described(tmp_path / "b", 10, vocabulary=400)]
    held_out = tuple(f"{folder}/validation-00000.tfrecord" for folder in folders)
    files = tuple(f"{folder}/train-*.tfrecord" for folder in folders)
    assert text_of(preset("tiny", input_files=files)) == Text(50, 400, None, held_out)
    for weights, tokens in (((4, 1), 50), ((1, 1), 20), ((9, 1), 44)):  # until one was seen once
        mix = tuple(f"{folder}={weight}" for folder, weight in zip(folders, weights))
        assert text_of(preset("tiny", mix=mix)) == Text(tokens, 400, None, held_out)


def test_the_tokens_of_a_text_are_those_of_the_files_that_are_named(tmp_path):
    names = [f"train-0000{number}.tfrecord" for number in range(4)]
    for name in names:
        with RecordWriter(tmp_path / name) as writer:
            for payload in example.encode(np.arange(10)[None]):
                writer.write(payload)
    facts = [
        {"name": name, "bytes": (tmp_path / name).stat().st_size, "records": 1} for name in names
    ]
    info = {"vocabulary_size": 300, "splits": {"train": {"files": facts, "tokens": 36}}}
    (tmp_path / "dataset.json").write_text(json.dumps(info))

    def tokens(*files, **settings):
        return text_of(preset("tiny", input_files=files, sequence_length=9, **settings)).tokens

    one, two = f"{tmp_path}/{names[0]}", f"{tmp_path}/train-0000[01].tfrecord"
    assert [tokens(f"{tmp_path}/train-*"), tokens(one), tokens(two), tokens(one, two)] == [
        36, 9, 18, 18,
    ]  # fmt: skip
    assert tokens(f"{tmp_path}/train-*", train_samples=3) == 27
    assert tokens(one, train_samples=3) == 9
    info["splits"]["train"]["files"] = facts[1:]
    (tmp_path / "dataset.json").write_text(json.dumps(info))
    assert text_of(preset("tiny", input_files=(one,))) is None


def test_what_is_trained_on_is_not_validated_on_without_a_word(tmp_path, caplog):
    folder = described(tmp_path / "mine", 40)
    assert text_of(preset("tiny", input_files=(f"{folder}/train-*",))).validation_files
    assert not caplog.records
    found = text_of(preset("tiny", input_files=(f"{folder}/*.tfrecord",)))
    assert found == Text(80, 300)
    assert "got files that data/prepare.py has held out" in caplog.text
    caplog.clear()
    words = {
        "sequence_length": 39,
        "vocabulary_size": 300,
        "input_files": (f"{folder}/*.tfrecord",),
    }
    apart = preset("tiny", **words)
    open_data(apart)
    assert not caplog.records
    open_data(override(apart, validation_files=(f"{folder}/validation-00000.tfrecord",)))
    assert "--validation_files: got files that are trained on, too, 1 of them" in caplog.text


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--train_samples 99", "--train_samples: got 99; expected at most the 1 of the data"),
        ("--sequence_length 64", "sequence_length"),
        ("--lora_rank 4 --optimizer adamw", "--lora_rank: got 4 without --init_from"),
        ("--tokenizer nothing", "--tokenizer: got nothing"),
        (
            "--layers 2 --hidden_size 128 --init_from nothing",
            "--init_from: got nothing",
        ),
    ],
)
def test_what_no_choice_can_lead_to_is_refused_before_the_trials(
    tmp_path, monkeypatch, words, problem
):
    monkeypatch.setattr(sizing, "step_times", lambda *_: pytest.fail("a trial"))
    monkeypatch.chdir(tmp_path)
    data = described(tmp_path / "mine", 40)
    given = words if "--sequence_length" in words else f"{words} --sequence_length 39"
    line = parse_training(["--minutes", "10", "--input_files", str(data), *given.split()])
    program_clock.begin()
    with pytest.raises(UserError, match=problem):
        choose_in_job(line.config, line.given, line.options)
    assert not (tmp_path / "runs").exists()


def test_weights_to_begin_with_need_a_size_that_is_not_chosen():
    for sizes in ([], ["--layers", "2"]):
        with pytest.raises(ConfigError, match="--init_from: got it with --minutes, which chooses"):
            parse_training(["--minutes", "10", "--init_from", "other", *sizes])
    parse_training(["--minutes", "10", "--init_from", "a", "--layers", "2", "--hidden_size", "128"])


@pytest.mark.parametrize("words", ["--master_weights true", "--loss_scaling auto"])
@pytest.mark.parametrize("may_narrow", [True, False])
def test_what_needs_16_bits_is_trained_in_16_bits(monkeypatch, words, may_narrow):
    monkeypatch.setattr(training_axes, "may_narrow", lambda device: may_narrow)
    config, tried = choose_by_words(*words.split())
    assert {each.model.precision for each in (config, *tried)} == {"bfloat16"}
    with pytest.raises(ConfigError, match="while precision is float32"):
        choose_by_words(*words.split(), "--precision", "float32")


def test_before_the_pace_is_known_the_expected_steps_stay():
    schedule = TimedSchedule(replace(TRAINING, steps=100), 60.0)
    assert [schedule.tell(step, 0.5 * step, 1.0) for step in (1, 2)] == [100, 118]

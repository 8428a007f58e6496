"""Signals while nothing is to be saved yet, and signals that come again: each in every state of a
run.
"""

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from popxl_addons import TaskSession

from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.demo import pretraining
from popxl_gpt.demo.job import checkpoints, interruption, part
from popxl_gpt.demo.job import run as training_run
from popxl_gpt.demo.job.validation import Validation
from popxl_gpt.execution.checkpoints import saving
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.execution.reports.metrics import read_metrics
from tests.integration.runs import run_job

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def handlers():
    """What hears signals here is as it was, after a run has ended by one."""
    before = {number: signal.getsignal(number) for number in (*interruption.ENDING, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


SETTINGS = {
    "config": "tiny", "name": "run", "vocabulary_size": 61, "hidden_size": 24, "heads": 3,
    "steps": 4, "warmup_steps": 0, "global_batch_size": 4, "micro_batch_size": 2,
    "sequence_length": 8, "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1,
}  # fmt: skip


def words(folder, **settings):
    """The command line of a run in `folder`/runs/run; `__` stands for a dot."""
    given = {**SETTINGS, "run_folder": folder / "runs", **settings}
    flags = ((f"--{name.replace('__', '.')}", str(value)) for name, value in given.items())
    return [word for flag in flags for word in flag]


def here(folder, **settings):
    run_job(*words(folder, **settings))


def killed_by(monkeypatch, owner, name, numbers, call=1):
    """Let the call of a function, of so many, send these signals to this process, and count what
    it goes on with.
    """
    plain, calls = getattr(owner, name), []

    def killing(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
            calls.append("went on")
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, killing)
    return calls


def ends_with(number, run):
    """The run ends with a signal's exit code."""
    if number == signal.SIGINT:  # which the programs' entry makes 130
        with pytest.raises(KeyboardInterrupt):
            run()
        return
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + number


BEFORE_A_STEP = {
    "building": (part, "pretraining"),
    "loading": (TaskSession, "__enter__"),
    "first validation": (Validation, "measure"),
    "reading": (BatchLoader, "batch"),
    "first step": (training_run, "run_steps"),
}


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("state", BEFORE_A_STEP)
def test_a_signal_before_a_step_is_done_ends_the_run_at_once(
    state, resumed, tmp_path, monkeypatch, capfd, handlers
):
    run, kept = tmp_path / "runs/run", {0}
    number = NUMBERS[list(BEFORE_A_STEP).index(state) % len(NUMBERS)]
    settings = {"validate_every": 1, "validate_first": "true", "validation_batches": 1}
    if resumed:
        here(tmp_path, steps=2, checkpoint__every=2, validate_every=0)
        kept = {1, 2}
        settings |= {"checkpoint__load": "auto", "validate_every": 2}
    calls = killed_by(monkeypatch, *BEFORE_A_STEP[state], [number])
    ends_with(number, lambda: here(tmp_path, **settings))
    assert len(calls) == 1, "it did not go on"
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"{name}: ending at once; nothing is left to save" in capfd.readouterr().err
    assert {line["step"] for line in read_metrics(run / "metrics.jsonl")} <= kept
    saved = [path.name for path in checkpoints_in(run / "checkpoints")]
    assert saved == (["step_00000002"] if resumed else [])
    if resumed:
        here(tmp_path, checkpoint__load="auto", steps=4)
        assert [path.name for path in checkpoints_in(run / "checkpoints")][-1] == "step_00000004"
    elif state == "building":
        assert not (tmp_path / "runs").exists(), "folders that it made are gone"


@pytest.mark.slow
def test_data_that_do_not_come_delay_no_end(tmp_path, monkeypatch, handlers):
    came = threading.Event()

    def stuck(dataset, samples):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        came.wait(60)
        return np.zeros((len(samples), 9), np.int32)

    monkeypatch.setattr(SyntheticDataset, "read", stuck)
    begin = time.monotonic()
    ends_with(signal.SIGTERM, lambda: here(tmp_path))
    assert time.monotonic() - begin < 20
    came.set()


STATES = {
    "step": (training_run, "run_steps", 2),
    "reading": (BatchLoader, "batch", 3),
    "validation": (Validation, "measure", 1),
    "saving": (checkpoints, "begin_save", 1),
    "writing": (saving.Saving, "wait", 1),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_a_second_signal_ends_a_run_at_once_in_every_state(
    state, tmp_path, monkeypatch, capfd, handlers
):
    number = (signal.SIGTERM, signal.SIGINT)[list(STATES).index(state) % 2]
    monkeypatch.setattr(interruption, "AGAIN_SECONDS", 0.0)
    *place, call = STATES[state]
    calls = killed_by(monkeypatch, *place, [signal.SIGHUP, number], call)
    settings = {"validate_every": 2, "validation_batches": 1, "checkpoint__every": 2}
    ends_with(number, lambda: here(tmp_path, **settings, samples=1))
    assert calls[-1] != "went on"


WATCHED = {
    "nobody": ({}, False),
    "nobody, of one process": ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    "nobody, of several": ({"RANK": "1", "WORLD_SIZE": "2"}, False),
    "poprun": ({"RANK": "0", "WORLD_SIZE": "1", "POPDIST_RENDEZVOUS": "/here"}, True),
    "torchrun": ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, True),
    "mpirun": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, True),
}
"""What starts a process, its variables, and whether a second signal is left to it."""


@pytest.mark.parametrize(("variables", "is_left"), WATCHED.values(), ids=WATCHED)
def test_a_second_signal_ends_a_process_at_once_unless_its_launcher_sees_to_that(
    variables, is_left, monkeypatch, handlers
):
    monkeypatch.setattr(interruption, "AGAIN_SECONDS", 0.0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def run():
        with interruption.Interruption() as heard:
            heard.has_steps(True)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            sys.exit("went on")

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == ("went on" if is_left else 128 + signal.SIGTERM)


def test_what_was_ignored_before_a_run_ends_no_run(handlers):
    for number in interruption.KEPT:
        signal.signal(number, signal.SIG_IGN)
    with interruption.Interruption() as heard:
        heard.has_steps(True)
        for number in interruption.KEPT:
            os.kill(os.getpid(), number)
    assert heard.signal is None


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGQUIT, None])
def test_other_signals_that_come_again_are_the_same_wish(
    second, tmp_path, monkeypatch, capfd, handlers
):
    numbers = [signal.SIGTERM] * 3 if second is None else [signal.SIGTERM, second, second]
    if second is not None:  # else less than a second passes
        monkeypatch.setattr(interruption, "AGAIN_SECONDS", 0.0)
    killed_by(monkeypatch, training_run, "run_steps", numbers, 2)
    assert pretraining.main(words(tmp_path)) == 128 + signal.SIGTERM
    saved = checkpoints_in(tmp_path / "runs/run/checkpoints")
    assert [path.name for path in saved] == ["step_00000002"]
    assert (
        "stopping after this step; Ctrl-C or SIGTERM again stops at once" in capfd.readouterr().err
    )

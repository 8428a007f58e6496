"""Checkpoints that are written while training goes on: the bits they hold, and what happens to one
that is being written when the run's course changes.
"""

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.demo import pretraining as job
from popxl_gpt.demo.job import checkpoints as checkpoints_part
from popxl_gpt.demo.job import run as training_run
from popxl_gpt.execution.checkpoints import saving
from popxl_gpt.execution.checkpoints.checkpoint_folder import folder_name
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import begin_save, save
from popxl_gpt.execution.planning.memory import copy_bytes
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.errors import DivergedError, UserError
from tests.integration.runs import TRAINED
from tests.integration.saved_runs import BASE, train
from tests.integration.skipping import POISON, session_of, state_of
from tests.integration.skipping import run as run_steps

SECONDS = 60


class Gate:
    """Holds the thread that writes the checkpoint of a step, until somebody waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int):
        self.is_reached, self._is_open = threading.Event(), threading.Event()
        write = saving.write_tensors

        def write_later(tensors, path):
            if folder_name(step) in str(path):
                self.is_reached.set()
                assert self._is_open.wait(SECONDS)
            return write(tensors, path)

        patch.setattr(saving, "write_tensors", write_later)
        for name in ("wait", "abandon"):
            patch.setattr(saving.Saving, name, self._opening(getattr(saving.Saving, name)))

    def _opening(self, method):
        def open_and_call(*arguments):
            self.open()
            return method(*arguments)

        return open_and_call

    def open(self) -> None:
        self._is_open.set()

    @property
    def is_holding(self) -> bool:
        return self.is_reached.wait(SECONDS) and not self._is_open.is_set()


def files_of(checkpoint: Path) -> "dict[str, bytes]":
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


BEHIND = [
    {},
    {"data_parallel": 2, "tensor_parallel_1": 2, "replicated_tensor_sharding": True},
    {"precision": "float16", "master_weights": True, "loss_scaling": "auto"},
]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("changes", BEHIND, ids=str)
def test_what_is_written_behind_is_the_step_that_it_was_begun_after(changes, tmp_path, monkeypatch):
    config, position = override(BASE, **changes), Position(2, "data")
    session = pretraining(config)
    train(session, config, range(2))
    expected = files_of(save(session, config, tmp_path / "before", position))
    gate = Gate(monkeypatch, 2)
    with session:
        begun = begin_save(session, config, tmp_path / "behind", position)
        assert gate.is_holding
        train(session, config, range(2, 4))
        assert not begun.is_done and not begun.target.exists()
        assert files_of(begun.finish()) == expected
        later = files_of(save(session, config, tmp_path / "later", position))
    assert all(later[name] != expected[name] for name in expected if name != "checkpoint.json")


@pytest.mark.slow
def test_steps_that_are_skipped_and_spikes_while_a_checkpoint_is_written_change_no_bit_of_it(
    poisoned, tmp_path, monkeypatch
):
    config = override(
        TRAINED, steps=8, on_spike="skip", spike_window=2, spike_threshold=0.01, precision="float32",
        stochastic_rounding=False,
    )  # fmt: skip
    session, position = session_of(config), Position(2, "data")
    run_steps(session, config, 0, [1e-3])
    run_steps(session, config, 1, [1e-3])
    expected = files_of(save(session, config, tmp_path / "before", position))
    gate, before = Gate(monkeypatch, 2), state_of(session)
    with session:
        begun = begin_save(session, config, tmp_path / "behind", position)
        assert gate.is_holding
        assert run_steps(session, config, 2, [POISON])[0].is_skipped
        session.write_variables_data({session.state.norm_mean: np.float32(1e-3)})
        assert run_steps(session, config, 3, [1e-3])[0].is_spike
        assert state_of(session) == before
        assert not begun.is_done
        assert files_of(begun.finish()) == expected
        later = save(session, config, tmp_path / "later", Position(4, "data"))
    assert files_of(later)["head.safetensors"] == expected["head.safetensors"]
    assert json.loads((later / "checkpoint.json").read_text())["skipped"] == 1


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory) -> "dict[str, bytes]":
    """A checkpoint after two steps with rows in memory."""
    session = pretraining(BASE)
    train(session, BASE, range(2))
    return files_of(save(session, BASE, tmp_path_factory.mktemp("plain"), Position(2, "data")))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, "1MiB"])
def test_what_is_in_files_is_written_before_training_goes_on(limit, in_memory, tmp_path):
    config = override(BASE, memmap_dir=str(tmp_path / "rows"), host_memory=limit)
    session = pretraining(config)
    with session:
        train(session, config, range(2))
        begun = begin_save(session, config, tmp_path, Position(2, "data"))
        assert begun.is_done
        expected = files_of(begun.target)
        train(session, config, range(2, 4))
    assert files_of(begun.finish()) == expected
    for name in expected:
        assert name == "checkpoint.json" or expected[name] == in_memory[name], name


def layer_bytes(session, config):
    """Bytes of each layer's tensors in a checkpoint."""
    return {
        layer: sum(codec.nbytes for codec in codecs.values())
        for layer, codecs in saving.layer_tensors(session, config).items()
    }


@pytest.mark.slow
def test_a_copy_takes_no_more_than_half_of_the_free_memory(tmp_path, monkeypatch):
    session = pretraining(BASE)
    sizes, most = layer_bytes(session, BASE), [0]
    free = 2 * (max(sizes.values()) + min(sizes.values()))
    assert 2 * sum(sizes.values()) > free
    put = saving.PartQueue.put

    def watched(queue, part):
        put(queue, part)
        most.append(queue._bytes)

    monkeypatch.setattr(saving.PartQueue, "put", watched)
    monkeypatch.setattr(saving, "host_bytes", lambda: (2 * free, free, "a test"))
    with session:
        begin_save(session, BASE, tmp_path, Position(1, "data")).finish()
    assert max(sizes.values()) <= max(most) <= free // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bfloat16", "stochastic_rounding": True, "moment_precision": "bfloat16"}],
    ids=str,
)
def test_a_plan_counts_the_copy(changes):
    config = override(BASE, **changes)
    sizes = layer_bytes(pretraining(config), config)
    assert copy_bytes(config, 1) == pytest.approx(sum(sizes.values()), rel=0.01)
    of_two = max(sum(sizes[name] for name in share) for share in saving._shares(sizes, 2))
    assert copy_bytes(config, 2) == pytest.approx(of_two, rel=0.2)
    assert copy_bytes(override(config, memmap_dir="anywhere"), 1) == 0


# In a run


SETTINGS: "dict[str, object]" = {
    "config": "tiny", "name": "run", "vocabulary_size": 61, "hidden_size": 24, "heads": 3, "dropout": 0.1,
    "steps": 6, "warmup_steps": 0, "global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 8,
    "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "samples": 0,
    "checkpoint.every": 2, "checkpoint.keep": 10,
}  # fmt: skip


def run(folder: Path, **settings: object) -> int:
    """The training job in this process. Returns its exit code."""
    given = {**SETTINGS, "run_folder": folder / "runs", **settings}
    return job.main([str(word) for name, value in given.items() for word in (f"--{name}", value)])


def before_step(patch: pytest.MonkeyPatch, number: int, do) -> None:
    """Let something happen in training before a step."""
    run_steps, calls = training_run.run_steps, []

    def with_event(*arguments):
        calls.append(None)
        if len(calls) == number:
            do()
        return run_steps(*arguments)

    patch.setattr(training_run, "run_steps", with_event)


@pytest.fixture
def gate(monkeypatch):
    """Step 2 is saved, and written when somebody waits for it: before step 4 is saved, at the
    latest.
    """
    return Gate(monkeypatch, 2)


def saved_in(folder: Path) -> "list[str]":
    return sorted(path.name for path in folder.iterdir())


def names(*steps: int) -> "list[str]":
    return [folder_name(step) for step in steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The checkpoints of a run that waits for each of them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoints_part,
            "begin_save",
            lambda *given, **more: begin_save(*given, **{**more, "is_behind": False}),
        )
        assert run(folder, **{"checkpoint.every": 1}) == 0
    return folder / "runs/run/checkpoints"


def check(folder: Path, undisturbed: Path, *steps: int) -> None:
    """A run's checkpoints are those of these steps, whole, and nothing else is left."""
    checkpoints = folder / "runs/run/checkpoints"
    assert saved_in(checkpoints) == names(*steps)
    for name in names(*steps):
        theirs = files_of(undisturbed / name)
        for file, content in files_of(checkpoints / name).items():
            assert file == "checkpoint.json" or content == theirs[file], f"{name}/{file}"


@pytest.mark.slow
def test_a_run_goes_on_while_it_saves_and_its_checkpoints_are_those_of_one_that_waits(
    gate, undisturbed, tmp_path, monkeypatch
):
    seen = []
    before_step(monkeypatch, 4, lambda: seen.append(gate.is_holding))
    assert run(tmp_path) == 0
    assert seen == [True]
    check(tmp_path, undisturbed, 2, 4, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, steps",
    [(signal.SIGTERM, 128 + signal.SIGTERM, (2, 4)), (signal.SIGUSR1, 0, (2, 4, 6))],
)
def test_a_signal_while_a_checkpoint_is_written_waits_for_it_and_saves(
    number, code, steps, gate, undisturbed, tmp_path, monkeypatch
):
    def send() -> None:
        assert gate.is_holding
        os.kill(os.getpid(), number)

    before_step(monkeypatch, 4, send)
    # SIGUSR1 alone asks for step 4
    every = {"checkpoint.every": 2 if number == signal.SIGTERM else 0}
    if number == signal.SIGUSR1:
        before_step(monkeypatch, 2, lambda: os.kill(os.getpid(), number))
    assert run(tmp_path, **every) == code
    check(tmp_path, undisturbed, *steps)


@pytest.mark.slow
def test_an_error_while_a_checkpoint_is_written_leaves_it_whole(
    gate, undisturbed, tmp_path, monkeypatch
):
    def fail() -> None:
        assert gate.is_holding
        raise UserError("the data are gone")

    before_step(monkeypatch, 4, fail)
    with pytest.raises(UserError, match="the data are gone"):
        run(tmp_path)
    check(tmp_path, undisturbed, 2)


@pytest.mark.slow
def test_ctrl_c_for_the_second_time_does_not_wait_for_a_checkpoint(gate, tmp_path, monkeypatch):
    def interrupt() -> None:
        assert gate.is_holding
        raise KeyboardInterrupt

    before_step(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert not (tmp_path / "runs/run/checkpoints").exists()  # empty, and made by this run


@pytest.mark.slow
def test_a_checkpoint_that_is_not_finite_ends_the_run_that_went_on_and_older_ones_stay(
    undisturbed, tmp_path, monkeypatch
):
    copied = saving.copied

    def spoiled(part):
        layer, arrays = copied(part)
        if layer == "head" and (tmp_path / "runs/run/checkpoints" / folder_name(2)).exists():
            next(iter(arrays.values())).reshape(-1)[-1] = np.nan
        return layer, arrays

    monkeypatch.setattr(saving, "copied", spoiled)
    with pytest.raises(DivergedError, match=r"of head: got numbers that are not finite after st"):
        run(tmp_path)
    check(tmp_path, undisturbed, 2)


@pytest.mark.slow
def test_a_run_folder_that_goes_while_a_checkpoint_is_written_ends_the_run_which_is_saved(
    gate, undisturbed, tmp_path, monkeypatch
):
    def lose() -> None:
        assert gate.is_holding
        (tmp_path / "runs/run").rename(tmp_path / "gone")

    before_step(monkeypatch, 3, lose)
    with pytest.raises(UserError, match=r"renamed to .*gone during the run.* Step 3 is saved"):
        run(tmp_path)
    check(tmp_path, undisturbed, 3)

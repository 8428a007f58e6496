"""Checkpoints on a disk, or a file system over a network, that does not give what it has: nothing is
taken for damaged, or for absent.
"""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from popxl_gpt.execution.checkpoints import saving
from popxl_gpt.execution.checkpoints.checkpoint_folder import (
    best_in,
    checkpoints_in,
    delete_old,
    folder_name,
)
from popxl_gpt.execution.checkpoints.finding import find, find_trained
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.saving import write_weights
from popxl_gpt.execution.variables import fresh_weights
from popxl_gpt.utils.errors import UserError, failure_number
from tests import warm
from tests.integration.saved_runs import BASE

ROOT = Path(__file__).parents[3]
FAILURES = [errno.EIO, errno.ESTALE, errno.ENODEV]
OPEN = os.open


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Three checkpoints, of which the first is the best."""
    for step, loss in enumerate((1.0, 2.0, 3.0)):
        (tmp_path / folder_name(step)).mkdir()
        with monkeypatch.context() as patch, fresh_weights(BASE) as weights:
            patch.setattr(saving, "Position", lambda *_: Position(step, "", validation_loss=loss))
            write_weights(tmp_path / folder_name(step), BASE, weights)
    return tmp_path


def fail(patch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Let opening a file, or a list of names, fail."""

    def name_of(given):  # `rmtree` gives descriptors
        return None if isinstance(given, int) else Path(given)

    def open_(name, *arguments, **keywords):
        if name_of(name) == path:
            raise OSError(number, os.strerror(number), str(name))
        return OPEN(name, *arguments, **keywords)

    def listed(name=".", names=os.listdir):
        if name_of(name) == path:
            raise OSError(number, os.strerror(number), str(name))
        return names(name)

    def scanned(name=".", entries=os.scandir):
        if name_of(name) == path:
            raise OSError(number, os.strerror(number), str(name))
        return entries(name)

    patch.setattr(os, "open", open_)
    patch.setattr(os, "listdir", listed)
    patch.setattr(os, "scandir", scanned)


@pytest.mark.parametrize("number", FAILURES)
@pytest.mark.parametrize("file", ["checkpoint.json", "decoder.0.safetensors"])
@pytest.mark.parametrize(
    "newest", [lambda folder: find("auto", folder, BASE), lambda folder: find_trained(folder)]
)
def test_a_disk_that_fails_is_no_damage(
    newest: Callable, file: str, number: int, folder: Path, monkeypatch
):
    newest_one, before = folder / folder_name(2), sorted(os.listdir(folder))
    with monkeypatch.context() as patch:
        fail(patch, newest_one / file, number)
        with pytest.raises(UserError, match=f"{newest_one / file}: got '.*' while reading") as told:
            newest(folder)
    assert failure_number(told.value) == number
    assert sorted(os.listdir(folder)) == before
    assert newest(folder).folder == newest_one


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_what_the_system_lacks_is_no_damage(number, folder, monkeypatch):
    fail(monkeypatch, folder / folder_name(2) / "decoder.0.safetensors", number)
    with pytest.raises(UserError, match=os.strerror(number)):
        find("auto", folder, BASE)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EISDIR, errno.ELOOP])
def test_what_is_no_file_is_damage(number, folder, monkeypatch):
    fail(monkeypatch, folder / folder_name(2) / "decoder.0.safetensors", number)
    saved = find("auto", folder, BASE)
    assert (saved.folder, saved.passed_over) == (folder / folder_name(1), [folder / folder_name(2)])


def test_while_weights_are_read_a_disk_that_fails_is_no_damage(folder, monkeypatch):
    saved = find("auto", folder, BASE)
    fail(monkeypatch, saved.folder / "decoder.1.safetensors", errno.EIO)
    with pytest.raises(UserError, match="decoder.1.safetensors: got '.*' while reading") as told:
        list(saved.weights())
    assert failure_number(told.value) == errno.EIO


def test_a_folder_that_cannot_be_listed_is_not_empty(folder, monkeypatch):
    fail(monkeypatch, folder, errno.EIO)
    for look in (checkpoints_in, best_in, lambda f: find("auto", f, BASE)):
        with pytest.raises(OSError, match="Input/output error"):
            look(folder)


def test_what_may_be_the_best_is_not_deleted(folder, monkeypatch, caplog):
    best, newest = folder / folder_name(0), folder / folder_name(3)
    shutil.copytree(folder / folder_name(1), newest)
    with monkeypatch.context() as patch:
        fail(patch, folder, errno.EIO)
        delete_old(folder, 1)
        assert f"{folder}: got 'Input/output error' while looking for the best" in caplog.text
    assert len(checkpoints_in(folder)) == 4
    with monkeypatch.context() as patch:
        fail(patch, best / "checkpoint.json", errno.EIO)
        delete_old(folder, 1)
        assert f"{best}: got 'Input/output error' while looking for the best" in caplog.text
        with pytest.raises(OSError, match="Input/output error"):
            find("best", folder, BASE)
    assert checkpoints_in(folder) == [best, newest]


FAILING = """
import os, runpy, sys

path, opened = sys.argv[1], os.open
def failing(name, *arguments, **keywords):
    if os.fspath(name) == path and os.environ.get("POPDIST_RESTARTS", "0") == "0":
        raise OSError(5, os.strerror(5), path)
    return opened(name, *arguments, **keywords)
os.open = failing
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_that_cannot_read_its_newest_checkpoint_starts_again_from_it(tmp_path):
    flags = (
        "--config tiny --name run --samples 0 --data_parallel 1 --tensor_parallel_1 1 "
        "--tensor_parallel_2 1 --layers 1 --checkpoint.every 2 --checkpoint.load auto"
    )
    script = tmp_path / "failing.py"
    script.write_text(FAILING)

    def train(command: str, steps: int) -> subprocess.CompletedProcess:
        words = f"{command} {ROOT / 'demo/pretraining.py'} {flags} --steps {steps}".split()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
        )

    assert train(warm.python(), 4).returncode == 0
    saved = tmp_path / "runs/run/checkpoints"
    file = "runs/run/checkpoints/step_00000004/decoder.0.safetensors"
    launcher = f"{warm.launcher()} -m poprun --restarts 1 {warm.python()}"
    done = train(f"{launcher} {script} {file}", 6)
    assert done.returncode == 0, done.stderr
    assert f"error: {file}: got 'Input/output error' while reading" in done.stderr
    assert "poprun: exit code 74; all instances start again, restart 1 of 1." in done.stderr
    assert "continuing after step 4" in done.stdout
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 7))
    assert sorted(os.listdir(saved)) == ["step_00000004", "step_00000006"]  # and none is damaged

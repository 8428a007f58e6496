"""Training with state larger than memory: the same bits as in memory, clean ends where the disk or
the memory does not suffice, and runs that go on."""

import functools
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import run_steps
from popxl_gpt.execution.planning.memory import check_memory
from popxl_gpt.execution.pretraining import pretraining
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import file_traffic, runtime_errors_are_told
from tests import warm
from tests.faults import obey_permissions, read, run
from tests.integration.runs import TRAINED, batches, run_job, train
from tests.metrics_text import metrics_of

ENOUGH = 200_000
"""Bytes that hold what the largest phase uses at a time, and not much more."""


def with_files(config: Config, folder: Path, memory: object) -> Config:
    return override(config, memmap_dir=str(folder), host_memory=memory)


CASES = {
    "": TRAINED,
    "kept": override(TRAINED, recomputation=False, device_iterations=2),
    "narrow moments": override(TRAINED, moment_precision="bfloat16"),
    "8 bits": override(TRAINED, moment_precision="8bit"),
}


@functools.cache
def in_memory(case):
    return train(CASES[case])


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("memory", [ENOUGH, 1_300_000, "1GiB"])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_bitwise_those_of_the_run_in_memory(memory, case, tmp_path):
    expected, expected_weights = in_memory(case)
    results, weights = train(with_files(CASES[case], tmp_path, memory))
    assert results == expected
    for name, array in expected_weights.items():
        np.testing.assert_array_equal(weights[name], array, err_msg=name)
    assert list(tmp_path.iterdir()) == [], "files have no names"


@pytest.mark.slow
def test_rows_really_come_from_files_and_never_take_more_than_their_memory(tmp_path):
    config = with_files(TRAINED, tmp_path, ENOUGH)
    session = pretraining(config)
    with session:
        for batch in batches(config):
            before = file_traffic(session)
            run_steps(session, config, *batch, [1e-3])
    after = file_traffic(session)
    assert (
        after.memory_bytes <= ENOUGH < after.memory_bytes + 4096 and after.file_bytes > 1.5 * ENOUGH
    )
    assert after.read_bytes - before.read_bytes > after.file_bytes / 4
    assert after.written_bytes - before.written_bytes > after.file_bytes / 4
    assert 0 < after.waited


@pytest.mark.slow
def test_replicas_share_the_memory_of_their_process(tmp_path):
    config = override(TRAINED, data_parallel=2, steps=2)
    expected, _ = train(config)
    results, _ = train(with_files(config, tmp_path, 2 * ENOUGH))
    assert results == expected


@pytest.mark.slow
def test_memory_for_less_than_one_layer_is_refused_with_the_number_that_suffices(tmp_path):
    with pytest.raises(
        UserError, match="got 50000 bytes .* expected at least .* in phase"
    ) as refused:
        with runtime_errors_are_told():
            train(with_files(TRAINED, tmp_path, 50_000))
    enough = int(str(refused.value).split("at least ")[1].split()[0])
    assert 50_000 < enough <= ENOUGH
    results, _ = train(with_files(override(TRAINED, steps=1), tmp_path, enough))
    assert results == train(override(TRAINED, steps=1))[0]


def test_more_memory_than_the_machine_has_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="host_memory: got 1.00 PiB; expected at most the .* of this machine"
    ):
        check_memory(with_files(TRAINED, tmp_path, 2**50), 1)


# Runs as processes

FLAGS = (
    "--config tiny --data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1 --hidden_size "
    "48 --layers 3 --dropout 0.1 --name run --run_folder runs --checkpoint.every 2 "
    "--validate_every 2 --validation_batches 1 --schedule constant"
)
FILES = f"--memmap_dir rows --host_memory {ENOUGH}"


def job(folder, flags, largest_file=None, code=0):
    python = warm.python(before=obey_permissions)
    done, _ = run(folder, f"{{train}} {FLAGS} {flags}", largest_file, python)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def train_here(folder, flags):
    run_job(
        *FLAGS.split(),
        "--run_folder",
        folder / "runs",
        *flags.replace("rows", f"{folder}/rows").split(),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of six steps in memory, which nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train_here(folder, "--steps 6 --checkpoint.keep 3")
    return folder


def left_after_two_steps(whole, folder):
    """A copy of what the run had left after its first two steps."""
    shutil.copytree(whole / "runs", folder / "runs")
    for step in (4, 6):
        shutil.rmtree(folder / f"runs/run/checkpoints/step_{step:08d}")
    metrics = folder / "runs/run/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))


@pytest.mark.multi
def test_a_run_goes_on_in_files_where_one_in_memory_stopped_and_back(whole, tmp_path):
    left_after_two_steps(whole, tmp_path)
    job(tmp_path, f"--steps 4 --checkpoint.load auto {FILES}")
    train_here(tmp_path, "--steps 6 --checkpoint.load auto")
    assert (
        metrics_of(tmp_path / "runs/run") == metrics_of(whole / "runs/run")
        and metrics_of(whole / "runs/run").count("\n") == 6
    )


@pytest.mark.slow
def test_files_that_are_mapped_hold_validation_apart_from_training(whole, tmp_path):
    train_here(tmp_path, "--steps 6 --memmap_dir rows")
    assert (
        metrics_of(tmp_path / "runs/run") == metrics_of(whole / "runs/run")
        and metrics_of(whole / "runs/run").count('"validation_loss": null') == 3
    )


FAILING = """
import errno, os, sys

count, move = 0, os.{function}
def {function}(file, data, start):
    global count
    count += 1
    if count > {after}:
        raise OSError(errno.{error}, os.strerror(errno.{error}))
    return move(file, data, start)
os.{function} = {function}

sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.sampled(2)
@pytest.mark.multi
@pytest.mark.parametrize(
    "way, error, words, code",
    [
        ("writing", "EIO", "Input/output error", 74),
        ("writing", "ENOSPC", "No space left on device", 2),
        ("reading", "EIO", "Input/output error", 74),
    ],
)
def test_a_disk_that_fails_in_a_step_ends_the_run_in_words_and_leaves_its_checkpoint(
    way, error, words, code, whole, tmp_path
):
    left_after_two_steps(whole, tmp_path)
    saved = tmp_path / "runs/run/checkpoints/step_00000002"
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    script = tmp_path / "failing.py"
    function = {"writing": "pwritev", "reading": "preadv"}[way]
    script.write_text(FAILING.format(function=function, error=error, after=400))
    words_of_run, environment = read(
        f"{{train}} {FLAGS} {FILES} --steps 2000 --checkpoint.load auto --checkpoint.every 0"
    )
    done = subprocess.run(
        [warm.python(), str(script), *words_of_run[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert (
        f"got '{words}' while {way} remote memory; expected a disk that works. Go on from the last"
        in done.stderr
    )
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert json.loads((saved / "checkpoint.json").read_text())["step"] == 2
    train_here(tmp_path, "--steps 6 --checkpoint.load auto")
    assert metrics_of(tmp_path / "runs/run") == metrics_of(whole / "runs/run")


@pytest.mark.multi
def test_a_folder_that_takes_no_files_or_has_no_space_ends_the_run_at_its_start(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    errors = job(tmp_path, FILES.replace("rows", "closed") + " --steps 2", code=2)
    assert (
        "closed: got 'Permission denied' while making a file; expected a folder that takes files"
        in errors
    )
    errors = job(tmp_path, f"{FILES} --steps 2", largest_file=1_000_000, code=2)
    assert (
        "rows: got 'File too large' while reserving" in errors
        and "expected that much space" in errors
    )
    errors = job(tmp_path, "--memmap_dir closed --steps 2", code=2)
    assert (
        ".npy: got 'Permission denied' while making a file; expected a folder of this user, on a "
        "disk that takes it"
    ) in errors
    errors = job(tmp_path, "--memmap_dir mapped --steps 2", largest_file=4000, code=2)
    assert "mapped/" in errors and ".npy: got 'File too large' while making a file" in errors

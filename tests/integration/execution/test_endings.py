"""Runs that end before their time, and runs that meet: the training job as real processes."""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from poprun.log_mux import HOLD_SECONDS
from safetensors.numpy import load_file

import popxl_gpt.execution.checkpoints.saving
from popxl_gpt.demo import pretraining
from popxl_gpt.demo.job import checkpoints
from popxl_gpt.execution.checkpoints.checkpoint_folder import checkpoints_in
from popxl_gpt.utils.errors import UserError, failure_number
from tests import warm
from tests.faults import hear_signals
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = [pytest.mark.multi, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
SECONDS = 240
SETTINGS: "dict[str, object]" = {
    "config": "tiny", "name": "run", "vocabulary_size": 61, "hidden_size": 24, "heads": 3, "dropout": 0.1,
    "steps": 4, "warmup_steps": 0, "global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 8,
    "data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1, "samples": 0,
}  # fmt: skip
LONG = 100_000
"""Steps of a run that does not end by itself."""


def words(folder: Path, **settings: object) -> "list[str]":
    """The command line of a run in `folder`/runs/run, as a fork; `__` stands for a dot."""
    given = {**SETTINGS, "run_folder": folder / "runs", **settings}
    flags = [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('__', '.')}", str(value))
    ]
    return [warm.python(), str(ROOT / "demo/pretraining.py"), *flags]


def alone(command: "list[str]") -> "list[str]":
    """The same, run by the very process that is started."""
    return [sys.executable, *command[1:]]


def start(command: "list[str]", **options: object) -> subprocess.Popen:
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RANK", "WORLD_SIZE", "POPDIST_"))
    }
    given = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**plain, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        "preexec_fn": hear_signals,
        **options,
    }
    return subprocess.Popen(command, **given)  # type: ignore[call-overload]


def end(process: subprocess.Popen, number: "int | None" = None) -> "tuple[int, str, str]":
    """Send a signal, if one is given, and wait: exit code, output, errors."""
    with process:
        try:
            if number is not None:
                process.send_signal(number)
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            told = where_it_is(process)
            raise AssertionError(f"did not end within {SECONDS} s:\n{told}") from None
        finally:
            process.kill()
    assert "Traceback" not in (errors or ""), errors
    return process.returncode, output, errors


def where_it_is(process: subprocess.Popen) -> str:
    """End a process that does not end by itself, and what it has started, and tell where they
    were: the handler of faults prints the stacks of all threads.
    """
    for pid in instances_of(process.pid):
        os.kill(pid, signal.SIGABRT)
    time.sleep(HOLD_SECONDS + 1)  # the launcher passes on what they say
    process.send_signal(signal.SIGABRT)
    return process.communicate(timeout=60)[1] or ""


def steps_in(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_until(process: subprocess.Popen, is_so: "Callable[[], bool]") -> None:
    """A process that ends before, or takes too long, is ended, and the test fails with its words."""
    until = time.monotonic() + SECONDS
    while not is_so():
        assert process.poll() is None, process.communicate(timeout=SECONDS)
        assert time.monotonic() < until, where_it_is(process)
        time.sleep(0.005)


def wait_for_steps(process: subprocess.Popen, run: Path, steps: int = 2) -> None:
    wait_until(process, lambda: steps_in(run) >= steps)


def saved_in(folder: Path) -> "list[str]":
    return sorted(path.name for path in folder.iterdir())


# Runs that meet


def test_a_second_run_with_the_same_folder_for_checkpoints_is_refused(tmp_path):
    shared = {"checkpoint__save": tmp_path / "saved", "steps": LONG}
    first = start(words(tmp_path, **shared))
    wait_for_steps(first, tmp_path / "runs/run")
    code, _, errors = end(start(words(tmp_path, **shared, name="other")))
    assert code == 2, errors
    assert f"--checkpoint.save: got {tmp_path}/saved, to which another run is writing" in errors
    assert not (tmp_path / "runs/other").exists()
    code, _, errors = end(first, signal.SIGINT)
    assert code == 128 + signal.SIGINT, errors
    assert saved_in(tmp_path / "saved") == [f"step_{steps_in(tmp_path / 'runs/run'):08d}"]


def test_starts_of_one_name_at_once_get_a_folder_each(tmp_path):
    ends = [end(process) for process in [start(words(tmp_path)) for _ in range(4)]]
    assert [code for code, _, _ in ends] == [0] * 4, ends
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == ["run", "run-2", "run-3", "run-4"]
    for run in runs:
        assert steps_in(run) == 4
        assert saved_in(run / "checkpoints") == ["step_00000004"]


def test_of_starts_with_one_folder_for_checkpoints_one_trains_and_one_is_refused(tmp_path):
    both = [
        start(words(tmp_path, name=name, checkpoint__save=tmp_path / "saved"))
        for name in ("one", "other")
    ]
    ends = [end(process) for process in both]
    assert sorted(code for code, _, _ in ends) == [0, 2], ends
    (refused,) = (errors for code, _, errors in ends if code == 2)
    assert "--checkpoint.save: got" in refused
    assert saved_in(tmp_path / "saved") == ["step_00000004"]
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


# Signals

QUIET = {"stdout": subprocess.DEVNULL}


def poprun(command: "list[str]", instances: int = 2) -> "list[str]":
    launcher = [warm.launcher(), "-m", "poprun", "--num-replicas", str(instances)]
    return [*launcher, "--num-instances", str(instances), *command]


def check_saved(run: Path) -> None:
    """The last step that was done is saved, and nothing is left half-made."""
    assert saved_in(run / "checkpoints") == [f"step_{steps_in(run):08d}"]
    assert not [name for name in saved_in(run) if name.startswith(".")]


def instances_of(launcher: int) -> "list[int]":
    """Processes that a launcher has started."""
    return [
        int(number)
        for task in Path(f"/proc/{launcher}/task").iterdir()
        for number in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_signal_that_is_sent_twice_saves_and_ends_with_its_number(number, tmp_path):
    with open(tmp_path / "output", "w") as output:
        process = start(alone(words(tmp_path, steps=LONG)), stdout=output)
    wait_for_steps(process, tmp_path / "runs/run")
    process.send_signal(number)
    time.sleep(0.002)
    code, _, errors = end(process, signal.SIGTERM)
    assert code == 128 + number, errors
    assert "stopping after this step" in errors
    config = tmp_path / "runs/run/config.yml"
    command = f"python demo/pretraining.py --config {config} --checkpoint.load auto"
    assert (tmp_path / "output").read_text().endswith(f"  continue with {command}\n")
    check_saved(tmp_path / "runs/run")


def test_a_signal_that_nohup_ignores_is_ignored(tmp_path):
    process = start(["nohup", *words(tmp_path, steps=LONG)], **QUIET)
    wait_for_steps(process, tmp_path / "runs/run")
    process.send_signal(signal.SIGHUP)
    steps = steps_in(tmp_path / "runs/run")
    wait_for_steps(process, tmp_path / "runs/run", steps + 5)
    code, _, errors = end(process, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, errors
    check_saved(tmp_path / "runs/run")


@pytest.mark.parametrize("launched", [False, True], ids=["process", "launcher"])
def test_sigusr1_saves_and_the_run_goes_on(launched, tmp_path):
    command = words(tmp_path, steps=LONG, checkpoint__keep=1, data_parallel=1 + launched)
    process, run = start(poprun(command) if launched else command, **QUIET), tmp_path / "runs/run"
    wait_for_steps(process, run)
    process.send_signal(signal.SIGUSR1)
    wait_until(process, lambda: bool(list((run / "checkpoints").glob("step_*"))))
    wait_for_steps(process, run, steps_in(run) + 2)
    code, _, errors = end(process, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, errors
    check_saved(run)


def test_a_signal_to_the_launcher_and_its_instances_at_once_saves(tmp_path):
    command = alone(poprun(alone(words(tmp_path, steps=LONG, data_parallel=2))))
    process = start(command, **QUIET)
    wait_for_steps(process, tmp_path / "runs/run")
    for member in [*instances_of(process.pid), process.pid]:
        os.kill(member, signal.SIGTERM)
    code, _, errors = end(process)
    assert code == 128 + signal.SIGTERM, errors
    check_saved(tmp_path / "runs/run")


@pytest.mark.parametrize("launched", [False, True], ids=["process", "launcher"])
def test_a_first_step_of_minutes_ends_with_sigterm(launched, tmp_path):
    """All the steps of a call of the session are one to signals."""
    long = {"steps": LONG, "device_iterations": LONG // 10, "data_parallel": 1 + launched}
    command, run = words(tmp_path, **long), tmp_path / "runs/run"
    process = start(poprun(command) if launched else command, **QUIET)
    wait_until(process, lambda: (run / "metrics.jsonl").exists())
    time.sleep(4)  # batches are read, and steps run
    begin = time.monotonic()
    code, _, errors = end(process, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, errors
    assert time.monotonic() - begin < 15
    assert "SIGTERM: ending at once; nothing is left to save" in errors
    assert (run / "metrics.jsonl").read_text() == "" and not checkpoints_in(run / "checkpoints")


@pytest.mark.parametrize("launched", [False, True], ids=["process", "launcher"])
def test_a_terminal_that_closes_ends_a_run_that_saves(launched, tmp_path):
    command = alone(words(tmp_path, steps=LONG, data_parallel=1 + launched))
    terminal, inside = os.openpty()

    def in_terminal() -> None:
        hear_signals()
        os.setsid()
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    process = start(
        alone(poprun(command)) if launched else command,
        stdin=inside, stdout=inside, stderr=inside, preexec_fn=in_terminal,
    )  # fmt: skip
    os.close(inside)
    shown = b""
    while not re.search(rb"step +([2-9]|\d\d+)/", shown):  # not every step is shown
        shown += os.read(terminal, 4096)
    os.close(terminal)
    code, _, _ = end(process)
    assert code == 128 + signal.SIGHUP
    check_saved(tmp_path / "runs/run")


# Outputs that take nothing

OUTPUTS = {"full": "> /dev/full", "a broken pipe": "> >(exec true)"}
SAID = {"full": "No space left on device", "a broken pipe": "Broken pipe"}


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_takes_nothing_is_told_of_once_and_stops_no_training(output, tmp_path):
    shell = ["bash", "-c", f'exec "$@" {OUTPUTS[output]}', "bash"]
    code, _, errors = end(start([*shell, *words(tmp_path)]))
    assert code == 0, errors
    assert errors.count("stdout: got") == 1 and f"stdout: got '{SAID[output]}'; expected" in errors
    assert steps_in(tmp_path / "runs/run") == 4
    assert saved_in(tmp_path / "runs/run/checkpoints") == ["step_00000004"]


def test_neither_output_nor_errors_that_are_full_change_the_exit_code(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(words(tmp_path), stdout=full, stderr=full)
        assert process.wait(SECONDS) == 0
        refused = start(words(tmp_path, layers=0), stdout=full, stderr=full)
        assert refused.wait(SECONDS) == 2
    assert saved_in(tmp_path / "runs/run/checkpoints") == ["step_00000004"]


# Checkpoints by the clock, whole ones, and the best


def test_a_checkpoint_is_due_by_the_clock_of_the_first_instance(tmp_path):
    settings = {"checkpoint__every_minutes": 1e-9, "checkpoint__keep": 10}
    code, _, errors = end(start(poprun(words(tmp_path, **settings, data_parallel=2))))
    assert code == 0, errors
    checkpoints = tmp_path / "runs/run/checkpoints"
    assert saved_in(checkpoints) == [f"step_0000000{step}" for step in (1, 2, 3, 4)]


def here(folder: Path, **settings: object) -> None:
    run_job(*words(folder, **settings)[2:])


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> Path:
    """A folder with a run that has a checkpoint after each step, each validated."""
    folder = tmp_path_factory.mktemp("validated")
    here(folder, checkpoint__every=1, checkpoint__keep=10, validate_every=1, learning_rate=0.03)
    return folder


def damage(checkpoint: Path) -> None:
    file = checkpoint / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_auto_takes_the_newest_whole_checkpoint_and_says_what_it_passed_over(
    validated, tmp_path, capfd
):
    shutil.copytree(validated / "runs", tmp_path / "runs")
    run = tmp_path / "runs/run"
    for step in (3, 4):
        damage(run / f"checkpoints/step_0000000{step}")
    here(tmp_path, checkpoint__load="auto", checkpoint__keep=1, steps=4)
    said = capfd.readouterr()
    assert f"continuing after step 2, 64.0 tokens, from {run}/checkpoints/step_00000002" in said.out
    for step in (3, 4):
        path = f"{run}/checkpoints/step_0000000{step}"
        assert f"{path}/head.safetensors: got " in said.err
        assert f"{path}: damaged, now damaged_step_0000000{step}." in said.err
    assert said.err.count("It is passed over for step_00000002.") == 2
    assert [path.name for path in checkpoints_in(run / "checkpoints")][-1] == "step_00000004"
    assert metrics_of(run).splitlines()[:2] == metrics_of(validated / "runs/run").splitlines()[:2]
    assert steps_in(run) == 4


def test_a_runs_folder_is_loaded_from_as_its_newest_whole_checkpoint(validated, tmp_path, capfd):
    shutil.copytree(validated / "runs", tmp_path / "runs")
    run = tmp_path / "runs/run"
    here(tmp_path, checkpoint__load=str(run), steps=5)
    said = capfd.readouterr().out
    assert f"run folder {run}\n" in said
    assert f"continuing after step 4, 128 tokens, from {run}/checkpoints/step_00000004" in said
    damage(run / "checkpoints/step_00000005")
    before = saved_in(run / "checkpoints")
    here(tmp_path, checkpoint__load=str(run), steps=5)
    said = capfd.readouterr()
    assert f"from {run}/checkpoints/step_00000004" in said.out and "run folder" in said.out
    assert "It is passed over for step_00000004." in said.err
    assert saved_in(run / "checkpoints") == before  # those of another run stay as they are
    assert saved_in(tmp_path / "runs/run-2/checkpoints") == ["step_00000005"]


def losses_in(run: Path) -> "dict[int, float]":
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["validation_loss"] for line in lines}


def test_the_checkpoint_with_the_lowest_validation_loss_stays_and_is_loaded(
    validated, tmp_path, capfd
):
    losses = losses_in(validated / "runs/run")
    best = min(losses, key=lambda step: losses[step])
    shutil.copytree(validated / "runs", tmp_path / "runs")
    settings = {"checkpoint__every": 1, "checkpoint__keep": 1, "learning_rate": 10.0}
    here(tmp_path, **settings, checkpoint__load="auto", validate_every=1, steps=6)
    kept = saved_in(tmp_path / "runs/run/checkpoints")
    assert kept == [f"step_{best:08d}", "step_00000006"]
    assert (
        f"best          {tmp_path}/runs/run/checkpoints/step_{best:08d}" in capfd.readouterr().out
    )
    here(tmp_path, checkpoint__load="best", steps=5)
    assert f"from {tmp_path}/runs/run/checkpoints/step_{best:08d}" in capfd.readouterr().out
    assert saved_in(tmp_path / "runs/run/checkpoints") == kept


# Disks that are full

ROOM = 20_000
"""Bytes that a file may have: what a full disk is to a process."""


def test_a_disk_that_is_full_for_a_while_costs_no_line_of_metrics_and_no_step(tmp_path):
    process = start(alone(words(tmp_path, hidden_size=12, steps=LONG)), **QUIET)
    run, before = tmp_path / "runs/run", resource.getrlimit(resource.RLIMIT_FSIZE)
    wait_for_steps(process, run)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, before[1]))
    wait_until(process, lambda: (run / "metrics.jsonl").stat().st_size >= ROOM)
    time.sleep(0.1)  # some steps
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    wait_for_steps(process, run, steps_in(run) + 10)
    code, _, errors = end(process, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, errors
    assert errors.count("metrics.jsonl: got 'File too large' while writing; expected space.") == 1
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    check_saved(run)


def test_a_save_that_a_full_disk_does_not_take_names_the_bytes_it_needs(tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))

    code, _, errors = end(start(words(tmp_path / "small"), preexec_fn=limited))
    assert code == 2
    found = re.search(
        r"expected a folder that takes the checkpoint's (\d+) bytes \(.* are free\)", errors
    )
    assert found, errors
    here(tmp_path / "large")
    files = (tmp_path / "large/runs/run/checkpoints/step_00000004").glob("*.safetensors")
    assert int(found[1]) == sum(
        array.nbytes for file in files for array in load_file(file).values()
    )


# Folders that go away, and what killed runs leave


def test_a_run_folder_that_is_renamed_ends_the_run_which_is_saved(tmp_path):
    process = start(poprun(words(tmp_path, steps=LONG, data_parallel=2)), **QUIET)
    run, away = tmp_path / "runs/run", tmp_path / "runs/away"
    wait_for_steps(process, run)
    run.rename(away)
    code, _, errors = end(process)
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    assert code == 2, errors
    assert f"{run}: got a run folder that was renamed to {away} during the run" in errors
    assert f"Step {steps_in(away)} is saved: {checkpoint}. Go on from there with" in errors
    assert errors.count("error: ") == 1
    steps = steps_in(away)
    assert checkpoint.name == f"step_{steps:08d}"
    here(tmp_path, checkpoint__load="auto", steps=steps + 2, data_parallel=2)


def test_a_run_folder_that_is_deleted_ends_the_run_which_is_saved(tmp_path):
    process, run = start(words(tmp_path, steps=LONG), **QUIET), tmp_path / "runs/run"
    wait_for_steps(process, run)
    run.rename(tmp_path / "gone")  # at once
    shutil.rmtree(tmp_path / "gone")
    code, _, errors = end(process)
    assert code == 2, errors
    assert f"{run}: got a run folder that was deleted during the run; expected it to" in errors
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    assert f" is saved: {checkpoint}." in errors
    assert saved_in(run) == ["checkpoints", "config.yml"]


def test_a_folder_for_checkpoints_that_is_renamed_ends_the_run_which_is_saved(tmp_path):
    process, run = start(words(tmp_path, steps=LONG), **QUIET), tmp_path / "runs/run"
    kept = tmp_path / "kept"
    wait_for_steps(process, run)
    (run / "checkpoints").rename(kept)
    code, _, errors = end(process)
    assert code == 2, errors
    assert f"{run}/checkpoints: got a run folder that was renamed to {kept} during" in errors
    (checkpoint,) = checkpoints_in(tmp_path / "runs/run-2/checkpoints")
    assert f"Step {steps_in(run)} is saved: {checkpoint}." in errors


def test_what_a_killed_run_left_is_removed_by_the_next_and_nothing_else(tmp_path):
    run = tmp_path / "runs/run"
    left = [".config.yml.123", ".metrics.jsonl.4", ".report.html.5"]
    kept = [".config.yml.mine", ".plan.json.7"]
    folders = [".step_00000002.deleted", ".step_00000004.partial-12-3"]
    for name in folders:
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "head.safetensors").touch()
    for name in left + kept:
        (run / name).touch()
    here(tmp_path, checkpoint__load="auto")
    assert [name for name in saved_in(run) if name.startswith(".")] == kept
    assert saved_in(run / "checkpoints") == ["step_00000004"]


@pytest.mark.parametrize("what", ["renamed", "deleted"])
def test_a_folder_that_goes_before_the_last_step_is_saved_is_noticed_and_it_is_saved_elsewhere(
    what, tmp_path, monkeypatch
):
    run, calls = tmp_path / "runs/run", []
    begin_save = checkpoints.begin_save

    def then_lost(*arguments, **options):
        calls.append(None)
        if len(calls) == 1:
            run.rename(tmp_path / "away")
            if what == "deleted":
                shutil.rmtree(tmp_path / "away")
        return begin_save(*arguments, **options)

    monkeypatch.setattr(checkpoints, "begin_save", then_lost)
    with pytest.raises(UserError, match=rf"run: got a run folder that was {what}.*Step 4 is"):
        pretraining.main(words(tmp_path, steps=4)[2:])
    (saved,) = checkpoints_in(next((tmp_path / "runs").iterdir()) / "checkpoints")
    assert saved.name == "step_00000004"


FULL_AT_STEP_2 = """
import errno, os, sys
sys.path[:0] = {paths}
import popxl_gpt.execution.checkpoints.saving
import popdist
from popxl_gpt.utils.errors import exit_on_user_error
from popxl_gpt.demo import pretraining
from popxl_gpt.demo.job import checkpoints
write_tensors = popxl_gpt.execution.checkpoints.saving.write_tensors

def write(tensors, path):
    instance = popdist.getInstanceIndex()
    if "step_00000002" in str(path) and instance == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with open(f"{folder}/written-by-{{instance}}", "a") as file:
        file.write(f"{{path.parent.name[:14]}} {{path.stem}}\\n")
    return write_tensors(tensors, path)

popxl_gpt.execution.checkpoints.saving.write_tensors = write
with exit_on_user_error():
    sys.exit(pretraining.main(sys.argv[1:]))
"""


def test_a_disk_that_is_full_for_a_checkpoint_costs_no_step_and_the_next_is_taken(tmp_path):
    program = tmp_path / "program.py"
    paths = [str(ROOT), str(ROOT / "runtime")]
    program.write_text(FULL_AT_STEP_2.format(paths=paths, folder=tmp_path))
    _, _, *flags = words(tmp_path, steps=3, checkpoint__every=1, data_parallel=2)
    code, _, told = end(start(poprun([warm.python(), str(program), *flags])))
    assert code == 0, told
    assert re.search(r"00002: got 'No space left on device'.* the checkpoint's \d+ bytes", told)
    assert told.count("Training goes on, and saves again when it is due.") == 1
    folder = tmp_path / "runs/run/checkpoints"
    assert [path.name for path in checkpoints_in(folder)] == ["step_00000001", "step_00000003"]
    assert not list(folder.glob(".*"))
    first, second = (
        {line for line in (tmp_path / f"written-by-{n}").read_text().splitlines() if "03" in line}
        for n in (0, 1)
    )
    layers = {path.stem for path in (folder / "step_00000003").glob("*.safetensors")}
    assert first and second and not first & second
    assert {line.split()[1] for line in first | second} == layers


@pytest.mark.parametrize("number, failure", [(errno.ENOSPC, 0), (errno.EIO, errno.EIO)])
def test_a_disk_that_does_not_take_the_last_checkpoint_ends_with_an_error(
    number, failure, tmp_path, monkeypatch
):
    def failing(tensors, path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(popxl_gpt.execution.checkpoints.saving, "write_tensors", failing)
    said = f"step_00000002: got '{os.strerror(number)}' while"
    with pytest.raises(UserError, match=said) as told:
        here(tmp_path, steps=2)
    assert failure_number(told.value) == failure

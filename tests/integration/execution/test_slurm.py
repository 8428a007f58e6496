"""`demo/slurm.sbatch` under Slurm, on two nodes that are daemons of this machine: a job whose time
ends saves, is queued again, and goes on to the files of an undisturbed run; one that is cancelled
saves, and is not. The same of tasks of srun, without poprun. What a program takes itself for,
wherever Slurm and mpirun may start it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.runs import run_job
from tests.metrics_text import metrics_of
from tests.slurm_cluster import SlurmCluster, processes_with, slurm_cluster

pytestmark = [pytest.mark.multi, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
SECONDS = 300
STEPS = 200
FLAGS = f"""
    --config tiny --vocabulary_size 61 --hidden_size 24 --heads 3 --dropout 0.1
    --steps {STEPS} --warmup_steps 0 --global_batch_size 4 --micro_batch_size 2 --sequence_length 8
    --data_parallel 2 --tensor_parallel_1 1 --tensor_parallel_2 1 --samples 0
    --checkpoint.every {STEPS}
""".split()
JOB = {
    "PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
    "REPLICAS": "2",
    "POPDIST_SECRET": "that of these tests",
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "s") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_job(*FLAGS, "--run_folder", folder, "--name", "run")
    return folder / "run"


def state_of(run: Path) -> "tuple[str, dict[str, bytes]]":
    """What a run has told, and has saved at its end."""
    files = (run / f"checkpoints/step_{STEPS:08d}").glob("*.safetensors")
    return metrics_of(run), {path.name: path.read_bytes() for path in files}


class Job:
    """A run of `demo/slurm.sbatch` that trains."""

    def __init__(self, slurm: SlurmCluster, folder: Path, nodes: int, *options: str):
        self.slurm, self.output = slurm, folder / "output"
        words = ["--chdir", ROOT, "--output", self.output, "--nodes", nodes, *options]
        script = ["demo/slurm.sbatch", *FLAGS, "--run_folder", folder]
        self.number = slurm.submit(*words, *script, cwd=ROOT, **JOB)
        self.run = folder / f"job-{self.number}"
        metrics, until = self.run / "metrics.jsonl", time.monotonic() + SECONDS
        while not metrics.exists() or metrics.stat().st_size == 0:
            assert time.monotonic() < until and self.state["JobState"] not in ENDED, self.said
            time.sleep(0.02)

    @property
    def state(self) -> "dict[str, str]":
        return self.slurm.job(self.number)

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def steps(self) -> int:
        """Those that are done; the checkpoint of the last one is there."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        step = json.loads(lines[-1])["step"]
        assert f"step_{step:08d}" in [path.name for path in (self.run / "checkpoints").iterdir()]
        return step


def test_a_job_whose_time_ends_is_queued_again_and_goes_on_bitwise(slurm, undisturbed, tmp_path):
    job = Job(slurm, tmp_path, 2)
    assert job.state["NumNodes"] == "2" and job.state["NodeList"] == "127.0.0.[1-2]"
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)  # as Slurm does before its time
    slurm.wait(job.number, "PENDING", *ENDED)
    assert (job.state["JobState"], job.state["Restarts"]) == ("PENDING", "1"), job.said
    assert 0 < job.steps() < STEPS
    found = slurm.wait(job.number, *ENDED, seconds=SECONDS)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert state_of(job.run) == state_of(undisturbed)


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(slurm, tmp_path):
    job = Job(slurm, tmp_path, 1, "--ntasks-per-node=2", "--cpus-per-task=4")  # of one poprun
    slurm.run("scancel", "--signal=USR1", f"{job.number}.0")  # saves, and the run goes on
    until = time.monotonic() + SECONDS
    while not list((job.run / "checkpoints").glob("step_*")):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert job.state["JobState"] == "RUNNING"
    slurm.run("scancel", job.number)
    slurm.wait(job.number, *ENDED)
    while slurm.run("squeue", "-h", "-j", job.number).stdout.strip():  # until it has ended
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (job.state["JobState"], job.state["Restarts"]) == ("CANCELLED", "0"), job.said
    assert 0 < job.steps() < STEPS


def test_a_job_that_makes_room_saves_and_is_queued_again(slurm, tmp_path):
    job = Job(slurm, tmp_path, 1)
    words = ["--partition", "urgent", "--exclusive", "--nodes", 2, "--output", "/dev/null"]
    urgent = slurm.submit(*words, "--wrap", "true")
    slurm.wait(job.number, "PENDING", *ENDED)
    assert (job.state["JobState"], job.state["Restarts"]) == ("PENDING", "1"), job.said
    assert 0 < job.steps() < STEPS
    slurm.run("scancel", job.number)
    assert slurm.wait(urgent, *ENDED)["JobState"] == "COMPLETED"


def start_tasks(
    slurm, folder: Path, *options: object, steps: int = STEPS
) -> "subprocess.Popen[str]":
    """A run of two processes, one a node, that srun starts by itself."""
    program = [sys.executable, ROOT / "demo/pretraining.py", *FLAGS, "--steps", steps]
    words = [
        "--nodes",
        2,
        "--ntasks",
        2,
        *options,
        *program,
        "--run_folder",
        folder,
        "--name",
        "run",
    ]
    return slurm.start("srun", *words, cwd=ROOT, **JOB)


def wait_for_steps(process: "subprocess.Popen[str]", run: Path, steps: int = 2) -> None:
    metrics, until = run / "metrics.jsonl", time.monotonic() + SECONDS
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_tasks_of_srun_on_two_nodes_are_one_run_with_the_bits_of_one_process(
    slurm, undisturbed, tmp_path
):
    output, errors = start_tasks(slurm, tmp_path).communicate(timeout=SECONDS)
    assert state_of(tmp_path / "run") == state_of(undisturbed), errors
    assert output.count("parameters, run folder") == 1  # of one process
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_task_that_is_killed_ends_the_others_also_where_srun_does_not(slurm, tmp_path):
    process = start_tasks(slurm, tmp_path, "--kill-on-bad-exit=0", "--wait=0", steps=100_000)
    wait_for_steps(process, tmp_path / "run")
    ours = processes_with("SLURM_CONF", slurm.environment["SLURM_CONF"])
    (second,) = {*ours} & {*processes_with("SLURM_PROCID", "1")}
    os.kill(second, signal.SIGKILL)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=SECONDS)
    assert time.monotonic() - begin < 20 and process.returncode != 0
    assert "error: popdist: instance 0 of 2, " in errors and "an instance is gone" in errors


def test_tasks_that_are_cancelled_save(slurm, tmp_path):
    process = start_tasks(slurm, tmp_path, steps=100_000)
    wait_for_steps(process, tmp_path / "run")
    (number,) = slurm.run("squeue", "-h", "-o", "%i").stdout.split()
    slurm.run("scancel", number)
    process.communicate(timeout=SECONDS)
    steps = (tmp_path / "run/metrics.jsonl").read_text().count("\n")
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved == [f"step_{steps:08d}"]


ASKS = "import popdist; print(popdist.getNumInstances(), flush=True)"
# mpirun splits and joins what its processes print: each answers in a file of its own
ANSWER = (
    "import os, sys; sys.stdout = open(f'{sys.argv[1]}/{os.uname().nodename}_{os.getpid()}', 'w'); "
)
PLACES = """#!/bin/bash
asks() {
    local answers=$(mktemp -d -p "$ANSWERS")
    "$@" "$PYTHON" -c "$ASKS" "$answers" && sort "$answers"/*
}
mpirun() { command mpirun --allow-run-as-root --oversubscribe "$@"; }
for place in "" "srun -n 1" "srun -n 4" "srun -n 2 -N 2" "srun -n 2 --mpi=pmi2" "mpirun -np 1" "mpirun -np 3"; do
    echo "script, $place: $(asks $place | xargs)"
done
"""
EXPECTED = {
    "script, ": "1",
    "script, srun -n 1": "1",
    "script, srun -n 4": "4 4 4 4",
    "script, srun -n 2 -N 2": "2 2",
    "script, srun -n 2 --mpi=pmi2": "2 2",
    "script, mpirun -np 1": "1",
    "script, mpirun -np 3": "3 3 3",
}


def test_a_process_takes_itself_for_what_it_is(slurm, tmp_path):
    script, output = tmp_path / "script", tmp_path / "output"
    script.write_text(PLACES)
    words = {"PYTHON": sys.executable, "ASKS": ANSWER + ASKS, "ANSWERS": tmp_path}
    job = slurm.submit("--nodes", 2, "--ntasks", 4, "--output", output, script, **words)
    slurm.wait(job, *ENDED)
    found = dict(re.findall(r"^(script, .*): (.*)$", output.read_text(), re.MULTILINE))
    assert found == EXPECTED, output.read_text()


MEETS = "import popdist; from popdist import exchange; popdist.init(); "
MEETS += "print(exchange.gather(popdist.getInstanceIndex()), flush=True)"
MPIRUNS = {
    "Open MPI": "mpirun.openmpi --allow-run-as-root --oversubscribe --map-by node",
    "MPICH": "mpirun.mpich -ppn 1",
}


@pytest.mark.parametrize("mpirun", MPIRUNS.values(), ids=MPIRUNS)
def test_mpirun_on_the_nodes_of_a_job_starts_processes_that_meet(mpirun, slurm, tmp_path):
    words = ["salloc", "--nodes", 2, "--ntasks", 2, *mpirun.split(), "-np", 2, sys.executable]
    slurm.run(*words, "-c", ANSWER + MEETS, tmp_path, POPDIST_SECRET="that of these tests")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["[0, 1]\n"] * 2


def test_tasks_on_two_nodes_with_two_secrets_do_not_meet(slurm, tmp_path):
    other = (
        f'POPDIST_SECRET="number $SLURM_PROCID of the secrets" exec {sys.executable} -c "$MEETS"'
    )
    files = [
        "--error",
        tmp_path / "task_%t",
    ]  # srun drops what it has not printed when it ends a step
    words = ["--nodes", 2, "--ntasks", 2, "--kill-on-bad-exit=1", *files, "sh", "-c", other]
    done = slurm.run("srun", *words, check=False, MEETS=MEETS)
    assert done.returncode != 0 and done.stdout == ""
    told = "".join(file.read_text() for file in tmp_path.glob("task_*"))
    assert "give all machines the same POPDIST_SECRET, or the file" in told, done.stderr


SENT = """
[ "$SLURM_PROCID" = 0 ] || exit 0
sbatch --wait --output "$OUT" --wrap '"$PYTHON" -c "$ASKS"'
salloc --ntasks 3 "$PYTHON" -c "$ASKS"
"""


def test_what_is_sent_from_within_a_step_is_no_task_of_it(slurm, tmp_path):
    words = {"PYTHON": sys.executable, "ASKS": ASKS, "OUT": str(tmp_path / "output")}
    done = slurm.run("srun", "--ntasks", 2, "--nodes", 1, "bash", "-c", SENT, **words)
    assert (tmp_path / "output").read_text() == "1\n"
    assert done.stdout.splitlines()[-1] == "1"


@pytest.mark.parametrize(("task", "says"), [("{}", "2"), ("sh -c '{}; exit'", "1")])
def test_a_shell_of_a_step_is_one_process_and_its_task_is_not(task, says, slurm):
    asks = f'{sys.executable} -c "{ASKS}"'
    pty = f"srun --ntasks 2 --pty {task.format(asks)}"
    done = slurm.run("script", "--quiet", "--return", "--command", pty, "/dev/null", check=False)
    assert says in re.findall("[0-9]+", done.stdout), done.stdout

"""`demo/slurm.sbatch` with commands that stand for Slurm's: a job that is told to end saves, is
queued again, and goes on to the files of an undisturbed run. Its time ends by SIGUSR1 to the script
alone; to make room Slurm sends SIGTERM to every process of a job.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = [pytest.mark.multi, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
SECONDS = 120
STEPS = 60
FLAGS = f"""
    --config tiny --vocabulary_size 61 --hidden_size 24 --heads 3 --dropout 0.1
    --steps {STEPS} --warmup_steps 0 --global_batch_size 4 --micro_batch_size 2 --sequence_length 8
    --data_parallel 2 --tensor_parallel_1 1 --tensor_parallel_2 1 --samples 0
""".split()
SRUN = """
import os, signal, subprocess, sys
words, options = sys.argv[1:], []
while words[0].startswith("--"):
    options.append(words.pop(0))
if f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}" not in options:
    sys.exit("srun gives tasks one core")  # from Slurm 22.05 on
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = [
    subprocess.Popen(words, env={**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)})
    for node in range(nodes)
]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(["127.0.0.1"] * int(os.environ["SLURM_JOB_NUM_NODES"])))
else:
    open(os.environ["REQUEUED"], "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def slurm(tmp_path) -> "dict[str, str]":
    """The environment that a job on this machine would have."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, program in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(f"#!{sys.executable}\n{program}")
        (commands / name).chmod(0o755)
    given = ("POPDIST_", "SLURM_", "RANK", "WORLD_SIZE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    return {
        **plain,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": warm.python(),
        "OMP_NUM_THREADS": "1",
        "REPLICAS": "2",
        "REQUEUED": str(tmp_path / "requeued"),
        "POPDIST_SECRET": "that of these tests",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "16",
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_job(*FLAGS, "--run_folder", folder, "--name", "run")
    return metrics_of(folder / "run")


def start(folder: Path, environment: "dict[str, str]") -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", str(ROOT / "demo/slurm.sbatch"), *FLAGS, "--run_folder", str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_of(job: "dict[str, str]") -> "list[int]":
    """Those that have the job's environment, but of this process."""
    mark, found = f"SLURM_JOB_ID={job['SLURM_JOB_ID']}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("number", "nodes"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 2)], ids=["SIGUSR1", "SIGTERM"]
)
def test_a_job_that_is_told_to_end_is_queued_again_and_goes_on_bitwise(
    number, nodes, undisturbed, slurm, tmp_path
):
    job = {**slurm, "SLURM_JOB_NUM_NODES": str(nodes)}
    run = tmp_path / "runs" / f"job-{job['SLURM_JOB_ID']}"
    first = start(tmp_path / "runs", job)
    until = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").stat().st_size == 0:
        if first.poll() is not None or time.monotonic() > until:
            first.terminate()
            raise AssertionError(first.communicate(timeout=SECONDS))
        time.sleep(0.005)
    for process in [first.pid] if number == signal.SIGUSR1 else processes_of(job):
        with suppress(ProcessLookupError):
            os.kill(process, number)
    _, said = first.communicate(timeout=SECONDS)
    assert first.returncode == 128 + signal.SIGTERM, said
    assert Path(job["REQUEUED"]).read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert 0 < metrics_of(run).count("\n") < STEPS
    again = start(tmp_path / "runs", {**job, "SLURM_RESTART_COUNT": "1"})
    _, said = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, said
    assert metrics_of(run) == undisturbed
    assert Path(job["REQUEUED"]).read_text().count("\n") == 1

"""Any launcher starts one run: mpirun of Open MPI and of MPICH, and torchrun, on one machine. Slurm's
are beside the cluster that they need, in `test_slurm.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from popxl_gpt.demo import pretraining
from popxl_gpt.execution.reports.benchmark import report as speed
from popxl_gpt.utils.errors import UserError
from tests import warm
from tests.integration.runs import run_job
from tests.metrics_text import metrics_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SECONDS = 120
FLAGS = """
    --config tiny --vocabulary_size 61 --hidden_size 24 --heads 3 --dropout 0.1
    --steps 4 --warmup_steps 0 --global_batch_size 8 --micro_batch_size 2 --sequence_length 8
    --data_parallel 4 --tensor_parallel_1 1 --tensor_parallel_2 1 --samples 0 --name run
""".split()
"""Four replicas: two of each process, which no flag or variable of ours says."""
NO_SSH = "--mca plm isolated"
"""Open MPI looks for it, on one machine, too."""
LAUNCHERS = {
    "Open MPI": f"mpirun.openmpi --allow-run-as-root --oversubscribe {NO_SSH} -np 2",
    "MPICH": "mpirun.mpich -np 2",
    "torchrun": "{python} -m torch.distributed.run --nproc-per-node 2 --no-python",
}


def start(
    launcher: str, folder: Path, *flags: object, python: "str | None" = None
) -> "subprocess.Popen[str]":
    """A run of two processes, each by a Python: a warm one where none is given."""
    given = ("RANK", "WORLD_SIZE", "POPDIST_", "OMPI_", "PMI")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    words = LAUNCHERS[launcher].format(python=warm.launcher()).split()
    assert shutil.which(words[0]), "expected it. Run: sudo apt install openmpi-bin mpich"
    words += [python or warm.python(), "demo/pretraining.py", *FLAGS, "--run_folder", str(folder)]
    return subprocess.Popen(
        [*words, *map(str, flags)],
        env={**plain, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_job(*FLAGS, "--run_folder", folder)
    return folder / "run"


def tensors(run: Path) -> "dict[str, bytes]":
    (checkpoint,) = (run / "checkpoints").iterdir()
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.sampled(2)
@pytest.mark.multi
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_one_run_with_the_bits_of_one_process(launcher, alone, tmp_path):
    output, errors = start(launcher, tmp_path).communicate(timeout=SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], errors
    assert metrics_of(tmp_path / "run") == metrics_of(alone)
    assert tensors(tmp_path / "run") == tensors(alone) != {}
    assert output.count("parameters, run folder") == 1  # of one process


@pytest.mark.multi
def test_a_mistake_is_told_once(tmp_path):
    process = start("Open MPI", tmp_path, "--learning_rat", "3")
    output, errors = process.communicate(timeout=SECONDS)
    assert (output + errors).count("error: --learning_rat: unknown flag.") == 1
    assert process.returncode == 2


@pytest.mark.multi
def test_ctrl_c_saves(tmp_path):
    process = start("MPICH", tmp_path, "--steps", 100_000, python=sys.executable)
    metrics, until = tmp_path / "run/metrics.jsonl", time.monotonic() + SECONDS
    while not metrics.exists() or metrics.stat().st_size == 0:
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    steps = len(metrics.read_text().splitlines())
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved == [f"step_{steps:08d}"]


@pytest.mark.parametrize("program", [pretraining, speed], ids=["training", "speed"])
def test_half_of_a_launchers_variables_are_the_users_mistake(program, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="got RANK without WORLD_SIZE"):
        program.main(["--config", "tiny", "--auto"])

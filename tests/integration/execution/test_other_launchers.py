"""Programs that mpirun starts several times refuse, in words, and make nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from popxl_gpt.demo import evaluate, generate, pretraining
from popxl_gpt.execution.reports.benchmark import report as speed
from popxl_gpt.utils.errors import UserError
from tests.integration.runs import run_job

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
ONE_REPLICA = """
    --config tiny --vocabulary_size 61 --hidden_size 24 --heads 3 --steps 2 --warmup_steps 0
    --global_batch_size 4 --micro_batch_size 2 --sequence_length 8 --samples 0
    --tensor_parallel_1 1 --tensor_parallel_2 1
""".split()
NO_SSH = ["--mca", "plm", "isolated"]
"""Open MPI looks for it, on one machine, too."""
PROGRAMS = {
    "training": (pretraining, ["--config", "tiny"]),
    "training in minutes": (pretraining, ["--minutes", "1"]),
    "training with --auto": (pretraining, ["--config", "tiny", "--auto"]),
    "speed": (speed, ["--config", "tiny"]),
    "speed with --auto": (speed, ["--config", "tiny", "--auto"]),
    "evaluation": (evaluate, ["--checkpoint", "runs/run", "--json", "numbers.json"]),
    "generation": (generate, ["--checkpoint", "runs/run", "--prompt", "a"]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    words = [*ONE_REPLICA, "--data_parallel", "1", "--run_folder", folder / "runs", "--name", "run"]
    run_job(*words)
    return folder


def files(folder: Path) -> "dict[str, int]":
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("program", "words"), PROGRAMS.values(), ids=PROGRAMS)
def test_no_program_runs_as_one_of_several_tasks(program, words, trained, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    before = files(trained)
    says = r"got 4 tasks of mpirun \(OMPI_COMM_WORLD_SIZE\).* poprun --num-instances 4 "
    with pytest.raises(UserError, match=says):
        program.main(words)
    assert files(trained) == before


@pytest.mark.parametrize("program", [pretraining, speed], ids=["training", "speed"])
def test_half_of_a_launchers_variables_are_the_users_mistake(program, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="got RANK without WORLD_SIZE"):
        program.main(["--config", "tiny", "--auto"])


@pytest.mark.multi
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--tensor_parallel_1", "2", "--heads", "2"], "--num-instances 2 --num-replicas 4 "),
        (["--data_parallel", "1"], "--data_parallel 2"),
    ],
    ids=["several replicas", "one replica"],
)
def test_mpirun_makes_no_run_and_the_command_that_it_is_told_makes_one(given, says, tmp_path):
    assert shutil.which("mpirun"), "expected Open MPI. Run: sudo apt install openmpi-bin"
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", *NO_SSH, "-np", "2"]
    flags = [*ONE_REPLICA, *given, "--run_folder", str(tmp_path / "runs"), "--name", "one"]
    words = [*mpirun, sys.executable, "demo/pretraining.py", *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    (command,) = set(re.findall(r"^error: .* Run: (.*)", done.stderr, re.MULTILINE))
    assert says in command
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]

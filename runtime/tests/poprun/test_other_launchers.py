"""A process that mpirun or srun started beside others, which meet by nothing of ours, says so. What
Slurm's own variables are is tested under Slurm, in the application's tests.
"""

import os
import re
import shutil
import subprocess
import sys

import popdist
import pytest
from poprun import launcher, other_launchers

GIVEN = ("OMPI_", "PMI", "MPI_", "SLURM_", "POPDIST_", "RANK", "WORLD_SIZE")
STEP = {
    "SLURM_JOB_ID": 7, "SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_CPUS_PER_TASK": 4,
}  # fmt: skip
ON_ONE_NODE = {"SLURM_STEP_NUM_NODES": 1}
IN_SCRIPT = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4, "SLURM_TASKS_PER_NODE": 4, "SLURM_PROCID": 0}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 4, "PMIX_RANK": 1}
HYDRA = {"PMI_SIZE": 2, "PMI_RANK": 0, "MPI_LOCALNRANKS": 2}
NO_SSH = ["--mca", "plm", "isolated"]
"""Open MPI looks for it, on one machine, too."""
ANY_MACHINE = "--node-rank I --rdzv-endpoint HOST:PORT"
REFUSED = {
    "Open MPI": (OPEN_MPI, r"got 4 tasks of mpirun \(OMPI_C.*Run: \S+ -m poprun --num-instances 4 "),
    "Open MPI on two machines": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": 2},
        f"got 4 tasks.*each machine: .* --num-instances 4 --nnodes M {ANY_MACHINE} ",
    ),
    "MPICH": (HYDRA, r"got 2 tasks of mpirun \(PMI_SIZE\).*Run: \S+ -m poprun --num-instances 2 "),
    "MPICH in a job": ({**IN_SCRIPT, **HYDRA}, r"got 2 tasks of mpirun \(PMI_SIZE\)"),
    "PMIx, a task that is not the first": ({"PMIX_RANK": 1}, r"got 2 tasks of PMIx \(PMIX_RANK\)"),
    "Slurm": (
        {**STEP, **ON_ONE_NODE},
        r"got 3 tasks of srun \(SLURM_STEP_NUM_TASKS\).*Run: srun --ntasks=1 --cpus-per-task=12 ",
    ),
    "Slurm on two nodes": (STEP, f"got 3 tasks of srun.* --nnodes 2 {ANY_MACHINE} "),
    "Slurm with PMI": ({**STEP, "PMI_SIZE": 3, "PMI_JOBID": "7.0"}, "got 3 tasks of srun"),
    "Open MPI in a step": ({**STEP, **OPEN_MPI}, "got 4 tasks of mpirun"),
}  # fmt: skip
ALONE = {
    "nothing": {},
    "Open MPI, one task": {"OMPI_COMM_WORLD_SIZE": 1, "OMPI_COMM_WORLD_LOCAL_SIZE": 1},
    "one of Open MPI's, whose daemons are several": {**STEP, "OMPI_COMM_WORLD_SIZE": 1},
    "MPICH, one task": {"PMI_SIZE": 1},
    "a script of Slurm": IN_SCRIPT,
    "one that was sent from within a step": {**STEP, **IN_SCRIPT},
    "and had PMI there": {**STEP, **IN_SCRIPT, "PMI_SIZE": 3, "PMI_JOBID": "6.0"},
    "a step of one task": {
        **STEP, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_TASKS_PER_NODE": 1, "SLURM_TASKS_PER_NODE": 1
    },
    "tasks that are to be runs of their own": {**OPEN_MPI, "RANK": 0, "WORLD_SIZE": 1},
}  # fmt: skip


@pytest.fixture
def variables(monkeypatch):
    """Sets an environment that has these of launchers, and no others."""
    for name in [name for name in os.environ if name.startswith(GIVEN)]:
        monkeypatch.delenv(name)
    return lambda values: [monkeypatch.setenv(name, str(value)) for name, value in values.items()]


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED)
def test_tasks_that_have_not_met_are_refused_by_popdist_and_poprun(values, says, variables, capsys):
    variables(values)
    for ask in (popdist.isPopdistEnvSet, popdist.getNumInstances, popdist.init):
        with pytest.raises(RuntimeError, match=says):
            ask()
    assert launcher.main(["--num-instances", "2", sys.executable, "x.py"]) == 2
    assert (
        "each of which would start a run by itself; expected one poprun" in capsys.readouterr().err
    )


@pytest.mark.parametrize("values", ALONE.values(), ids=ALONE)
def test_a_process_that_is_the_only_one_is_not_refused(values, variables):
    variables(values)
    popdist.init()
    assert (popdist.getInstanceIndex(), popdist.getNumInstances()) == (0, 1)
    assert other_launchers.unmet_tasks() is None


def test_one_poprun_on_each_machine_may_be_a_task_of_another_launcher(variables):
    variables(STEP)
    words = ["--nnodes", "3", "--num-instances", "3", "--rdzv-endpoint", "h:1", sys.executable]
    launcher.check(launcher.parser().parse_args([*words[:2], "--node-rank", "1", *words[2:]]))


@pytest.mark.multi
def test_a_program_that_asks_is_refused_under_mpirun(variables):
    assert shutil.which("mpirun"), "expected Open MPI. Run: sudo apt install openmpi-bin"
    asks = "import popdist; print(popdist.getNumInstances(), flush=True)"
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", *NO_SSH, "-np", "2"]
    done = subprocess.run([*words, sys.executable, "-c", asks], capture_output=True, text=True)
    assert done.returncode == 1 and not re.search("^[0-9]", done.stdout)
    assert done.stderr.count("got 2 tasks of mpirun") >= 1, done.stderr  # mpirun ends the other one

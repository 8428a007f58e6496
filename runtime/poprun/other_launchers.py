"""Tasks of other launchers: mpirun and srun start several, which do not meet here.

What their variables are, found with Open MPI 4.1, MPICH 4.0 and Slurm 22.05; -: not set:

                                   OMPI_COMM_ PMI_ SLURM_STEP_ SLURM_STEP_    SLURM_TASKS_ SLURM_
a process of                       WORLD_SIZE SIZE NUM_TASKS   TASKS_PER_NODE PER_NODE     PROCID
mpirun -np 2                       2          -    -           -              -            -
mpiexec.hydra -n 2                 -          2    -           -              -            -
srun -n 2                          -          -    2           2              2            0, 1
srun --mpi=pmi2 -n 2               -          2    2           2              2            0, 1
srun -n 2 --pty bash               -          -    2           2              2            0
salloc -n 4                        -          -    -           -              -            -
sbatch -n 4: the script            -          -    -           -              4            0
 the same, sent by a task of srun  -          -    2           2              4            0
mpirun -np 1 in one of 2 nodes     1          -    2           1(x2)          1(x2)        0

Open MPI's word comes first: its mpirun starts a daemon on each node, as a step of its own. A script
and an allocation's shell keep a step's variables where they were asked for from within it, and then
those do not fit the job's. PMI_JOBID is beside PMI_SIZE where Slurm sets it, whose own variables
say the same. SLURM_NTASKS says nothing: a script, which is one process, has it.
"""

import os
from dataclasses import dataclass

from poprun.environment import INDEX, INSTANCES

OPEN_MPI, PMI, PMIX = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"
SLURM, SRUN = "SLURM_STEP_NUM_TASKS", "srun"


@dataclass(frozen=True)
class Tasks:
    """Processes that a launcher started as one job."""

    count: int
    launcher: str
    variable: str
    """The one that told."""
    machines: int | None
    """None: several, or not known."""

    def __str__(self) -> str:
        return f"{self.count} tasks of {self.launcher} ({self.variable})"


def unmet_tasks() -> Tasks | None:
    """Tasks that this process is one of, where they are several, and nothing of ours or torchrun's
    lets them meet.
    """
    if INDEX in os.environ or INSTANCES in os.environ:
        return None
    found = _tasks()
    return found if found is not None and found.count > 1 else None


def _tasks() -> Tasks | None:
    is_in_job = "SLURM_JOB_ID" in os.environ
    if OPEN_MPI in os.environ:
        here = _number("OMPI_COMM_WORLD_LOCAL_SIZE")
        return _tasks_of_mpi(OPEN_MPI, here)
    if PMI in os.environ and not (is_in_job and "PMI_JOBID" in os.environ):
        return _tasks_of_mpi(PMI, _number("MPI_LOCALNRANKS"))
    if is_in_job:
        return _tasks_of_slurm()
    # PMIx by itself tells no number of tasks, but all of them apart from the first
    return Tasks(_number(PMIX) + 1, "PMIx", PMIX, None) if PMIX in os.environ else None


def _tasks_of_mpi(variable: str, here: int) -> Tasks:
    count = _number(variable)
    return Tasks(count, "mpirun", variable, 1 if here == count else None)


def _tasks_of_slurm() -> Tasks | None:
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    is_in_step = per_node is not None and per_node == os.environ.get("SLURM_TASKS_PER_NODE")
    if not is_in_step or (_number("SLURM_PROCID") == 0 and _has_terminal()):
        return None
    return Tasks(_number(SLURM), SRUN, SLURM, _number("SLURM_STEP_NUM_NODES"))


def _has_terminal() -> bool:
    """Whether this is a shell's, of `srun --pty`: no other task has a terminal, and other shells
    end at once.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0

"""Tasks of other launchers: which process of how many this one is, as mpirun or srun tells it.

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

Who wins: ``RANK`` and ``WORLD_SIZE`` (torchrun, poprun, or by hand), then Open MPI, MPICH, Slurm.
The mpirun of a job starts a daemon on each node, as a step of Slurm's own. A script and an
allocation's shell keep a step's variables where they were asked for from within it, and then those
do not fit the job's. PMI_JOBID is beside PMI_SIZE where Slurm sets it, whose own variables say the
same. SLURM_NTASKS says nothing: a script, which is one process, has it.

To add a launcher, write a function that reads its variables, and name it in `LAUNCHERS`.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from poprun.cores import bound_cores, usable_cores
from poprun.environment import INDEX, INSTANCES

OPEN_MPI, PMI, PMIX = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"
SLURM = "SLURM_STEP_NUM_TASKS"
LOCAL_INDEX, LOCAL_INSTANCES = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
THREADS = "OMP_NUM_THREADS"
OF_EACH = ("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMI_RANK", PMI, "PMI_FD")
"""Variables in which a task differs from what started it."""


class TaskError(RuntimeError):
    """The variables of launchers contradict each other, or tell too little."""


@dataclass(frozen=True)
class Task:
    """A process that a launcher started as one of several."""

    launcher: str
    variable: str
    """The variable that tells their number."""
    count: int
    index: int
    here: int
    """Tasks on this machine; 0: not told."""
    index_here: int
    job: str | None = None
    """What tells the tasks of this launch from those of others, the same in all of them; None: no
    variable tells it.
    """
    first_host: str | None = None
    """The machine of task 0. None: no variable tells it."""
    is_guessed: bool = False
    """Whether `first_host` is where the launcher runs, or the first node of its job, which most
    often is that machine.
    """

    def __str__(self) -> str:
        return f"{self.count} tasks of {self.launcher} ({self.variable})"

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all tasks are on this machine."""
        return self.here == self.count

    @cached_property
    def name(self) -> str | None:
        """A name of the launch that no other on this machine has. On one machine the process that
        started the tasks tells it where no variable does.
        """
        if self.job is None and self.is_on_one_machine:
            return _birth(_starter())
        return self.job


def several() -> Task | None:
    """This process's task, where they are several and no variables of torchrun's, or ours, win.

    Raises:
        TaskError: launchers contradict each other, or it tells no number of tasks.
    """
    found = [task for task in (read() for read in LAUNCHERS) if task is not None]
    if not found:
        return None
    task = found[0]
    if INDEX in os.environ or INSTANCES in os.environ:
        _check_by_hand(task)
        return None
    for other in found[1:]:
        is_mpirun = other.variable == PMI  # Slurm's tasks may be mpirun's daemons
        if is_mpirun and (other.index, other.count) != (task.index, task.count):
            raise TaskError(
                f"popdist: got task {task.index} of {task} and task {other.index} of {other}; "
                f"expected one launcher's. Unset the variables of the one that started the other."
            )
    if task.count < 2:
        return None
    if task.variable == PMIX:
        raise TaskError(
            f"popdist: got {PMIX}={task.index} without a number of tasks; expected both. Start "
            "the program by mpirun, srun, torchrun or poprun."
        )
    return task


def _check_by_hand(task: Task) -> None:
    """TaskError where somebody has set `INDEX` and `INSTANCES` in a task, for one run, which are
    not the task's. Other launchers, which may start several processes in a task, set more.
    """
    given = os.environ.get(INDEX), os.environ.get(INSTANCES)
    is_by_hand = None not in given and LOCAL_INDEX not in os.environ
    if (
        task.count > 1
        and is_by_hand
        and given[1] != "1"
        and given != (str(task.index), str(task.count))
    ):
        raise TaskError(
            f"popdist: got {INDEX}={given[0]} and {INSTANCES}={given[1]} in task {task.index} of "
            f"{task}; expected those of the task. Unset both, or set {INDEX}=0 {INSTANCES}=1 for "
            "tasks that are runs of their own."
        )


def index_here() -> int:
    """The number of this process among those of the run on this machine."""
    task = _quietly()
    default = 0 if task is None else task.index_here
    return int(os.environ.get(LOCAL_INDEX, default))


def count_here() -> int:
    """Processes of the run on this machine, as an mpirun or srun tells; 1 where none does."""
    task = _quietly()
    return 1 if task is None else max(1, task.here)


def threads() -> int | None:
    """Threads that this process should have: its even share of the cores that its launcher gives
    all tasks of this machine, of those that it may use. None: one for each core that it may run on,
    or as many as the user said.
    """
    if THREADS in os.environ or not hasattr(os, "sched_getaffinity"):
        return None
    task, own = _quietly(), usable_cores()
    if task is None or task.here < 2:
        return own if own < bound_cores() else None
    if task.variable == SLURM:
        share = _number("SLURM_CPUS_PER_TASK") or _number("SLURM_CPUS_ON_NODE") // task.here
        if own < bound_cores():  # Slurm knows no quotas: one that is set holds for all tasks here
            share = min(share, own // task.here)
    else:
        share = usable_cores(_starter() or 0) // task.here
    return max(1, min(own, share))


def _quietly() -> Task | None:
    """The same as `several`; None also where that raises."""
    try:
        return several()
    except TaskError:
        return None


def _open_mpi() -> Task | None:
    if OPEN_MPI not in os.environ:
        return None
    # mpirun's own process, by number and addresses: 343474176.0;tcp://192.0.2.2,10.0.0.2:43955
    mpirun = os.environ.get("OMPI_MCA_orte_hnp_uri", "")
    names = [os.environ[name] for name in ("PMIX_NAMESPACE",) if name in os.environ]
    addresses = re.search(r"tcp://([^,:]+)", mpirun)
    return Task(
        launcher="mpirun",
        variable=OPEN_MPI,
        count=_number(OPEN_MPI),
        index=_index("OMPI_COMM_WORLD_RANK", OPEN_MPI),
        here=_number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        index_here=_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        job=" ".join((*names, mpirun)) or None,
        first_host=_first_of_job() or (addresses[1] if addresses else None),
        is_guessed=True,
    )


def _mpich() -> Task | None:
    is_slurms = "SLURM_JOB_ID" in os.environ and "PMI_JOBID" in os.environ
    if PMI not in os.environ or is_slurms:
        return None
    count, here = _number(PMI), _number("MPI_LOCALNRANKS")
    return Task(
        launcher="mpirun",
        variable=PMI,
        count=count,
        index=_index("PMI_RANK", PMI),
        here=here,
        index_here=_number("MPI_LOCALRANKID"),
        job=_step() if here < count else None,  # no daemons of a step start those of one machine
        first_host=_first_of_job(),
        is_guessed=True,
    )


def _slurm() -> Task | None:
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    is_in_step = per_node is not None and per_node == os.environ.get("SLURM_TASKS_PER_NODE")
    if "SLURM_JOB_ID" not in os.environ or not is_in_step:
        return None
    index = _number("SLURM_PROCID")
    is_itself = _number("SLURM_TASK_PID") == os.getpid()
    if index == 0 and not is_itself and _has_terminal():
        return None
    of_nodes: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node or ""):
        of_nodes += [int(count)] * int(times or 1)
    node = _number("SLURM_NODEID")
    return Task(
        launcher="srun",
        variable=SLURM,
        count=_number(SLURM),
        index=index,
        here=of_nodes[node] if node < len(of_nodes) else 0,
        index_here=_number("SLURM_LOCALID"),
        job=_step(),
        first_host=_first_host(os.environ.get("SLURM_STEP_NODELIST", "")),
    )


def _pmix() -> Task | None:
    """PMIx by itself tells no number of tasks, but all of them apart from the first."""
    index = _number(PMIX)
    return Task("PMIx", PMIX, index + 1, index, 0, 0) if index else None


LAUNCHERS: tuple[Callable[[], Task | None], ...] = (_open_mpi, _mpich, _slurm, _pmix)
"""What reads the variables of each, the first one's word first."""


def _step() -> str | None:
    """The step of Slurm's that this process is in, also where that is mpirun's daemons."""
    numbers = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return ".".join(numbers) if all(numbers) else None


def _first_of_job() -> str | None:
    """The first node of the job that mpirun starts processes in, where there is one."""
    return _first_host(os.environ.get("SLURM_JOB_NODELIST", ""))


def _first_host(nodes: str) -> str | None:
    """The first of Slurm's lists of nodes, such as rack[1-2]node[03-05,7],other."""
    first = re.match(r"(?:\[[^]]*\]|[^,[])+", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0]) if first else None


def _has_terminal() -> bool:
    """Whether this is a shell's, of `srun --pty`: no other task has a terminal, and other shells
    end at once.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _starter() -> int | None:
    """The launcher's process that started this machine's tasks: the nearest one above this one that
    has not this task's variables. None: the system does not tell.
    """
    number, own = os.getppid(), {n: os.environ[n] for n in OF_EACH if n in os.environ}
    try:
        while number > 1:
            pairs = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
            theirs = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs)
            if any(theirs.get(name) != value for name, value in own.items()):
                break
            number = int(_status(number)[1])
    except PermissionError:  # of another user, which this process's own would not be
        pass
    except OSError:
        return None
    return number or None


def _birth(number: int | None) -> str | None:
    """A process's number, and when it was started."""
    try:
        return None if number is None else f"{number} {_status(number)[19]}"
    except OSError:
        return None


def _status(number: int) -> list[str]:
    """What proc(5) tells of a process, from its state on."""
    return Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()


def _index(name: str, counted: str) -> int:
    """TaskError: a task of several whose number is not told."""
    if name not in os.environ and _number(counted) > 1:
        raise TaskError(
            f"popdist: got {counted} without {name}; expected both. Start the program by mpirun, "
            "or unset it."
        )
    return _number(name)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0

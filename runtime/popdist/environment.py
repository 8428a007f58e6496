"""Which instance this is, and of how many, as the launcher's environment says."""

import os
import sys
from collections.abc import Callable
from shlex import quote
from typing import Any

from poprun.environment import INDEX, INSTANCES, IPUS, REPLICAS, number_from_environment
from poprun.other_launchers import SRUN, Tasks, unmet_tasks
from poprun.restarts import leave_note, read_note

__all__ = [
    "execute_on_instances",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "isPopdistEnvSet",
    "leave_note",
    "read_note",
]


class UnmetTasksError(RuntimeError):
    """Another launcher started several processes, each of which would be all of a run."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        super().__init__(self.told())

    def told(self, replicas: int | None = None, *flags: str) -> str:
        """What is wrong, and the command that starts this program in as many processes that meet.

        Args:
            replicas: of the run; None: one in each process.
            flags: which the program needs for it.
        """
        tasks, program = self.tasks, " ".join(map(quote, [*sys.orig_argv, *flags]))
        command = f"{quote(sys.orig_argv[0])} -m poprun --num-instances {tasks.count}"
        if replicas not in (None, tasks.count):
            command = f"{command} --num-replicas {replicas}"
        if tasks.machines != 1:
            way = (
                f"Start one poprun on each machine: {command} --nnodes {tasks.machines or 'M'} "
                "--node-rank I --rdzv-endpoint HOST:PORT"
            )
        elif tasks.launcher == SRUN:
            cores = tasks.count * number_from_environment("SLURM_CPUS_PER_TASK", 1)
            way = f"Run: srun --ntasks=1 --cpus-per-task={cores} {command}"
        else:
            way = f"Run: {command}"
        return (
            f"popdist: got {tasks}, each of which would be a run by itself; expected processes "
            f"that meet. {way} {program}"
        )


def isPopdistEnvSet() -> bool:  # noqa: N802 - PopXL's name
    """Whether a launcher started this process.

    Raises:
        RuntimeError: if only a part of the launcher's variables is set.
        UnmetTasksError: as it says.
    """
    present = [name for name in (INDEX, INSTANCES) if name in os.environ]
    if len(present) == 1 or (REPLICAS in os.environ and not present):
        found = present or [REPLICAS]
        missing = [name for name in (INDEX, INSTANCES) if name not in present]
        raise RuntimeError(
            f"popdist: got {', '.join(found)} without {', '.join(missing)}; expected all of the "
            "launcher's variables or none. Start the program with torchrun or poprun, or unset "
            "them."
        )
    tasks = unmet_tasks()
    if tasks is not None:
        raise UnmetTasksError(tasks)
    return bool(present)


def getInstanceIndex() -> int:  # noqa: N802
    """Index of this process among all, 0 without a launcher. ValueError if it is out of range."""
    index, instances = (
        number_from_environment(INDEX, 0) if isPopdistEnvSet() else 0,
        getNumInstances(),
    )
    if not 0 <= index < instances:
        raise ValueError(
            f"popdist: got {INDEX}={index} of {INSTANCES}={instances}; expected 0 <= {INDEX} "
            f"< {INSTANCES}."
        )
    return index


def getNumInstances() -> int:  # noqa: N802
    """Number of processes, 1 without a launcher."""
    return number_from_environment(INSTANCES, 1) if isPopdistEnvSet() else 1


def getNumTotalReplicas() -> int:  # noqa: N802
    """Replicas over all processes. ValueError unless they divide evenly over the processes."""
    instances = getNumInstances()
    replicas = number_from_environment(REPLICAS, instances)
    if replicas < 1 or replicas % instances:
        raise ValueError(
            f"popdist: got {replicas} replicas for {instances} instances; expected a multiple of "
            f"the instances. Set {REPLICAS} (poprun --num-replicas) to a multiple of {instances}."
        )
    return replicas


def getNumLocalReplicas() -> int:  # noqa: N802
    """Replicas in this process."""
    return getNumTotalReplicas() // getNumInstances()


def getNumIpusPerReplica() -> int:  # noqa: N802
    """Virtual devices per replica."""
    return number_from_environment(IPUS, 1)


def execute_on_instances(
    instances: set[int], function: Callable[..., Any], *args: Any
) -> Any | None:
    """Call ``function(*args)`` in those processes only; None in the others."""
    return function(*args) if getInstanceIndex() in instances else None

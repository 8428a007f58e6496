"""Which instance this is, and of how many, as the launcher's environment says."""

import os
from collections.abc import Callable
from typing import Any

from poprun import tasks
from poprun.environment import INDEX, INSTANCES, IPUS, REPLICAS, number_from_environment
from poprun.restarts import leave_note, read_note
from poprun.tasks import count_here, threads

__all__ = [
    "count_here",
    "execute_on_instances",
    "expect_replicas",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "isPopdistEnvSet",
    "leave_note",
    "read_note",
    "threads",
]
_expected: list[int] = []
"""The replicas of the program, where it has said how many."""


def isPopdistEnvSet() -> bool:  # noqa: N802 - PopXL's name
    """Whether a launcher started this process.

    Raises:
        RuntimeError: if only a part of the launcher's variables is set, or some contradict others.
    """
    present = [name for name in (INDEX, INSTANCES) if name in os.environ]
    is_task = tasks.several() is not None
    if len(present) == 1 or (REPLICAS in os.environ and not present and not is_task):
        found = present or [REPLICAS]
        missing = [name for name in (INDEX, INSTANCES) if name not in present]
        raise RuntimeError(
            f"popdist: got {', '.join(found)} without {', '.join(missing)}; expected all of the "
            "launcher's variables or none. Start the program with torchrun or poprun, or unset "
            "them."
        )
    return bool(present) or is_task


def getInstanceIndex() -> int:  # noqa: N802
    """Index of this process among all, 0 without a launcher. ValueError if it is out of range."""
    task, instances = tasks.several(), getNumInstances()
    if task is not None:
        return task.index
    index = number_from_environment(INDEX, 0)
    if not 0 <= index < instances:
        raise ValueError(
            f"popdist: got {INDEX}={index} of {INSTANCES}={instances}; expected 0 <= {INDEX} "
            f"< {INSTANCES}."
        )
    return index


def getNumInstances() -> int:  # noqa: N802
    """Number of processes, 1 without a launcher."""
    task = tasks.several() if isPopdistEnvSet() else None
    return number_from_environment(INSTANCES, 1) if task is None else task.count


def expect_replicas(replicas: int) -> None:
    """Say how many replicas a program has, for launchers that do not: all but poprun."""
    _expected[:] = [replicas] if isPopdistEnvSet() else []


def getNumTotalReplicas() -> int:  # noqa: N802
    """Replicas over all processes: as many as the launcher says, else as the program expects where
    these divide evenly over the processes, else one each. ValueError: the launcher's do not divide.
    """
    instances = getNumInstances()
    default = next((n for n in _expected if n % instances == 0), instances)
    replicas = number_from_environment(REPLICAS, default)
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

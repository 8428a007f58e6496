"""Instances (processes) and replicas: who am I, and how many are we.

Imports nothing of ours but ``popart``, and ``poprun``, by which instances meet and are watched.
What they tell each other goes through `exchange`.

The answers come from the launcher's environment: ``RANK`` and ``WORLD_SIZE`` as ``torchrun`` sets
them, or what `mpirun` and `srun` set (`poprun.tasks`), one instance per process, and
``POPDIST_NUM_TOTAL_REPLICAS`` (default: one replica per instance). Without a launcher one process
is everything.
"""

from popdist.environment import (
    execute_on_instances,
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    isPopdistEnvSet,
)
from popdist.exchange import init

__all__ = [
    "execute_on_instances",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "init",
    "isPopdistEnvSet",
]

"""torch's process groups, for the collectives of devices (NCCL), where they are used.

They meet where the instances have met: on one machine by a file in the run's folder, on several by
the run's store, which lets nobody in who does not know the secret. torch's own store would listen
for everyone, and never starts here.
"""

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as distributed
from popdist import exchange, getInstanceIndex, getNumInstances
from poprun import rendezvous
from poprun.environment import INTERFACE
from poprun.torch_store import SharedStore

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_kept: list[distributed.Store] = []
"""Stores that torch uses as long as this process runs."""


def make_group(instances: Sequence[int], backend: str) -> Any:
    """A process group of some instances. Every instance calls this; those outside get a group that
    is of no use.
    """
    wait = timedelta(seconds=exchange.seconds())
    with exchange.reaching_others("opening the devices' connections"):
        if not distributed.is_initialized():
            _initialise(backend, wait)
        return distributed.new_group(list(instances), wait, backend)


def _initialise(backend: str, wait: timedelta) -> None:
    connection = exchange.connect()
    if INTERFACE in os.environ:  # NCCL takes names that begin so unless told to take exactly these
        os.environ.setdefault(NCCL_INTERFACE, f"={os.environ[INTERFACE]}")
    folder = connection.rendezvous.folder
    if folder is not None:
        store: Any = distributed.FileStore(str(folder / "groups"), getNumInstances())
    else:
        _kept.append(SharedStore(connection.rendezvous, rendezvous.JOIN_SECONDS))
        store = distributed.PrefixStore("torch", _kept[-1])
    distributed.init_process_group(
        backend, store=store, rank=getInstanceIndex(), world_size=getNumInstances(), timeout=wait
    )
    atexit.register(_leave)


def _leave() -> None:
    """Threads of the groups outlive what they use otherwise; where another instance is lost,
    closing would wait.
    """
    if not exchange.has_lost():
        distributed.destroy_process_group()

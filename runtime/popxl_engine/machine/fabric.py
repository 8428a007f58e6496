"""Collectives over several processes: what members of a group in other processes contribute.

Where each replica has a process and a GPU of its own, the GPUs' collectives serve (`by_devices`),
elsewhere messages through host memory (`by_messages`).
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import count
from typing import Any

import torch
from popdist import exchange
from popdist.messages import TransferError

from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.by_devices import ByDevices
from popxl_engine.machine.by_messages import HOST, ByMessages, Placement
from popxl_engine.machine.communicator import as_bytes, make_communicators
from popxl_engine.machine.transport import Exchange, Transport, places

RUNS_OF_EACH = 2**20
"""How far the runs of one fabric are numbered apart from those of the next."""
_fabrics = count()
"""The fabrics of this process, which all processes make in the same order."""


class Fabric:
    """This process's way to the replicas of the others.

    Args:
        replicas: number over all processes, which hold equal, consecutive shares.
        local: replicas of this process.
        device: where their tensors are.
        groups: over which the program's collectives go, sorted. Every process must give the same.
    """

    def __init__(
        self,
        replicas: int,
        local: range,
        device: torch.device = HOST,
        groups: Sequence[tuple[int, ...]] = (),
    ):
        self.local, self._placement = local, Placement(replicas, local)
        self._run = next(_fabrics) * RUNS_OF_EACH
        communicators = make_communicators(device, local, groups)
        self._transport: Transport = (
            ByMessages(self._placement, device)
            if communicators is None
            else ByDevices(communicators, device)
        )
        self._pool: ThreadPoolExecutor | None = None

    def begin_run(self) -> None:
        """Tell the collectives that follow from those of other runs, and of other programs'. Every
        process must call it.
        """
        self._run += 1

    def begin(self, arrivals: dict[int, Arrival]) -> Exchange:
        """Begin a collective for which this process's members of a group, by replica, have arrived.
        Waits for nothing.
        """
        first = next(iter(arrivals.values()))
        with exchange.reaching_others(f"at {first.describe}", TransferError):
            return self._transport.begin(arrivals, self._run)

    def finish(self, exchanges: Sequence[Exchange]) -> tuple[Exchange, dict[int, Any]]:
        """Wait for one of the exchanges, and return it with its results by replica.

        Where all are at one site of the program, the order is that of their groups; else the first
        that is done.
        """
        with exchange.reaching_others(lambda: places(exchanges), TransferError):
            sites = {collective.first.site_index for collective in exchanges}
            found = (
                min(exchanges, key=lambda collective: collective.first.members)
                if len(sites) == 1
                else self._first_done(exchanges)
            )
            return found, found.results() if found.done is None else found.done.result()

    def _first_done(self, exchanges: Sequence[Exchange]) -> Exchange:
        """Replicas here that took different branches: one group's end may be what another waits
        for, elsewhere.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self.local), thread_name_prefix="fabric")
        waits_of = {}
        for collective in exchanges:
            collective.done = collective.done or self._pool.submit(collective.results)
            waits_of[collective.done] = collective
        done, _ = wait(waits_of, return_when=FIRST_COMPLETED)
        return min(
            (waits_of[future] for future in done), key=lambda collective: collective.first.members
        )

    def broadcast(
        self, value: torch.Tensor | None, like: torch.Tensor, replica: int
    ) -> torch.Tensor:
        """A replica's tensor in every process. Collective; ``value`` where the replica lives, None
        elsewhere.

        Patient: one process may write what it has read to a disk meanwhile.
        """
        whole = torch.empty_like(like) if value is None else value.contiguous()
        if whole.numel():
            flat = as_bytes(whole.detach()).numpy()
            exchange.broadcast(flat, self._placement.instance_of(replica), "reading variables")
        return whole

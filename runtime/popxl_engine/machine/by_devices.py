"""Collectives by those of the devices, for replicas that each have a process and a device: in a
stream beside the replica's own where it goes on meanwhile.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from popdist.messages import TransferError

from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.communicator import Communicator
from popxl_engine.machine.side_stream import SideStream
from popxl_engine.machine.transport import Exchange


class ByDevices:
    """Collectives by communicators.

    Args:
        communicators: of this process's replica, by the members of the group.
        device: where its tensors are.
    """

    def __init__(self, communicators: Mapping[tuple[int, ...], Communicator], device: torch.device):
        self._communicators, self._side = communicators, SideStream(device)

    def begin(self, arrivals: dict[int, Arrival], run: int) -> "DeviceExchange":
        """Begin it where the replica goes on; else it runs where its result is asked for. Devices
        tell no runs apart.
        """
        ((member, arrival),) = arrivals.items()
        end = partial(_apart, self._communicators[arrival.members], arrival)
        if arrival.goes_on:
            return DeviceExchange(arrivals, member, self._side.begin(end, arrival.operands))
        return DeviceExchange(arrivals, member, end)


class DeviceExchange(Exchange):
    """One group's collective by a communicator.

    Args:
        end: waits for the member's result, as far as the device must.
    """

    def __init__(self, arrivals: dict[int, Arrival], member: int, end: Callable[[], Any]):
        super().__init__(arrivals)
        self._member, self._end = member, end

    def results(self) -> dict[int, Any]:
        """See `Exchange`."""
        return {self._member: self._end()}


def _apart(communicator: Communicator, arrival: Arrival) -> Any:
    """What a member gets by its device's collective."""
    try:
        return arrival.apart(communicator, *arrival.operands)
    except RuntimeError as error:
        raise TransferError(str(error)) from None

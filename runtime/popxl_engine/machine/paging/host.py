"""The host's memory behind that of a device: rows that a GPU works on, while the others wait
here.
"""

import torch

from popxl_engine.machine.device import Device, Pages
from popxl_engine.machine.paging.store import Store


class HostStore:
    """A `Store` in the host's memory.

    Args:
        nbytes: taken at once.
        device: where the rows' memory is. Copies go both ways at a time.
    Raises:
        RemoteMemoryError: the system does not have that much.
    """

    is_direct = True

    def __init__(self, nbytes: int, device: Device):
        self._memory = Pages(nbytes)
        if device.where.type == "cuda":
            self._memory.lock(device.where)
        self._inward, self._outward = device.lane(), device.lane()

    def read(self, start: int, into: torch.Tensor) -> None:
        """See `Store`."""
        self._inward.copy(into, self.part(start, into.numel()))

    def write(self, start: int, data: torch.Tensor) -> None:
        """See `Store`."""
        self._outward.copy(self.part(start, data.numel()), data)

    def part(self, start: int, size: int) -> torch.Tensor:
        """Some of the bytes."""
        return self._memory.bytes[start : start + size]

    def close(self) -> None:
        """See `Store`."""


class StagedStore:
    """A `Store` for a device's memory over one that only reaches the host's, through a page-locked
    row each way.

    Args:
        largest: bytes of the largest row.
    """

    def __init__(self, store: Store, largest: int, device: Device):
        self._store, self.is_direct = store, store.is_direct
        self._staging = HostStore(2 * largest, device)
        self._largest = largest

    def read(self, start: int, into: torch.Tensor) -> None:
        """See `Store`."""
        self._store.read(start, self._staging.part(0, into.numel()))
        self._staging.read(0, into)

    def write(self, start: int, data: torch.Tensor) -> None:
        """See `Store`."""
        self._staging.write(self._largest, data)
        self._store.write(start, self._staging.part(self._largest, data.numel()))

    def close(self) -> None:
        """See `Store`."""
        self._store.close()

"""Remote memory of one replica: buffers of equal rows beside the device, in RAM or in memory-mapped
files.
"""

import sys
from collections.abc import Sequence

import torch


class Rows:
    """The slots of one remote buffer on one replica.

    A row has memory from when it is first written or asked for until its contents are over; one of
    zeros is only noted until then. Its memory may be adopted: from the caller, who sees every
    change (a memory-mapped file), or from a tensor that its owner gives up.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        entries: int,
        device: torch.device | None = None,
    ):
        self.shape, self.dtype, self.entries = tuple(shape), dtype, entries
        self._device = device or torch.device("cpu")
        self.row_bytes = torch.Size(self.shape).numel() * dtype.itemsize
        self._rows: dict[int, torch.Tensor] = {}
        self._zeros: set[int] = set()
        self._callers: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.row_bytes * self.entries

    @property
    def held_bytes(self) -> int:
        """Bytes of the memory that rows have so far."""
        return sum(row.untyped_storage().nbytes() for row in self._rows.values())

    def own_bytes(self, index: int) -> int:
        """Bytes of the memory that a row has so far, unless it is the caller's."""
        row = None if index in self._callers else self._rows.get(index)
        return 0 if row is None else row.untyped_storage().nbytes()

    def adopt(self, index: int, row: torch.Tensor) -> None:
        """Use the caller's memory as a row."""
        self._rows[index] = row
        self._callers.add(index)

    def row(self, index: int) -> torch.Tensor:
        """The row itself: writing to it changes the buffer. IndexError outside the buffer."""
        found = self._rows.get(index)
        if found is None:
            check_index(index, self.entries)
            found = self._rows[index] = torch.empty(
                self.shape, dtype=self.dtype, device=self._device
            )
            if index in self._zeros:
                found.view(torch.uint8).zero_()  # float8 has no fill
        return found

    def load(self, index: int) -> torch.Tensor:
        """The row itself, zeros where nothing was stored; whoever needs it unchanged copies.
        IndexError outside the buffer.
        """
        found = self._rows.get(index)
        if found is None:
            self._zeros.add(index)
            found = self.row(index)
        return found

    def store(self, index: int, t: torch.Tensor) -> None:
        """Write a row. Storing a row into itself is free, and so are zeros at first. IndexError
        outside the buffer.
        """
        row = self._rows.get(index)
        if row is None:
            check_index(index, self.entries)
            if is_one_zero(t):
                self._zeros.add(index)
                return
            self._zeros.discard(index)
            row = self.row(index)
        copy_apart(row, t)

    def donate(self, index: int, held: list[torch.Tensor]) -> None:
        """The same as `store`, of the one tensor in a list, which is empty afterwards.

        Where nobody else has the tensor or its memory, that becomes the row's without a copy.
        """
        if held[0] is self._rows.get(index):
            held.clear()
            return
        alone = is_alone(held)
        t = held.pop()
        same = t.shape == self.shape and t.dtype == self.dtype and t.is_contiguous()
        if alone and same and 0 <= index < self.entries and index not in self._callers:
            self._rows[index] = t
        else:
            self.store(index, t)

    def release(self, index: int) -> None:
        """Leave a row's memory to the tensors that still have it; from here on it is zeros. A
        caller's stays a row.
        """
        if index not in self._callers:
            self._rows.pop(index, None)
            self._zeros.add(index)


def check_index(index: int, entries: int) -> None:
    """IndexError for a row that a buffer does not have."""
    if not 0 <= index < entries:
        raise IndexError(
            f"remote buffer: got offset {index}; expected 0 <= offset < {entries} entries. "
            "Allocate the buffer with more entries."
        )


def copy_apart(row: torch.Tensor, t: torch.Tensor) -> None:
    """Copy a tensor into a row, unless it is that row."""
    if row.data_ptr() == t.data_ptr() and row.stride() == t.stride() and row.numel() > 0:
        return
    if row.device != t.device and t.numel() > 1 and not any(t.stride()):
        t = t[(0,) * t.dim()].to(row.device).expand(t.shape)  # one number travels
    row.copy_(t)


def is_one_zero(t: torch.Tensor) -> bool:
    """Whether a tensor is one zero, without a sign, seen everywhere."""
    return (
        t.numel() > 1
        and not any(t.stride())
        and not t[(0,) * t.dim()].reshape(1).view(torch.uint8).any()
    )


def unshared(held: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensor in a list, if that alone has it, and it alone its memory: that may be used for
    something else.
    """
    return held[0] if _has_memory(held) else None


def is_alone(held: list[torch.Tensor]) -> bool:
    """Whether only this list has its tensor, and only the tensor has its memory, all of it."""
    return held[0].untyped_storage().nbytes() == held[0].nbytes and _has_memory(held)


def _has_memory(held: list[torch.Tensor]) -> bool:
    """Whether nobody else has the tensor in a list that a caller was given, nor any part of the
    memory that it is in.

    Memory that is not PyTorch's own, such as a numpy array's, always has another owner.
    """
    references = sys.getrefcount(held[0])
    storage = held[0].untyped_storage()
    if references > 2 or not storage.resizable():  # the list's, and this call's
        return False
    # the tensor's, and our variable's
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)

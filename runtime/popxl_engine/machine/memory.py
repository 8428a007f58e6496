"""Remote memory of one replica: buffers of equal rows beside the device, in RAM or in memory-mapped files."""

from typing import Dict, Optional, Sequence, Set

import torch

ALIGNMENT = 64
"""Bytes; rows start on cache lines."""


class Rows:
    """The slots of one remote buffer on one replica.

    Rows share one slab, which the system backs with memory as rows are written; a row may instead be adopted from the
    caller (a memory-mapped file). A row of zeros is only noted until it is asked for.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, entries: int):
        self.shape, self.dtype, self.entries = tuple(shape), dtype, entries
        self._slab: Optional[torch.Tensor] = None
        self._rows: Dict[int, torch.Tensor] = {}
        self._zeros: Set[int] = set()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self._stride * self.entries

    def adopt(self, index: int, row: torch.Tensor) -> None:
        """Use the caller's memory as a row."""
        self._rows[index] = row

    def row(self, index: int) -> torch.Tensor:
        """The row itself: writing to it changes the buffer. IndexError outside the buffer."""
        found = self._rows.get(index)
        if found is None:
            found = self._rows[index] = self._cut(index)
            if index in self._zeros:
                found.view(torch.uint8).zero_()  # float8 has no fill
        return found

    def load(self, index: int) -> torch.Tensor:
        """The row itself; whoever needs it unchanged copies. IndexError outside the buffer."""
        return self.row(index)

    def store(self, index: int, t: torch.Tensor) -> None:
        """Write a row. Storing a row into itself is free, and so are zeros at first. IndexError outside the buffer."""
        check_index(index, self.entries)
        if index not in self._rows and is_one_zero(t):
            self._zeros.add(index)
            return
        self._zeros.discard(index)
        copy_apart(self.row(index), t)

    def _cut(self, index: int) -> torch.Tensor:
        check_index(index, self.entries)
        if self._slab is None:
            self._slab = allocate(self.nbytes)
        start = index * self._stride
        return self._slab[start : start + self.row_bytes].view(self.dtype).view(self.shape)

    @property
    def _stride(self) -> int:
        return -(-self.row_bytes // ALIGNMENT) * ALIGNMENT


def check_index(index: int, entries: int) -> None:
    """IndexError for a row that a buffer does not have."""
    if not 0 <= index < entries:
        raise IndexError(
            f"remote buffer: got offset {index}; expected 0 <= offset < {entries} entries. Allocate the buffer with "
            "more entries."
        )


def copy_apart(row: torch.Tensor, t: torch.Tensor) -> None:
    """Copy a tensor into a row, unless it is that row."""
    if row.data_ptr() != t.data_ptr() or row.numel() == 0:
        row.copy_(t)


def is_one_zero(t: torch.Tensor) -> bool:
    """Whether a tensor is one zero, without a sign, seen everywhere."""
    return t.numel() > 1 and not any(t.stride()) and not t[(0,) * t.dim()].reshape(1).view(torch.uint8).any()


def allocate(nbytes: int) -> torch.Tensor:
    """Bytes that start on a cache line; the system backs them with memory as they are written."""
    raw = torch.empty(max(nbytes, 1) + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + nbytes]

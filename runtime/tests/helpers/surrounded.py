"""Calls of the compiled library with memory of their own: all around each operand, and between its
rows, is NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from popxl_engine.native import library as native

AROUND = 67
"""Elements before and behind an operand. The number is odd: operands begin anywhere."""


class Surrounded:
    """A copy of a tensor, of the same strides, amid NaN (of whole numbers, the smallest)."""

    def __init__(self, t: torch.Tensor) -> None:
        extent = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())) if t.numel() else 0
        poison = torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).min
        self._whole = torch.full((extent + 2 * AROUND,), poison, dtype=t.dtype)
        self._is_around = torch.ones(self._whole.shape, dtype=torch.bool)
        self.given, self.copy = t, self._whole.as_strided(t.shape, t.stride(), AROUND)
        _once(self._is_around.as_strided(t.shape, t.stride(), AROUND)).fill_(False)
        _once(self.copy).copy_(_once(t))
        self._before = self._bits_around()

    def _bits_around(self) -> torch.Tensor:
        return self._whole[self._is_around].view(torch.uint8)

    def give_back(self) -> None:
        """What the call has written. AssertionError: it has written elsewhere, too."""
        assert torch.equal(self._bits_around(), self._before), "written beside an operand"
        _once(self.given).copy_(_once(self.copy))


def _once(t: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that is expanded, each once."""
    return t[tuple(slice(1) if step == 0 else slice(None) for step in t.stride())]


@contextmanager
def surrounded() -> Iterator[None]:
    """A block in which every call of the library is made on copies amid NaN, and new memory is NaN."""
    plain, was = native.call, torch.are_deterministic_algorithms_enabled()

    def call(name: str, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> None:
        operands: dict[Any, Surrounded] = {}
        for t in arguments:
            if isinstance(t, torch.Tensor) and (place := _place(t)) not in operands:
                operands[place] = Surrounded(t)
        plain(
            name,
            dtypes,
            *(operands[_place(t)].copy if isinstance(t, torch.Tensor) else t for t in arguments),
        )
        for operand in operands.values():
            operand.give_back()

    native.call = call
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` makes
    try:
        yield
    finally:
        native.call = plain
        torch.use_deterministic_algorithms(was)


def _place(t: torch.Tensor) -> Any:
    """Alike where two arguments of a call are one tensor."""
    return t.data_ptr(), t.shape, t.stride()

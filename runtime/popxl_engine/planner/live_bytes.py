"""Counts the bytes of tensors that are alive, as they come and go."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STAND_IN = 0.5
"""Stands for numbers that only exist on a device: neither of those, 0 and 1, that kernels have
shortcuts for.
"""
LEFT_ALONE = "__dynamo_disable"
"""The attribute where torch keeps what it calls in a function's place, once its compiler has been
told.
"""


class LiveBytes(TorchDispatchMode):
    """A mode in which every tensor that an operation makes counts until its memory is given up.

    Tensors are expected to be on the meta device: they have shapes and no memory. A number that a
    kernel asks of one reads as `STAND_IN`, an integer as 0, a truth as False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.highest = 0
        """Bytes alive now, and the most since `begin`."""
        self.peaks: dict[str, int] = {}
        """Most bytes alive at a time, by phase."""
        self.phase: str | None = None
        self._known: dict[int, weakref.ref[Any]] = {}

    def enter(self, phase: str) -> None:
        """What comes next counts for a phase."""
        self.phase = phase
        self._note()

    def begin(self) -> int:
        """Look for the highest count from here on; returns the present one."""
        self.highest = self.live
        return self.live

    def touch(self, more: int) -> None:
        """Count more bytes for a moment."""
        self.live += more
        self._note()
        self.live -= more

    def _note(self) -> None:
        self.highest = max(self.highest, self.live)
        if self.phase is not None:
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)

    def add(self, t: torch.Tensor, counts: bool = True) -> None:
        """Count a tensor's storage, or with ``counts=False`` keep its storage out of the count."""
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if counts else 0
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.live += nbytes
        self._note()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `without_compiler`

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return STAND_IN if dtype.is_floating_point else False if dtype is torch.bool else 0
        result = func(*args, **(kwargs or {}))
        for t in tensors_in((result,)):
            self.add(t)
        return result


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let torch's functions for tensors without memory run as they are in the body.

    At its first call, each of them that is written in Python loads torch's compiler, to tell it to
    leave the function alone: 25 MiB, and more than a second.
    """
    given = [function for function in _left_alone() if not hasattr(function, LEFT_ALONE)]
    for function in given:
        setattr(function, LEFT_ALONE, function)
    try:
        yield
    finally:
        for function in given:
            delattr(function, LEFT_ALONE)


@cache
def _left_alone() -> list[Callable[..., Any]]:
    """The functions that torch wraps so."""
    wrapper = torch._disable_dynamo(lambda: None).__code__
    found: dict[Callable[..., Any], bool] = {}
    left = [
        f for table in torch._decomp.global_decomposition_table.values() for f in table.values()
    ]
    while left:
        function = left.pop()
        for cell in getattr(function, "__closure__", None) or ():
            inside = cell.cell_contents
            if isinstance(inside, FunctionType):
                if inside not in found:
                    left.append(inside)
                found[inside] = found.get(inside, False) or function.__code__ is wrapper
    return [function for function, is_wrapped in found.items() if is_wrapped]


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values and their lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def on_meta(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and strides without memory."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

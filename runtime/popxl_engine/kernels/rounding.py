"""The one place where a wide result becomes a 16-bit weight: rounded to nearest, or stochastically."""

from contextlib import contextmanager
from typing import Callable, Iterator, Optional

import torch

from popxl_engine.kernels.generator import draws

NARROW = (torch.float16, torch.bfloat16)
"""Types that are computed in float32 and rounded once."""


def round_to(dtype: torch.dtype, x: torch.Tensor, seed: Optional[torch.Tensor] = None, offset: int = 0) -> torch.Tensor:
    """Round float32 to a 16-bit type: to nearest, or with a seed stochastically.

    Stochastic rounding moves x to one of its two neighbours, with a probability in proportion to the distance from the
    other: the expected result is x. Numbers that the type holds stay as they are, so do infinities and NaN.

    Args:
        seed: uint32 [2], on x's device. Other types than float32 to 16 bits are rounded to nearest all the same.
        offset: index of x's first element in the tensor that the seed is for; for a shard not zero.
    """
    if seed is None or dtype not in NARROW or x.dtype != torch.float32:
        return x.to(dtype)
    bits = draws(seed, x.numel(), offset).view(x.shape)
    return _to_bfloat16(x, bits) if dtype == torch.bfloat16 else _to_float16(x, bits)


def _to_bfloat16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bfloat16 is float32's upper half: random lower bits carry into it with the right probability."""
    raw = x.contiguous().view(torch.int32)
    rounded = torch.where(x.isfinite(), (raw + (bits & 0xFFFF)) & -0x10000, raw)
    return rounded.view(torch.float32).to(torch.bfloat16)


def _to_float16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float16 keeps 11 of float32's 24 significant bits, and fewer below 2**-14: its units are at least 2**-24."""
    _, exponent = torch.frexp(x)
    unit = torch.ldexp(torch.ones_like(x), (exponent - 11).clamp(min=-24))
    noise = (bits & 0x1FFF).to(torch.float32) * 2.0**-13  # 13 bits, so that no sum with them is rounded
    return torch.where(x.isfinite(), torch.floor(x / unit + noise) * unit, x).to(torch.float16)


class Updates:
    """Where in-place updates of 16-bit tensors get the seeds of their rounding; without, they round to nearest."""

    next_seed: Optional[Callable[[], torch.Tensor]] = None

    @classmethod
    @contextmanager
    def rounded_stochastically(cls, next_seed: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Inside, every update of a 16-bit tensor draws ``next_seed()``, uint32 [2], and rounds stochastically.

        The same program in the same order draws the same seeds: call it once for each run, with a counter for updates.
        """
        before, cls.next_seed = cls.next_seed, next_seed
        try:
            yield
        finally:
            cls.next_seed = before


def update(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write an update's result into ``t``, rounded to its type, and return ``t``."""
    if t.dtype in NARROW and value.dtype == torch.float32 and Updates.next_seed is not None:
        return t.copy_(round_to(t.dtype, value, Updates.next_seed()))
    return t.copy_(value)


def widened(t: torch.Tensor) -> torch.Tensor:
    """16-bit floating point as float32, everything else as it is."""
    return t.to(torch.float32) if t.dtype in NARROW else t

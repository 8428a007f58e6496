"""The one place where a wide result becomes a 16-bit weight: rounding to nearest, or stochastic."""

from contextlib import contextmanager
from typing import Callable, Iterator, Optional

import torch

NARROW = (torch.float16, torch.bfloat16)
"""Types that are computed in float32 and rounded once."""


def round_to(dtype: torch.dtype, x: torch.Tensor, seed: Optional[int] = None) -> torch.Tensor:
    """Round float32 to a 16-bit type: to nearest, or with a seed stochastically, without bias.

    Stochastic rounding moves x to one of its two neighbours, with a probability proportional to the distance from the
    other, so
    that the expected result is x. Values beyond the type's range become infinite, NaN stays NaN.
    """
    if x.dtype == dtype:
        return x
    if seed is None or dtype not in NARROW or x.dtype != torch.float32:
        return x.to(dtype)
    return stochastic(dtype, x, uniform_bits(seed, x))


def stochastic(dtype: torch.dtype, x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 to a 16-bit type with 32 random bits (int32 tensor) per element."""
    if dtype == torch.bfloat16:
        # bfloat16 is float32's upper half: adding random low bits carries into it with the right probability.
        raw = x.contiguous().view(torch.int32)
        rounded = torch.where(x.isfinite(), raw + (bits & 0xFFFF), raw)
        return (rounded & -0x10000).view(torch.float32).to(torch.bfloat16)
    # float16 has 11 significant bits, fewer below 2**-14: one unit in the last place is at least 2**-24.
    _, exponent = torch.frexp(x)
    unit = torch.ldexp(torch.ones_like(x), (exponent - 11).clamp(min=-24))
    noise = (bits & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return torch.where(x.isfinite(), torch.floor(x / unit + noise) * unit, x).to(torch.float16)


def uniform_bits(seed: int, x: torch.Tensor) -> torch.Tensor:
    """32 random bits per element as int32: a hash of the seed and the element's index in the tensor."""
    index = torch.arange(x.numel(), dtype=torch.int64, device=x.device).reshape(x.shape)
    h = (index + (seed & 0xFFFFFFFF) * 0x9E3779B1) & 0xFFFFFFFF
    for multiplier in (0x7FEB352D, 0x846CA68B):
        h = ((h ^ (h >> 16)) * multiplier) & 0xFFFFFFFF
        h = h ^ (h >> 15)
    return (h - ((h >> 31) << 32)).to(torch.int32)


class Updates:
    """Where in-place updates of 16-bit tensors get the seeds of their rounding; none means rounding to nearest."""

    next_seed: Optional[Callable[[], int]] = None

    @classmethod
    @contextmanager
    def rounded_stochastically(cls, next_seed: Callable[[], int]) -> Iterator[None]:
        """Inside, every update draws ``next_seed()`` and rounds stochastically."""
        before, cls.next_seed = cls.next_seed, next_seed
        try:
            yield
        finally:
            cls.next_seed = before


def update(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write an update's result into ``t``, rounded to its type, and return ``t``."""
    if t.dtype in NARROW and value.dtype == torch.float32:
        seed = Updates.next_seed() if Updates.next_seed else None
        return t.copy_(round_to(t.dtype, value, seed))
    return t.copy_(value)


def widened(t: torch.Tensor) -> torch.Tensor:
    """16-bit floating point as float32, everything else as it is."""
    return t.to(torch.float32) if t.dtype in NARROW else t

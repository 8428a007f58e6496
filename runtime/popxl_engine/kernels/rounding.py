"""The one place where a wide result becomes a 16-bit weight: rounded to nearest, or stochastically."""

from contextlib import contextmanager
from typing import Callable, Iterator, Optional, Tuple

import torch

from popxl_engine.kernels.generator import blocks

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
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    flat, source = result.view(-1), x.reshape(-1)
    round_part = _to_bfloat16 if dtype == torch.bfloat16 else _to_float16
    for part, noise in noise_blocks(seed, source.numel(), x.device, offset):
        flat[part] = round_part(source[part], noise)
    return result


def noise_blocks(
    seed: torch.Tensor, count: int, device: torch.device, offset: int
) -> Iterator[Tuple[slice, torch.Tensor]]:
    """16 random bits for each element, block by block: (part of the tensor, int16 from -32768 to 32767).

    Draw i of the seed serves elements 2i (its lower half) and 2i + 1.
    """
    first = offset // 2
    skip = offset - 2 * first
    for words, values in blocks(seed, (skip + count + 1) // 2, device, first):
        start, stop = 2 * words.start - skip, 2 * words.stop - skip
        bits = values.contiguous().view(torch.int16)[max(0, -start) : min(stop, count) - start]
        yield slice(max(0, start), min(stop, count)), bits


def _to_bfloat16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """bfloat16 is float32's upper half: random lower bits carry into it with the right probability."""
    lower = noise.to(torch.int32).add_(0x8000)
    bits = lower.add_(x.view(torch.int32)).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    if x.sum().isnan():  # some element may be NaN, whose payload must not carry into the sign
        return torch.where(x.isnan(), x.to(torch.bfloat16), bits)
    return bits


def _to_float16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """float16 lacks float32's lower 13 bits; below 2**-14 it holds the multiples of 2**-24."""
    lower = noise.to(torch.int32).bitwise_and_(0x1FFF)
    small = torch.floor(x * 2.0**24 + lower * 2.0**-13) * 2.0**-24
    normal = lower.add_(x.view(torch.int32)).bitwise_and_(-0x2000).view(torch.float32)
    normal = torch.where(x.isnan(), x, normal)
    return torch.where(x.abs() < 2.0**-14, small, normal).to(torch.float16)


class Updates:
    """Where in-place updates of 16-bit tensors get the seeds of their rounding; without, they round to nearest."""

    next_seed: Optional[Callable[[], torch.Tensor]] = None
    offset: int = 0
    """Index of an updated tensor's first element in the tensor that the seed is for; for a shard not zero."""

    @classmethod
    @contextmanager
    def rounded_stochastically(cls, next_seed: Callable[[], torch.Tensor], offset: int = 0) -> Iterator[None]:
        """Inside, every update of a 16-bit tensor draws ``next_seed()``, uint32 [2], and rounds stochastically.

        The same program in the same order draws the same seeds: call it once for each run, with a counter for updates.
        """
        before = cls.next_seed, cls.offset
        cls.next_seed, cls.offset = next_seed, offset
        try:
            yield
        finally:
            cls.next_seed, cls.offset = before


def update_seed(t: torch.Tensor) -> Optional[torch.Tensor]:
    """The seed with which an update of ``t`` rounds; None: to nearest."""
    return Updates.next_seed() if t.dtype in NARROW and Updates.next_seed is not None else None


def update(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write an update's result into ``t``, rounded to its type, and return ``t``."""
    if t.dtype in NARROW and value.dtype == torch.float32:
        return update_part(t, value, update_seed(t), 0)
    return t.copy_(value)


def update_part(t: torch.Tensor, value: torch.Tensor, seed: Optional[torch.Tensor], start: int) -> torch.Tensor:
    """As `update` for a part of a tensor whose first element has index ``start`` in it, with the whole one's seed."""
    return t.copy_(round_to(t.dtype, value, seed, Updates.offset + start))


def widened(t: torch.Tensor) -> torch.Tensor:
    """16-bit floating point as float32, everything else as it is."""
    return t.to(torch.float32) if t.dtype in NARROW else t

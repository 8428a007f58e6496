"""The one place where a wide result becomes a 16-bit weight: rounded to nearest, or
stochastically.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from popxl_engine.kernels import compiled, generator
from popxl_engine.kernels.generator import draws, key_here

TORCH_HALF_DTYPES = (torch.float16, torch.bfloat16)
"""Types that are computed in float32 and rounded once."""


PERIOD = 1 << 16
"""Elements after which `Noise` uses its draws again, each time shifted by another draw."""


class Noise:
    """16 random bits for each element of a tensor, int16 from -32768 to 32767: a function of seed
    and index alone.

    Element i gets 16 bits of draw (i mod PERIOD) div 2 (the lower half for even i), plus the lower
    16 bits of draw PERIOD / 2 + i div PERIOD, modulo 2**16. Each element's bits are uniform and new
    with every seed, which is what rounding without bias needs, and a large tensor costs one period
    of draws. (The shift is Cranley and Patterson's rotation, 1976, SIAM J. Numer. Anal. 13.)

    Args:
        seed: uint32 [2], on the host or on the device where the bits are needed.
        length: elements from index 0 on that bits may be asked for.
        start: index in that tensor of the first element of the one that is updated; for a shard not
            zero.
        device: where the bits are needed; None: where the seed is.
    """

    def __init__(
        self,
        seed: torch.Tensor,
        length: int,
        start: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._given, self._length, self.start = seed, length, start
        self._device = seed.device if device is None else device

    @cached_property
    def _seed(self) -> torch.Tensor:
        """The seed on the device, for which nobody waits."""
        return self._given.to(self._device, non_blocking=True)

    @cached_property
    def _base(self) -> torch.Tensor:
        """A period's draws."""
        return draws(self._seed, (min(self._length, PERIOD) + 1) // 2).view(torch.int16)

    @property
    def key(self) -> int:
        """The generator's key, for a library that draws by itself; the seed is on the host."""
        return key_here(self._given)

    @property
    def key_there(self) -> torch.Tensor:
        """The generator's key on the device: int64 scalar."""
        if not self._given.is_cpu:
            return generator.key(self._seed)
        return torch.tensor(self.key, device="cpu").to(self._device, non_blocking=True)

    def parts(self, count: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What bits of elements offset .. offset + count - 1 are sums of: a period's, and each
        period's shift.

        int16 [min(length, PERIOD)], and int16 for every period from that of element ``offset`` on.
        """
        first, end = offset // PERIOD, offset + count
        shifts = draws(self._seed, -(-end // PERIOD) - first, PERIOD // 2 + first).to(torch.int16)
        return self._base, shifts

    def blocks(self, count: int, offset: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Bits of elements offset .. offset + count - 1, period by period: (part of these, its
        bits).
        """
        base, shifts = self.parts(count, offset)
        first, end = offset // PERIOD, offset + count
        for shift, start in zip(shifts, range(first * PERIOD, end, PERIOD)):
            low, high = max(offset, start), min(end, start + PERIOD)
            yield slice(low - offset, high - offset), base[low - start : high - start] + shift

    def bits(self, count: int, offset: int) -> torch.Tensor:
        """Bits of elements offset .. offset + count - 1 at once, for a device that likes few large
        steps.
        """
        base, shifts = self.parts(count, offset)
        begin = offset % PERIOD
        return (shifts[:, None] + base).view(-1)[begin : begin + count]


def round_to(
    dtype: torch.dtype,
    x: torch.Tensor,
    noise: None | torch.Tensor | Noise = None,
    offset: int = 0,
) -> torch.Tensor:
    """Round float32 to a 16-bit type: to nearest, or with noise stochastically.

    Stochastic rounding moves x to one of its two neighbours, with a probability in proportion to
    the distance from the other: the expected result is x. Numbers that the type holds stay as they
    are, so do infinities and NaN.

    Args:
        noise: a seed, uint32 [2] on x's device, or its `Noise`. Other types than float32 to 16 bits
            are rounded to nearest all the same.
        offset: index of x's first element in the tensor that the noise is for; for a shard not
            zero.
    """
    if noise is None or dtype not in TORCH_HALF_DTYPES or x.dtype != torch.float32:
        return x.to(dtype)
    if isinstance(noise, torch.Tensor):
        noise = Noise(noise, offset + x.numel())
    round_part = _rounding(dtype)
    if _rounded_at_once.is_for(x):
        is_done, result = _rounded_at_once.attempt(x.reshape(-1), dtype, noise.key_there, offset)
        if is_done:
            at_once: torch.Tensor = result.view(x.shape)
            return at_once
    if x.is_cuda:
        return round_part(x.reshape(-1), noise.bits(x.numel(), offset)).view(x.shape)
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    flat, source = result.view(-1), x.reshape(-1)
    for part, bits in noise.blocks(source.numel(), offset):
        flat[part] = round_part(source[part], bits)
    return result


def _rounding(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """How float32 becomes a 16-bit type with 16 random bits for each element."""
    return _to_bfloat16 if dtype == torch.bfloat16 else _to_float16


@compiled.one_pass
def _rounded_at_once(
    x: torch.Tensor, dtype: torch.dtype, key: torch.Tensor, offset: int
) -> torch.Tensor:
    """`rounded_at` of a flat tensor whose first element has an index in what the key is for."""
    places = torch.arange(x.numel(), dtype=torch.int64, device=x.device) + offset
    return rounded_at(dtype, x, key, places)


def rounded_at(
    dtype: torch.dtype, x: torch.Tensor, key: torch.Tensor | None, places: torch.Tensor
) -> torch.Tensor:
    """`round_to` as one expression, for compilers: what x is rounded to, float32 [n], with the
    `Noise` of a key, int64 scalar, for elements of indices int64 [n].
    """
    if key is None or dtype not in TORCH_HALF_DTYPES:
        return x.to(dtype)
    return _rounding(dtype)(x, bits_at(key, places))


def bits_at(key: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`Noise`'s bits of elements of some indices, as one expression: int16."""
    within, periods = places % PERIOD, places // PERIOD
    words = generator.words_of(within >> 2, key)  # of four times 16 bits
    base = (words >> ((within & 3) << 4)) & 0xFFFF
    drawn = PERIOD // 2 + periods
    words = generator.words_of(drawn >> 1, key)  # of twice 32 bits
    shift = (words >> ((drawn & 1) << 5)) & 0xFFFF
    sums = (base + shift) & 0xFFFF
    return (sums - ((sums & 0x8000) << 1)).to(torch.int16)


def _to_bfloat16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """bfloat16 is float32's upper half: random lower bits carry into it with the right
    probability.
    """
    lower = noise.to(torch.int32).add_(0x8000)
    bits = (
        lower.add_(x.view(torch.int32))
        .bitwise_right_shift_(16)
        .to(torch.int16)
        .view(torch.bfloat16)
    )
    # some element may be NaN, whose payload must not carry into the sign; compilers know no values
    if x.is_cuda or torch.compiler.is_compiling() or x.sum().isnan():
        return torch.where(x.isnan(), x.to(torch.bfloat16), bits)
    return bits


def _to_float16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """float16 lacks float32's lower 13 bits; below 2**-14 it holds the multiples of 2**-24."""
    lower = noise.to(torch.int32).bitwise_and_(0x1FFF)
    small = torch.floor(x * 2.0**24 + lower * 2.0**-13) * 2.0**-24
    normal = lower.add_(x.view(torch.int32)).bitwise_and_(-0x2000).view(torch.float32)
    normal = torch.where(x.isnan(), x, normal)
    is_small = (x.abs() < 2.0**-14) & (x != 0)  # of zeros the sum of bits keeps the sign
    return torch.where(is_small, small, normal).to(torch.float16)


class _Updates(threading.local):
    """The source from which in-place updates of 16-bit tensors get the seeds of their rounding;
    without, they round to nearest. Each thread has its own, as programs in threads run at once.
    """

    next_seed: Callable[[], tuple[torch.Tensor, int]] | None = None
    """A function that is called once for each tensor that is updated: a seed, on any device, and
    the index of the tensor's first element in the whole.
    """

    @contextmanager
    def rounded_stochastically(
        self, next_seed: Callable[[], torch.Tensor], start: int = 0
    ) -> Iterator[None]:
        """A block in which every update of a 16-bit tensor draws ``next_seed()``, uint32 [2], and
        rounds stochastically.

        The same program in the same order draws the same seeds: call it once for each run, with a
            counter for updates.

        Args:
            start: index of an updated tensor's first element in the tensor that the seed is for;
                for a shard not zero.
        """
        with self.drawing(lambda: (next_seed(), start)):
            yield

    @contextmanager
    def drawing(self, next_seed: Callable[[], tuple[torch.Tensor, int]]) -> Iterator[None]:
        """The same as `rounded_stochastically`, where each update has a start of its own."""
        before, self.next_seed = self.next_seed, next_seed
        try:
            yield
        finally:
            self.next_seed = before


Updates = _Updates()


def update_noise(t: torch.Tensor) -> Noise | None:
    """The noise with which an update of ``t`` rounds; None: to nearest."""
    return drawn_noise(t)[0] if t.dtype in TORCH_HALF_DTYPES else None


def drawn_noise(t: torch.Tensor, streams: int = 1) -> list[Noise | None]:
    """What an update of ``t`` draws: noises that differ, from one seed, for itself and for what
    changes with it; None for each where it rounds to nearest.
    """
    if Updates.next_seed is None:
        return [None] * streams
    seed, start = Updates.next_seed()
    seeds = (_child(seed, n) for n in range(streams))
    return [Noise(child, start + t.numel(), start, t.device) for child in seeds]


def _child(seed: torch.Tensor, n: int) -> torch.Tensor:
    """The seed with ``n`` added to its lower word; child 0 is the seed itself."""
    if n == 0:
        return seed
    high, low = seed.to(torch.int64).unbind()
    return torch.stack((high, (low + n) & 0xFFFFFFFF)).to(torch.uint32)


def update(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Write an update's result into ``t``, rounded to its type, and return ``t``."""
    if t.dtype in TORCH_HALF_DTYPES and value.dtype == torch.float32:
        return update_part(t, value, update_noise(t), 0)
    return t.copy_(value)


def update_part(
    t: torch.Tensor,
    value: torch.Tensor,
    noise: Noise | None,
    start: int,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `update` for a part of a tensor whose first element has index ``start`` in it,
    with its noise.

    Where a condition, a bool scalar, is false, nothing changes.
    """
    rounded = round_to(t.dtype, value, noise, start if noise is None else noise.start + start)
    return t.copy_(rounded) if condition is None else torch.where(condition, rounded, t, out=t)


def as_float32(t: torch.Tensor) -> torch.Tensor:
    """16-bit floating point as float32, everything else as it is."""
    return t.to(torch.float32) if t.dtype in TORCH_HALF_DTYPES else t

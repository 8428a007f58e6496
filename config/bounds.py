"""What a setting's type says of it: `layers: Annotated[int, Range(low=1)]`. Types that are used
several times have names.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from popxl_gpt.utils.texts import IsPath


def as_computed(value: float) -> float:
    """A number as programs compute with it, which is as float32; whole numbers as they are."""
    if not isinstance(value, float):
        return value
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


@dataclass(frozen=True)
class Range:
    """Numbers within limits, and zero where that has a meaning of its own."""

    low: float = -math.inf
    """The smallest one."""
    above: float = -math.inf
    """What all of them are more than, as programs compute with them."""
    below: float = math.inf
    """What all of them are less than, as programs compute with them."""
    high: float = math.inf
    """The largest one."""
    or_zero: bool = False

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return (self.or_zero and value == 0) or (
            self.low <= value <= self.high and self.above < as_computed(value) < self.below
        )

    def __str__(self) -> str:
        words = ("at least", self.low), ("more than", self.above), ("below", self.below)
        told = " and ".join(
            f"{word} {limit if isinstance(limit, int) else f'{limit:g}'}"
            for word, limit in (*words, ("at most", self.high))
            if math.isfinite(limit)
        )
        return f"0, or {told}" if self.or_zero else told


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Bytes:
    """Amounts of memory from one byte on; as text they may have a unit: `24GiB`, `1.5 TiB`."""

    or_share: bool = False
    """Whether a share of all there is will do, too, above 0 and at most 1: `0.5`, `50%`; `auto` is
    none given, then.
    """

    def admits(self, value: float) -> bool:
        """Whether the value is in range: whole numbers are bytes, others a share."""
        return 0 < value <= 1 if isinstance(value, float) else value >= 1

    def read(self, text: str) -> int | float | None:
        """The bytes or the share that a text stands for; ValueError where it is neither."""
        number = text.rstrip("BKMGTi").rstrip()
        unit = text[len(number) :].strip()
        if self.or_share and text.lower() == "auto":
            return None
        if self.or_share and text.endswith("%"):
            return float(text[:-1]) / 100
        if unit and unit in UNITS:
            return int(float(number) * UNITS[unit])
        try:
            return int(text)
        except ValueError:
            if not self.or_share:
                raise
            return float(text)

    def __str__(self) -> str:
        share = ", a share such as 0.5 or 50%, auto" if self.or_share else ""
        return f"of bytes, or with a unit (KiB, MiB, GiB, TiB){share}"


@dataclass(frozen=True)
class Largest:
    """The value that no run goes beyond: a program has objects for each layer, replica and
    iteration, tensors count in 32 bits, and steps in 63.
    """

    value: int


@dataclass(frozen=True)
class Needs:
    """Another setting, without which this one does nothing. A preset may hold it without; who gives
    a flag expects that it does something.
    """

    name: str
    flag: str
    """What gives that setting a value with which this one has an effect."""
    is_met: Callable[[Any], bool]
    """Whether a value of that setting is such."""
    effect: str = "does nothing"
    """What this one does without."""


class NoNumbers:
    """A mark of settings for which the program gives the same bits whatever they are, and of those
    that stand for another one, which decides them.
    """


Kind = TypeVar("Kind")
SameNumbers = Annotated[Kind, NoNumbers()]
Count = Annotated[int, Range(low=1)]
ObjectCount = Annotated[Count, Largest(2**16)]
TensorCount = Annotated[Count, Largest(2**31 - 1)]
CountOrZero = Annotated[int, Range(low=0)]
Positive = Annotated[float, Range(above=0)]
PositiveOrZero = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, below=1)]
TopP = Annotated[float, Range(low=1e-6, high=1)]
"""The probability that tokens to choose from have together."""
Norm = Annotated[float, Range(low=1e-30, high=1e30, or_zero=True)]
"""What float32 holds, and what it gives divided by a norm or multiplied with one."""
Scale = Annotated[float, Range(low=1e-6, high=1e12)]
"""Numbers whose squares float32 divides gradients by without losing them."""
Memory = Annotated[int, Bytes()]
MemoryOrShare = Annotated[int | float, Bytes(or_share=True)]
Seed = Annotated[int, Range(low=0, below=2**32)]
PathText = Annotated[str, IsPath()]

"""What a setting's type says of it: `layers: Annotated[int, AtLeast(1)]`. Types that are used
several times have names.
"""

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
class AtLeast:
    """Values from `low` on."""

    low: float

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return value >= self.low

    def __str__(self) -> str:
        return f"at least {self.low:g}"


@dataclass(frozen=True)
class MoreThan:
    """Values above `low`."""

    low: float

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return as_computed(value) > self.low

    def __str__(self) -> str:
        return f"more than {self.low:g}"


@dataclass(frozen=True)
class Between:
    """Values from `low` on, and below `high`."""

    low: float
    high: float

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return self.low <= value and as_computed(value) < self.high

    def __str__(self) -> str:
        low, high = (
            int(limit) if limit == int(limit) else limit for limit in (self.low, self.high)
        )
        return f"at least {low} and below {high}"


@dataclass(frozen=True)
class Within:
    """Values from `low` to `high`, and zero where that has a meaning of its own."""

    low: float
    high: float
    or_zero: bool = False

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return self.low <= value <= self.high or (self.or_zero and value == 0)

    def __str__(self) -> str:
        return f"{'0, or ' if self.or_zero else ''}at least {self.low:g} and at most {self.high:g}"


UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Bytes:
    """Amounts of memory from one byte on; as text they may have a unit: `24GiB`, `1.5 TiB`."""

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return value >= 1

    def read(self, text: str) -> int | float | None:
        """The bytes that a text stands for; ValueError where it is none."""
        number = text.rstrip("BKMGTi").rstrip()
        unit = text[len(number) :].strip()
        if unit not in UNITS:
            raise ValueError(f"no unit of memory: {unit}")
        return int(number) if unit == "" else int(float(number) * UNITS[unit])

    def __str__(self) -> str:
        return "of bytes, or with a unit (KiB, MiB, GiB, TiB)"


@dataclass(frozen=True)
class BytesOrShare(Bytes):
    """Amounts of memory, or a share of all there is, above 0 and at most 1: `0.5`, `50%`; `auto` is
    none given.
    """

    def admits(self, value: float) -> bool:
        """Whether the value is in range: whole numbers are bytes, others a share."""
        return 0 < value <= 1 if isinstance(value, float) else super().admits(value)

    def read(self, text: str) -> int | float | None:
        """The bytes or the share that a text stands for; ValueError where it is neither."""
        if text.lower() == "auto":
            return None
        if text.endswith("%"):
            return float(text[:-1]) / 100
        try:
            return super().read(text)
        except ValueError:
            return float(text)

    def __str__(self) -> str:
        return f"{super().__str__()}, a share such as 0.5 or 50%, auto"


Bound = AtLeast | MoreThan | Between | Within | Bytes


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


class NoNumbers:
    """A mark of settings for which the program gives the same bits whatever they are."""


Kind = TypeVar("Kind")
SameNumbers = Annotated[Kind, NoNumbers()]
Count = Annotated[int, AtLeast(1)]
ObjectCount = Annotated[Count, Largest(2**16)]
TensorCount = Annotated[Count, Largest(2**31 - 1)]
CountOrZero = Annotated[int, AtLeast(0)]
Positive = Annotated[float, MoreThan(0.0)]
PositiveOrZero = Annotated[float, AtLeast(0.0)]
Fraction = Annotated[float, Between(0.0, 1.0)]
TopP = Annotated[float, Within(1e-6, 1.0)]
"""The probability that tokens to choose from have together."""
Norm = Annotated[float, Within(1e-30, 1e30, or_zero=True)]
"""What float32 holds, and what it gives divided by a norm or multiplied with one."""
Scale = Annotated[float, Within(1e-6, 1e12)]
"""Numbers whose squares float32 divides gradients by without losing them."""
Memory = Annotated[int, Bytes()]
MemoryOrShare = Annotated[int | float, BytesOrShare()]
Seed = Annotated[int, Between(0, 2**32)]
PathText = Annotated[str, IsPath()]

"""Ranges of numbers, written into a field's type: `layers: Annotated[int, AtLeast(1)]`."""

from dataclasses import dataclass


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
        return value > self.low

    def __str__(self) -> str:
        return f"more than {self.low:g}"


@dataclass(frozen=True)
class Between:
    """Values from `low` on, and below `high`."""

    low: float
    high: float

    def admits(self, value: float) -> bool:
        """Whether the value is in range."""
        return self.low <= value < self.high

    def __str__(self) -> str:
        low, high = (int(limit) if limit == int(limit) else limit for limit in (self.low, self.high))
        return f"at least {low} and below {high}"


Bound = AtLeast | MoreThan | Between

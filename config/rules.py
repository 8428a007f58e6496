"""Rules on combinations of settings, which stand beside the settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import getfullargspec
from math import isqrt
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What makes a combination of settings one that cannot run."""

    settings: tuple[str, ...]
    """Names of those that the problem is about; when one of them is wrong by itself, the rule says
    nothing new.
    """
    find: Callable[..., Any]
    """The problem in words, from the values of the settings; nothing where there is none."""
    beside: tuple[str, ...] = ()
    """Names of others that it looks at."""

    def problem(self, values: Mapping[str, Any]) -> str | None:
        """The problem of the values of all settings; None where there is none."""
        beside = {name: values[name] for name in self.beside}
        return self.find(*(values[name] for name in self.settings), **beside) or None


def rule(find: Callable[..., Any]) -> Rule:
    """A rule from a function whose parameters are the settings: those before `*` have the problem,
    those after it are looked at. It returns the problem, or what is false: `condition and words`.
    """
    beside = getfullargspec(find).kwonlyargs
    return Rule(tuple(getfullargspec(find).args), find, tuple(beside))


def multiple_of(name: str, by: str) -> Rule:
    """A rule that a setting is a multiple of another one, where it has none or both have values."""
    return Rule((name, by), lambda value, divisor: remainder(name, value, by, divisor))


def remainder(name: str, value: int | None, by: str, divisor: int | None) -> str | None:
    """The problem of a value that is no multiple of another one."""
    if value is None or divisor is None or value % divisor == 0:
        return None
    # a model is given more often than its layout
    advice = (
        f"Use {by} = {largest_divisor(value, divisor)}, or change {name}."
        if by.startswith("tensor_parallel")
        else f"Use {multiples(value, divisor)}, or change {by}."
    )
    return f"{name}: got {value}; expected a multiple of {by} = {divisor}. {advice}"


def multiples(value: int, divisor: int) -> str:
    """The positive multiples next to a value."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)


def largest_divisor(value: int, most: int) -> int:
    """The largest divisor of a value that is at most another."""
    lower = [number for number in range(1, isqrt(value) + 1) if value % number == 0]
    return max(number for low in lower for number in (low, value // low) if number <= most)

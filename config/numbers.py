"""How numbers are written, in files and on the command line."""

import re
from collections.abc import Callable

_DIGITS = "[0-9]+(?:_[0-9]+)*"
INTEGER = re.compile(f"[-+]?{_DIGITS}")
"""Whole numbers in tens, whatever the first digit; `_` may stand between digits."""
_FRACTION = rf"\.(?:{_DIGITS})?"
"""Only after a point: digits that two parts of a pattern may share are tried at every split."""
FLOAT = re.compile(rf"[-+]?(?:{_DIGITS}(?:{_FRACTION})?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?")


def integer(text: str) -> int:
    """The whole number that a text is; ValueError where it is none."""
    if not INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def real(text: str) -> float:
    """The number that a text is; ValueError where it is none."""
    if not FLOAT.fullmatch(text):
        raise ValueError(text)
    return float(text)


KINDS: "dict[type, Callable[[str], int | float | None]]" = {int: integer, float: real}
"""How a number of each type is read."""

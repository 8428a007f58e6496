"""Printing while a program runs, filtered by the environment variable MODEL_LOG_LEVEL."""

import os
from typing import Any, Literal

import popxl
from popxl import Tensor, ops

LEVELS = ("TRACE", "DEBUG", "INFO", "WARN")
LEVELS_TYPE = Literal["TRACE", "DEBUG", "INFO", "WARN"]


def _is_shown(level: str) -> bool:
    threshold = os.environ.get("MODEL_LOG_LEVEL", "INFO")
    for value in (threshold, level):
        if value not in LEVELS:
            raise ValueError(
                f"MODEL_LOG_LEVEL: got {value!r}; expected one of {', '.join(LEVELS)}."
            )
    return LEVELS.index(threshold) <= LEVELS.index(level)


def print_tensor(t: Tensor, *args: Any, level: LEVELS_TYPE = "DEBUG", **kwargs: Any) -> Tensor:
    """`ops.print_tensor` when $MODEL_LOG_LEVEL (default INFO) is at or below ``level``; otherwise
    ``t`` itself.
    """
    return ops.print_tensor(t, *args, **kwargs) if _is_shown(level) else t


def print_text(text: str, num: Tensor | None = None, level: LEVELS_TYPE = "DEBUG") -> None:
    """Print a text, and a number if given, when executed; under the same rule as `print_tensor`."""
    if _is_shown(level):
        ops.print_tensor(popxl.constant(0, popxl.int32) if num is None else num, title=text)

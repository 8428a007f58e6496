"""The current graph and Ir, and blocks that say how what is built inside is named, ordered and
placed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any, Literal, cast

from popxl.placement import NO_IPU
from popxl.program import Graph, Ir
from popxl.tracing import CONTEXT, Context, ExecutionContext, Hooks, SequenceBlock

__all__ = [
    "Context",
    "ExecutionContext",
    "Hooks",
    "SequenceBlock",
    "debug_context_frame_offset",
    "from_source",
    "gcg",
    "get_current_context",
    "get_current_graph",
    "get_ir",
    "get_main_graph",
    "get_source_location",
    "gir",
    "gmg",
    "in_sequence",
    "io_tiles",
    "ipu",
    "name_scope",
    "op_debug_context",
]


def get_current_context() -> Context:
    """The process-wide `Context`."""
    return CONTEXT


def get_current_graph() -> Graph:
    """Innermost graph entered. RuntimeError when there is none. Alias ``gcg``."""
    return cast(Graph, CONTEXT.graph)


def get_main_graph() -> Graph:
    """Main graph of the current Ir. RuntimeError when there is none. Alias ``gmg``."""
    return get_current_graph().main_graph


def get_ir() -> Ir:
    """Current Ir. RuntimeError when there is none. Alias ``gir``."""
    return get_current_graph().ir


gcg, gmg, gir = get_current_graph, get_main_graph, get_ir


@contextmanager
def ipu(ipu: int | None) -> Iterator[int | None]:
    """Ops built inside carry this virtual device, or with None have none. Placement only."""
    CONTEXT._ipus.append(NO_IPU if ipu is None else ipu)
    try:
        yield ipu
    finally:
        CONTEXT._ipus.pop()


@contextmanager
def io_tiles() -> Iterator[None]:
    """Ops built inside are marked as placed on IO tiles. Placement only."""
    CONTEXT._io_tiles += 1
    try:
        yield
    finally:
        CONTEXT._io_tiles -= 1


class in_sequence(ContextDecorator):  # noqa: N801 - PopXL's name
    """Order of the ops built inside: True for creation order, False for any, "pass" for no
    constraint.

    A block with False inside one with True is one of its steps. Ops run in creation order in any
    case; the order that is asked for decides whether writes in place are ambiguous, see
    `popxl.transforms.ambiguity`. Also a decorator.
    """

    def __init__(self, mode: bool | Literal["pass"] = True) -> None:
        if mode is None or mode not in (True, False, "pass"):
            raise TypeError(f"in_sequence: got mode {mode!r}; expected True, False or 'pass'.")
        self._mode = mode

    def _recreate_cm(self) -> "in_sequence":
        return self

    def __enter__(self) -> None:
        CONTEXT._push_sequence(self._mode)

    def __exit__(self, *exc: Any) -> None:
        CONTEXT._in_sequence.pop()


@contextmanager
def _execution_context(context: ExecutionContext) -> Iterator[None]:
    """Ops of the main graph built inside run while weights travel between host and device, not with
    the program.

    NotImplementedError for other contexts than Normal, WeightsFromHostFragment and
    WeightsToHostFragment. What may be built inside is checked when a Session is made: see
    `popxl.transforms.fragments`.
    """
    fragments = (ExecutionContext.WeightsFromHostFragment, ExecutionContext.WeightsToHostFragment)
    if context not in (ExecutionContext.Normal, *fragments):
        raise NotImplementedError(
            f"_execution_context: got {context}; expected Normal, WeightsFromHostFragment or "
            "WeightsToHostFragment."
        )
    CONTEXT._executions.append(context)
    try:
        yield
    finally:
        CONTEXT._executions.pop()


@contextmanager
def from_source(source: tuple[str, int]) -> Iterator[None]:
    """Ops made inside are of this (file, line)."""
    before, CONTEXT.source = CONTEXT.source, source
    try:
        yield
    finally:
        CONTEXT.source = before


@contextmanager
def name_scope(name: str) -> Iterator[list[str]]:
    """Put ``name/`` in front of the names of tensors and ops made inside."""
    CONTEXT.push_name_scope(name)
    try:
        yield CONTEXT.name_scopes
    finally:
        CONTEXT.pop_name_scope()


class debug_context_frame_offset(ContextDecorator):  # noqa: N801 - PopXL's name
    """Accepted for PopXL programs; source lines are found without it."""

    def __init__(self, i: int) -> None:
        self._offset = i

    def __enter__(self) -> int:
        return self._offset

    def __exit__(self, *exc: Any) -> None:
        return None


def op_debug_context(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """Decorator, bare or with a name, for functions that make ops; the debug name changes nothing
    here.
    """
    if callable(name):
        return name
    return lambda fn: fn


def get_source_location(offset: int) -> tuple[str, int]:
    """(file, line) of the frame ``offset`` above the caller. IndexError if the stack is not that
    deep.
    """
    try:
        frame = sys._getframe(offset + 1)
    except ValueError:
        raise IndexError(
            f"get_source_location: got offset {offset}; expected less than the depth of the stack."
        ) from None
    return frame.f_code.co_filename, frame.f_lineno

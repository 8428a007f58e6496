"""What is being built: the stack of graphs, name scopes, placement hints, sequence mode. One per
process.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir

Hook = Callable[[Any], Any]


class ExecutionContext(Enum):
    """When an op runs: with the program, or while weights travel between host and device."""

    Normal = 0
    WeightsFromHostFragment = 1
    WeightsToHostFragment = 2
    OptimizerFromHostFragment = 3
    Subgraph = 4


@dataclass(frozen=True, eq=False)
class SequenceBlock:
    """A block of `in_sequence`, as far as it orders ops. In each graph its ops are ordered as they
    are listed there.
    """

    is_ordered: bool
    """Whether its ops run one after another; else they are, together, one step of the block around
    it.
    """
    around: "SequenceBlock | None" = None


class Hooks:
    """Functions to call with each new op, by handle."""

    def __init__(self) -> None:
        self._functions: dict[int, Hook] = {}
        self._next = 0

    def register(self, fn: Hook) -> int:
        """Add a function; returns its handle."""
        self._next += 1
        self._functions[self._next] = fn
        return self._next

    def remove(self, handle: int) -> None:
        """Remove by handle. ValueError if unknown."""
        if handle not in self._functions:
            raise ValueError(
                f"remove_op_created_hook: got handle {handle}; expected one of "
                f"{list(self._functions)}."
            )
        del self._functions[handle]

    def __call__(self, op: Any) -> None:
        """Call every function with the new op."""
        for fn in list(self._functions.values()):
            fn(op)


class Context:
    """Tracing state. Placement (virtual device, IO tiles) and sequences are kept and never change
    results.
    """

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._scopes: list[list[str]] = []
        self._ipus: list[int] = []
        self._io_tiles = 0
        self._in_sequence: list[tuple[bool | str, SequenceBlock | None]] = []
        self._executions: list[ExecutionContext] = []
        self.source: tuple[str, int] | None = None
        """(file, line) of the ops that are built now, where a transform makes them of others; None:
        of the caller.
        """
        self.refusal: Exception | None = None
        """Why the op that is being added cannot be executed, if so."""
        self._hooks = Hooks()

    @property
    def execution(self) -> ExecutionContext:
        """When the ops that are built now will run."""
        return self._executions[-1] if self._executions else ExecutionContext.Normal

    @property
    def ipu_id(self) -> int | None:
        """Current virtual device, None when none was chosen."""
        return self._ipus[-1] if self._ipus else None

    @property
    def io_tile_set(self) -> bool:
        """Whether io_tiles is active."""
        return self._io_tiles > 0

    @property
    def in_sequence(self) -> bool | str | None:
        """Current mode: True, False, "pass" or None."""
        return self._in_sequence[-1][0] if self._in_sequence else None

    @property
    def sequence_block(self) -> SequenceBlock | None:
        """The block that orders the ops that are built now, None if none does."""
        return self._in_sequence[-1][1] if self._in_sequence else None

    def _push_sequence(self, mode: bool | str) -> None:
        """Open a block of `in_sequence`. One of the mode of the block around it goes on with that
        one's order.
        """
        block = self.sequence_block
        if mode == "pass" or block is None and not mode:
            block = None
        elif block is None or block.is_ordered != mode:
            block = SequenceBlock(bool(mode), block)
        self._in_sequence.append((mode, block))

    @property
    def graph(self) -> "Graph":
        """Innermost graph entered. RuntimeError when there is none."""
        if not self._graphs:
            raise RuntimeError(
                "get_current_graph: got a call outside any graph; expected to be inside `with "
                "ir.main_graph:` or a function that create_graph traces."
            )
        return self._graphs[-1]

    @property
    def main_graph(self) -> "Graph":
        """Main graph of the current Ir."""
        return self.graph.main_graph

    @property
    def ir(self) -> "Ir":
        """Ir of the current graph."""
        return self.graph.ir

    @property
    def name_scopes(self) -> list[str]:
        """Copy of the active name scopes of the current graph."""
        return list(self._scopes[-1]) if self._scopes else []

    def push_name_scope(self, name: str) -> None:
        """Open a name scope in the current graph."""
        if not self._scopes:
            self._scopes.append([])
        self._scopes[-1].append(name)

    def pop_name_scope(self) -> str:
        """Close the innermost name scope and return it."""
        return self._scopes[-1].pop()

    def push_graph(self, g: "Graph") -> None:
        """Make a graph current. RuntimeError if it belongs to another Ir than the graphs already
        entered.
        """
        if self._graphs and self._graphs[-1].ir is not g.ir:
            raise RuntimeError(
                f"graph: got a graph of Ir {g.ir.id} inside a graph of Ir "
                f"{self._graphs[-1].ir.id}; expected graphs of one Ir. Leave the other `with "
                "graph:` block first."
            )
        self._graphs.append(g)
        self._scopes.append([])

    def pop_graph(self) -> "Graph":
        """Leave the innermost graph."""
        self._scopes.pop()
        return self._graphs.pop()

    def register_op_created_hook(self, fn: Hook) -> int:
        """Call ``fn(op)`` after every op is made; returns a handle."""
        return self._hooks.register(fn)

    def remove_op_created_hook(self, handle: int) -> None:
        """Undo a registration. ValueError for an unknown handle."""
        self._hooks.remove(handle)


_CONTEXT = Context()


def get_current_context() -> Context:
    """The process-wide `Context`."""
    return _CONTEXT


def get_current_graph() -> "Graph":
    """Innermost graph entered. RuntimeError when there is none. Alias ``gcg``."""
    return _CONTEXT.graph


def get_main_graph() -> "Graph":
    """Main graph of the current Ir. RuntimeError when there is none. Alias ``gmg``."""
    return _CONTEXT.main_graph


def get_ir() -> "Ir":
    """Current Ir. RuntimeError when there is none. Alias ``gir``."""
    return _CONTEXT.ir


gcg, gmg, gir = get_current_graph, get_main_graph, get_ir


@contextmanager
def ipu(ipu: int) -> Iterator[int]:
    """Ops built inside carry this virtual device. Placement only."""
    _CONTEXT._ipus.append(ipu)
    try:
        yield ipu
    finally:
        _CONTEXT._ipus.pop()


@contextmanager
def io_tiles() -> Iterator[None]:
    """Ops built inside are marked as placed on IO tiles. Placement only."""
    _CONTEXT._io_tiles += 1
    try:
        yield
    finally:
        _CONTEXT._io_tiles -= 1


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
        _CONTEXT._push_sequence(self._mode)

    def __exit__(self, *exc: Any) -> None:
        _CONTEXT._in_sequence.pop()


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
    _CONTEXT._executions.append(context)
    try:
        yield
    finally:
        _CONTEXT._executions.pop()


@contextmanager
def from_source(source: tuple[str, int]) -> Iterator[None]:
    """Ops made inside are of this (file, line)."""
    before, _CONTEXT.source = _CONTEXT.source, source
    try:
        yield
    finally:
        _CONTEXT.source = before


@contextmanager
def name_scope(name: str) -> Iterator[list[str]]:
    """Put ``name/`` in front of the names of tensors and ops made inside."""
    _CONTEXT.push_name_scope(name)
    try:
        yield _CONTEXT.name_scopes
    finally:
        _CONTEXT.pop_name_scope()


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

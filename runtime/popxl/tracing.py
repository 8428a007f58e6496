"""What is being traced: the stack of graphs, name scopes, placement hints, sequence mode. One per
process.

Graphs and programs are known here by what tracing asks of them. `popxl.context` has the functions
that programs call, which say what they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from popxl.placement import NO_IPU
from popxl.spec import TensorSpec

Hook = Callable[[Any], Any]


class TracedProgram(Protocol):
    """An `Ir`, as far as it is needed while a graph of it is traced."""

    @property
    def id(self) -> int:
        """Its number in this process."""

    def _check_open(self, what: str) -> None: ...

    def _register_buffer(self, buffer: Any) -> int: ...


class TracedGraph(Protocol):
    """A `Graph`, as far as it is needed while it is traced."""

    @property
    def ir(self) -> TracedProgram:
        """Owning program."""

    @property
    def main_graph(self) -> "TracedGraph":
        """Main graph of the program."""

    def _new_tensor(self, spec: TensorSpec, name: str, *, scoped: bool = ...) -> Any: ...


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
        self._graphs: list[TracedGraph] = []
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
        return None if self.ipu_of_ops == NO_IPU else self.ipu_of_ops

    @property
    def ipu_of_ops(self) -> int | None:
        """What ops that are built now carry: `ipu_id`, or `NO_IPU` inside ``popxl.ipu(None)``."""
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
    def graph(self) -> TracedGraph:
        """Innermost graph entered. RuntimeError when there is none."""
        if not self._graphs:
            raise RuntimeError(
                "get_current_graph: got a call outside any graph; expected to be inside `with "
                "ir.main_graph:` or a function that create_graph traces."
            )
        return self._graphs[-1]

    @property
    def main_graph(self) -> TracedGraph:
        """Main graph of the current Ir."""
        return self.graph.main_graph

    @property
    def ir(self) -> TracedProgram:
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

    def push_graph(self, g: TracedGraph) -> None:
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

    def pop_graph(self) -> TracedGraph:
        """Leave the innermost graph."""
        self._scopes.pop()
        return self._graphs.pop()

    def register_op_created_hook(self, fn: Hook) -> int:
        """Call ``fn(op)`` after every op is made; returns a handle."""
        return self._hooks.register(fn)

    def remove_op_created_hook(self, handle: int) -> None:
        """Undo a registration. ValueError for an unknown handle."""
        self._hooks.remove(handle)


CONTEXT = Context()
"""The process-wide one."""

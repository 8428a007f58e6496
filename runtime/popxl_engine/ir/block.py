"""What a program is made of: values, instructions, and the blocks that hold them. None of them ever
changes: a pass makes new ones.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from popxl.dtypes import dtype
from popxl.op_records import Op, OpDefinition
from popxl.tensor import Constant, Tensor, TensorSpec

from popxl_engine.shards import Sharding

Finding = TypeVar("Finding")

NO_NAME = re.compile(r"\W", re.ASCII)
"""A character of users' names that no name in the generated source has."""


@dataclass(frozen=True, eq=False)
class Value:
    """One value in a block. ``host``: a numpy array on the host instead of a tensor on the
    device.
    """

    name: str
    spec: TensorSpec
    host: bool = False
    sharding: Sharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its spec; so with the other properties."""
        return self.spec.shape

    @property
    def dtype(self) -> dtype:
        """The element type."""
        return self.spec.dtype

    @property
    def rank(self) -> int:
        """The number of axes."""
        return self.spec.rank

    @property
    def nelms(self) -> int:
        """The number of elements."""
        return self.spec.nelms

    def __repr__(self) -> str:
        return f"%{self.name}{'@host' if self.host else ''}"


@dataclass(frozen=True)
class RngPath:
    """Which draws of the generator an instruction takes, see `machine.rng_path`."""

    numbers: tuple[int, ...] = ()
    """Positions of the calls around it, outermost first, and of the op in its graph; those that
    follow the start.
    """
    seed: Value | None = None
    """The seed of what draws in a graph with a seed: this seed, on the host, as the start; else the
    block's own path.
    """

    def inside(self, *numbers: int) -> "RngPath":
        """The path of something in what is here."""
        return RngPath((*self.numbers, *numbers), self.seed)


@dataclass(frozen=True, eq=False)
class Instr:
    """One instruction: kind "op", "copy", "call", "repeat" or "conditional"; or the "begin" or the
    "end" of a collective (`passes.overlap_collectives`).

    In the block of a single graph, before calls are inlined, all are of kind "op". An end has the
    begin's arguments, and ``begun``, which that gave.
    """

    kind: str
    arguments: Mapping[str, Any]
    outputs: tuple[Value, ...]
    definition: OpDefinition | None = None
    source: Op | None = None
    """The user's op, for messages."""
    host: bool = False
    bodies: tuple["Block", ...] = ()
    path: str = ""
    """Names of the graphs around it, as they call each other."""
    rng_path: RngPath = RngPath()
    writers: tuple[Op, ...] = ()
    """The user's op that wrote each operand of a fused op that writes several, in the order of its
    ``writes``.
    """
    rng_positions: tuple[int, ...] = ()
    """The position of each of the `writers` in its graph."""
    needs_copy: bool = False
    """The result must not share storage with the operand that it views (`passes.elide_copies`)."""
    needs_contiguous: bool = False
    """Alias forms view the results and they are written, so that they must lie in memory in order
    (`passes.elide_copies`).
    """
    must_view: bool = False
    """An alias form whose storage is written: the kernel must really return a view
    (`passes.elide_copies`).
    """

    def inputs(self) -> tuple[Value, ...]:
        """Values read, in order; the seed that it rounds from among them."""
        return self._inputs

    @cached_property
    def _inputs(self) -> tuple[Value, ...]:
        return tuple(values_in((*self.arguments.values(), self.rng_path.seed)))

    @property
    def effects(self) -> frozenset[str]:
        """The op's effects beyond its results."""
        return self.definition.effects if self.definition is not None else frozenset()

    def is_op(self, name: str) -> bool:
        """Whether it is an op of this name."""
        return self.definition is not None and self.definition.name == name

    def written(self) -> Sequence[Value]:
        """Operands whose storage this instruction changes."""
        if self.bodies:
            return [inputs[i] for body, inputs in self.calls() for i in sorted(body.written)]
        if self.definition is None:
            return ()
        if "control" in self.definition.effects:
            return self._taken_by_reference()
        return [self.arguments[p] for p in self.definition.writes]

    def _taken_by_reference(self) -> Sequence[Value]:
        """The arguments that the graphs called in the block of a single graph may write."""
        assert self.source is not None
        written = set(self.source.written)
        tensors = [t for _, inputs in self.source.called() for t in inputs]
        values = [
            v
            for name in ("inputs", "then_inputs", "else_inputs")
            for v in self.arguments.get(name, ())
        ]
        return [v for t, v in zip(tensors, values) if t in written]

    def may_write(self) -> Sequence[Value]:
        """The same as `written`, whether or not `Block.written` is known yet: all that bodies take
        by reference.
        """
        if not self.bodies:
            return self.written()
        return [inputs[i] for body, inputs in self.calls() for i in sorted(body.by_ref)]

    def calls(self) -> Sequence[tuple["Block", Sequence[Value]]]:
        """(body, its inputs here) for calls, loops and branches."""
        if self.kind == "conditional":
            names = ("then_inputs", "else_inputs")
            return [(body, self.arguments[name]) for body, name in zip(self.bodies, names)]
        return [(body, self.arguments["inputs"]) for body in self.bodies]


@dataclass(frozen=True, eq=False)
class Block:
    """A straight-line program: the main graph, the body of a loop or branch, a graph that is called
    often, or a single graph whose calls are ops.

    Several instructions may run one block.
    """

    name: str
    inputs: tuple[Value, ...] = ()
    by_ref: frozenset[int] = frozenset()
    """Indices of the inputs that it takes by reference."""
    instrs: tuple[Instr, ...] = ()
    outputs: tuple[Value, ...] = ()
    constants: Mapping[Constant, Value] = field(default_factory=lambda: MappingProxyType({}))
    state: Mapping[Tensor, Value] = field(default_factory=lambda: MappingProxyType({}))
    """Main block only: variables and device shards that it reads or writes."""
    written: frozenset[int] = frozenset()
    """Indices of by-reference inputs that the block really writes (`passes.elide_copies`)."""
    viewed: frozenset[int] = frozenset()
    """Indices of those that alias forms in it view, so that they must lie in memory in order
    (`passes.elide_copies`).
    """
    _findings: dict[Any, Any] = field(default_factory=dict, repr=False)

    def find(self, analysis: Callable[["Block"], Finding]) -> Finding:
        """What an analysis finds here. It runs once: a block never changes."""
        if analysis not in self._findings:
            self._findings[analysis] = analysis(self)
        found: Finding = self._findings[analysis]
        return found

    @property
    def bodies(self) -> tuple["Block", ...]:
        """The blocks that its instructions run, each once."""
        return self.find(_bodies)

    def with_instrs(self, instrs: Iterable[Instr], **changes: Any) -> "Block":
        """This block with other instructions; itself where nothing is other."""
        found = tuple(instrs)
        if not changes and found == self.instrs:
            return self
        return replace(self, instrs=found, _findings={}, **changes)


def blocks_of(*mains: Block) -> Iterator[Block]:
    """Blocks and all that they run, at any depth; each once, after those that it runs."""
    found: set[Block] = set()

    def visit(block: Block) -> Iterator[Block]:
        found.add(block)
        for body in block.bodies:
            if body not in found:
                yield from visit(body)
        yield block

    for main in mains:
        if main not in found:
            yield from visit(main)


def map_blocks(program: Block, rewrite: Callable[[Block], Block]) -> Block:
    """A program with every block rewritten once, after those that it runs."""
    done: dict[Block, Block] = {}

    def with_done_bodies(instr: Instr) -> Instr:
        bodies = tuple([done[body] for body in instr.bodies])
        return instr if bodies == instr.bodies else replace(instr, bodies=bodies)

    for block in blocks_of(program):
        is_same = all(done[body] is body for body in block.bodies)
        done[block] = rewrite(
            block if is_same else block.with_instrs(map(with_done_bodies, block.instrs))
        )
    return done[program]


def _bodies(block: Block) -> tuple[Block, ...]:
    return tuple(dict.fromkeys(body for instr in block.instrs for body in instr.bodies))


def values_in(arguments: Any) -> Iterator[Value]:
    """The values among arguments and their tuples, in order."""
    for a in arguments:
        if isinstance(a, Value):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from values_in(a)


def filled(argument: Any, value: Callable[[Value], Any]) -> Any:
    """An argument with something in place of each value in it."""
    if isinstance(argument, Value):
        return value(argument)
    return (
        tuple(filled(a, value) for a in argument)
        if isinstance(argument, (list, tuple))
        else argument
    )


def aliased(instr: Instr) -> list[Value]:
    """Operands whose storage an instruction's first result has by contract."""
    definition = instr.definition
    if definition is None or not (definition.alias or definition.writes):
        return []
    return list(values_in([instr.arguments[p] for p in definition.writes[:1] or definition.views]))


def may_alias_or_write(definition: OpDefinition | None) -> bool:
    """Whether an op's operands and results may share storage by contract, or it writes some."""
    return definition is not None and bool(
        definition.alias or definition.writes or "control" in definition.effects
    )

"""What a program is made of after lowering: values, instructions, and the blocks that hold them."""

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple

from popxl.opdef import Op, OpDefinition
from popxl.values import Constant, Tensor, TensorSpec

from popxl_engine.shards import Sharding


@dataclass(eq=False)
class Value:
    """One value in a block. ``host``: a numpy array on the host instead of a tensor on the
    device.
    """

    name: str
    spec: TensorSpec
    host: bool = False
    sharding: Optional[Sharding] = None

    def __repr__(self) -> str:
        return f"%{self.name}{'@host' if self.host else ''}"


@dataclass(frozen=True)
class Place:
    """Where an instruction draws, see `machine.place`."""

    numbers: Tuple[int, ...] = ()
    """Positions of the calls around it, outermost first, and of the op in its graph; those that
    follow the start.
    """
    seed: Optional[Value] = None
    """Of what draws in a graph with a seed: this seed, on the host, as the start; else the block's
    own place.
    """

    def inside(self, *numbers: int) -> "Place":
        """A place in what is here."""
        return Place((*self.numbers, *numbers), self.seed)


@dataclass(eq=False)
class Instr:
    """One instruction: kind "op", "copy", "call", "repeat" or "conditional"."""

    kind: str
    arguments: Dict[str, Any]
    outputs: List[Value]
    definition: Optional[OpDefinition] = None
    source: Optional[Op] = None
    host: bool = False
    bodies: Tuple["Block", ...] = ()
    path: str = ""
    place: Place = Place()
    positions: Tuple[int, ...] = ()
    """Where it writes several operands: of each, the position of the user's op that wrote it."""
    own: bool = False
    """After `aliasing`: the result must not share storage with the operand it views."""
    contiguous: bool = False
    """After `aliasing`: alias forms view the results and they are written, so that they must lie in
    memory in order.
    """
    shared: bool = False
    """After `aliasing`: an alias form whose storage is written, so that the kernel must really
    return a view.
    """

    def inputs(self) -> List[Value]:
        """Values read, in order; the seed that it rounds from among them."""
        found: List[Value] = []
        for argument in self.arguments.values():
            if isinstance(argument, Value):
                found.append(argument)
            elif isinstance(argument, (list, tuple)):
                found.extend(values_in(argument))
        if self.place.seed is not None:
            found.append(self.place.seed)
        return found

    @property
    def effects(self) -> FrozenSet[str]:
        """The op's effects beyond its results."""
        return self.definition.effects if self.definition is not None else frozenset()

    def is_op(self, name: str) -> bool:
        """Whether it is an op of this name."""
        return self.definition is not None and self.definition.name == name

    def written(self) -> List[Value]:
        """Operands whose storage this instruction changes."""
        if self.kind == "op":
            assert self.definition is not None
            return (
                [self.arguments[p] for p in self.definition.writes]
                if self.definition.writes
                else []
            )
        return [inputs[i] for body, inputs in self.calls() for i in sorted(body.written)]

    def lent(self) -> List[Value]:
        """Values that bodies take by reference, and may change, whether or not `Block.written` is
        known yet.
        """
        return (
            [inputs[i] for body, inputs in self.calls() for i in body.by_ref] if self.bodies else []
        )

    def calls(self) -> List[Tuple["Block", Sequence[Value]]]:
        """(body, its inputs here) for calls, loops and branches."""
        if self.kind in ("call", "repeat"):
            return [(self.bodies[0], self.arguments["inputs"])]
        if self.kind == "conditional":
            return list(
                zip(self.bodies, (self.arguments["then_inputs"], self.arguments["else_inputs"]))
            )
        return []


@dataclass(eq=False)
class Block:
    """A straight-line program: the main graph, the body of a loop or branch, or a graph that is
    called often.

    Calls of other graphs are inlined. Several instructions may run one block.
    """

    name: str
    inputs: List[Value] = field(default_factory=list)
    by_ref: Set[int] = field(default_factory=set)
    instrs: List[Instr] = field(default_factory=list)
    outputs: List[Value] = field(default_factory=list)
    constants: Dict[Constant, Value] = field(default_factory=dict)
    state: Dict[Tensor, Value] = field(default_factory=dict)
    """Main block only: variables and device shards that it reads or writes."""
    written: Set[int] = field(default_factory=set)
    """Indices of by-reference inputs that the block really writes."""


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


def sharing(instr: Instr) -> List[Value]:
    """Operands whose storage an instruction's first result has by contract."""
    definition = instr.definition
    if definition is None or not (definition.alias or definition.writes):
        return []
    return list(values_in([instr.arguments[p] for p in definition.writes[:1] or definition.views]))

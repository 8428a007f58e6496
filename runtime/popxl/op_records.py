"""What is known about ops: the record of a declared op, and one op of a graph. `opdef` declares
them and adds them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_origin

from popxl.context import get_current_context
from popxl.placement import DEFAULT_IPU, Place, TileSet
from popxl.tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from popxl.graph import Graph

Specs = TensorSpec | Sequence[TensorSpec] | None
EFFECTS = frozenset({"host", "remote", "collective", "control", "print"})


@dataclass(frozen=True)
class Cost:
    """Work of one execution on one replica. Bytes default to operands read plus results written."""

    flops: int = 0
    bytes: int | None = None
    parts: Mapping[str, int] | None = None
    """FLOPs by op, of one that does what several others do: they count as those ops'."""


@dataclass(eq=False)
class OpDefinition:
    """Everything that is known about an op, in one record.

    writes: parameters whose storage the op changes; the result is the first of them, by its new
    value.
    views: parameters whose elements the result only rearranges, so that a kernel may return a view
    of them.
    alias: the result *is* storage of `views`, and writing to it writes to them (``reshape_`` and
    its like).
    host: ``(arrays as the op's arguments) -> array(s)``, evaluation on numpy for small integers;
    None if there is none.
    effects: what it does beyond its results: "host", "remote", "collective", "control", "print".
    random: whether the result depends on a seed operand.
    across: whether its operands may be on different virtual devices and tile sets.
    residuals: whether its results but the last are there for its gradient rule alone, and have no
    gradient themselves.
    rounds: whether what it writes is rounded stochastically, where that is asked for, though it is
    not of 16 bits.
    """

    name: str
    infer: Callable[..., Specs]
    signature: inspect.Signature
    writes: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    alias: bool = False
    host: Callable[..., Any] | None = None
    effects: frozenset[str] = frozenset()
    random: bool = False
    across: bool = False
    residuals: bool = False
    rounds: bool = False
    differentiable: bool = True
    vjp: Callable[..., Any] | None = None
    cost: Callable[..., Cost] | None = None
    base: "OpDefinition | None" = None
    """For a derived in-place or alias form: the op it was derived from."""
    names: None | str | Callable[..., Sequence[str]] = None
    """Names of the results, where they are not the op's: ``(op's arguments) -> names``, or a
    pattern such as "{t}_T".

    In a pattern operands stand for their names, a list of operands for the one of the result's
    position, ``{i}`` for that position; other arguments stand for themselves.
    """
    file: str = ""
    module: str = field(default="")

    def __repr__(self) -> str:
        return f"OpDefinition({self.name})"

    @property
    def result_type(self) -> Any:
        """What the rule returns, and so what the public function hands back: a `TensorSpec` or
        tensor, a list or a tuple of them, or None.
        """
        annotation = self.signature.return_annotation
        return get_origin(annotation) or annotation


OPS: dict[str, OpDefinition] = {}
"""Every declared op by name."""


class Op:
    """One op in a graph: a definition applied to arguments."""

    __slots__ = (
        "definition",
        "arguments",
        "graph",
        "name",
        "source",
        "refusal",
        "_inputs",
        "_outputs",
        "ipu",
        "io_tiles",
        "execution",
        "sequence_block",
        "_modified_here",
    )

    def __init__(
        self,
        definition: OpDefinition,
        arguments: dict[str, Any],
        graph: "Graph",
        name: str,
        source: tuple[str, int],
    ):
        self.definition = definition
        self.arguments = arguments
        self.graph = graph
        self.name = name
        self.source = source
        self._inputs = tuple(flatten(arguments.values()))
        self._outputs: list[Tensor] = []
        context = get_current_context()
        self.refusal: Exception | None = context.refusal
        """Why it cannot be executed: `popxl.ops.checks.refuse_to_execute` has said so."""
        self.ipu, self.io_tiles, self.execution = (
            context.ipu_id,
            context.io_tile_set,
            context.execution,
        )
        self.sequence_block = context.sequence_block
        self._modified_here: set[Tensor] = set()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensor operands, flat, in signature order."""
        return self._inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Results. Those of calls grow with the called graph's outputs."""
        return tuple(self._outputs)

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Operands whose storage this op changes; for calls those that the called graph takes by
        reference.
        """
        if "control" in self.definition.effects:
            return tuple(
                t
                for graph, inputs in self.called()
                for g, t in zip(graph.inputs, inputs)
                if self.is_by_reference(g)
            )
        return tuple(cast(Tensor, self.arguments[p]) for p in self.definition.writes)

    @property
    def viewed(self) -> tuple[Tensor, ...]:
        """Operands that the results may be views of."""
        return tuple(flatten(self.arguments[p] for p in self.definition.views))

    def called(self) -> list[tuple["Graph", tuple[Tensor, ...]]]:
        """(graph, its inputs here) for each graph that this op calls."""
        a = self.arguments
        if "then_branch" in a:
            return [(a["then_branch"], a["then_inputs"]), (a["else_branch"], a["else_inputs"])]
        return (
            [(a["graph"], a["inputs"])]
            if isinstance(a.get("inputs"), tuple) and "graph" in a
            else []
        )

    def place_of(self, t: Tensor, known: dict[Tensor, Place] | None = None) -> Place:
        """Where one of the results is; what a call returns is where the call, or the called graph,
        put it.

        Args:
            known: of results that were asked for on the way here; it gains more.
        """
        known = {} if known is None else known
        if t not in known:
            known[t] = self._place_of(self.outputs.index(t), known)
        return known[t]

    def _place_of(self, index: int, known: dict[Tensor, Place]) -> Place:
        if not self.called():
            chosen = self.arguments["ipus"][index] if "ipus" in self.arguments else self.ipu
            tile_set: TileSet = "io" if self.io_tiles else "compute"
            return Place(DEFAULT_IPU if chosen is None else chosen, tile_set)
        inner = {place_of(graph.outputs[index], known) for graph, _ in self.called()}
        ipu, set_of_all = inner.pop() if len(inner) == 1 else Place(None, None)
        return Place(ipu if self.ipu is None else self.ipu, set_of_all)

    def is_by_reference(self, inner: Tensor) -> bool:
        """Whether this call takes an input of a called graph by reference: as every call does, or
        for itself.
        """
        return inner in inner._graph._by_ref_inputs or inner in self._modified_here

    def take_by_reference(self, inner: Tensor) -> None:
        """Let this call, and no other, take an input of a called graph by reference."""
        self._modified_here.add(inner)

    def set_argument(self, name: str, value: Any) -> None:
        """Replace one argument (calls gain inputs this way while a program is being built)."""
        self.arguments[name] = value
        self._inputs = tuple(flatten(self.arguments.values()))

    def add_output(self, spec: TensorSpec, name: str) -> Tensor:
        """Append a result."""
        tensor: Tensor = self.graph._new_tensor(spec, name, op=self)
        self._outputs.append(tensor)
        return tensor

    @property
    def where(self) -> str:
        """Where the user made it: ``file:line``."""
        return f"{self.source[0]}:{self.source[1]}"

    @property
    def described(self) -> str:
        """The op, its graph and where it was made, for messages."""
        return f"{self} in graph '{self.graph.name or 'main'}', built at {self.where}"

    def __repr__(self) -> str:
        results = ", ".join(f"%{t.name}" for t in self._outputs)
        return (
            f"{results} = {self.definition.name}({', '.join(f'%{t.name}' for t in self._inputs)})"
        )


def place_of(t: Tensor, known: dict[Tensor, Place] | None = None) -> Place:
    """Where the op that made a tensor put it, see `Op.place_of`."""
    return Place(None, None) if t._op is None else t._op.place_of(t, known)


def flatten(values: Any) -> Iterator[Tensor]:
    """The tensors among values and their lists and tuples, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flatten(value)


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in it (also inside lists and tuples) replaced by
    ``fn(tensor)``.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return tuple(map_tensors(v, fn) for v in value)
    return value


def as_specs(result: Specs) -> tuple[TensorSpec, ...]:
    """What a rule returned, as a tuple with one spec per result."""
    if result is None:
        return ()
    return (result,) if isinstance(result, TensorSpec) else tuple(result)


def call_arguments(
    definition: OpDefinition, arguments: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as ``(args, kwargs)`` of the definition's rules and kernels: variadic parameters
    are spread.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in definition.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(arguments[name])
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = arguments[name]
        else:
            args.append(arguments[name])
    return args, kwargs


def op_cost(op: Op) -> Cost:
    """The op's cost, with bytes filled in: operands read plus results written, on one replica."""
    rule = op.definition.cost
    y: Any = op._outputs[0] if len(op._outputs) == 1 else tuple(op._outputs)
    args, kwargs = call_arguments(op.definition, op.arguments)
    cost = rule(y, *args, **kwargs) if rule else Cost()
    if cost.bytes is not None:
        return cost
    moved = sum(t.nelms * t.dtype.itemsize for t in (*op.inputs, *op._outputs))
    return Cost(cost.flops, moved, cost.parts)

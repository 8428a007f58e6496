"""Blocks that are being filled: their inputs, state and constants, copies and views, and which of
them are on the host.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from popxl import dtypes
from popxl.op_records import OpDefinition
from popxl.tensor import Constant, Tensor, TensorSpec

from popxl_engine.analysis.union_find import UnionFind
from popxl_engine.ir import NO_NAME, Block, Instr, Value, aliased, filled
from popxl_engine.shards import Sharding

HOST_ELEMENTS = 16
"""Integer tensors of up to this many elements are computed on the host where their operands are
there.
"""


def is_small_integer(spec: Any) -> bool:
    """Whether a tensor may live on the host."""
    return (spec.dtype.is_int or spec.dtype is dtypes.bool) and spec.nelms <= HOST_ELEMENTS


class Capture(NamedTuple):
    """A value that a loop's or branch's body takes, and what it becomes there."""

    value: Value
    name: str
    spec: TensorSpec
    root: Any
    by_ref: bool


class ProgramValues:
    """The values of a program, and which of their roots cannot be on the host."""

    def __init__(self) -> None:
        self.device_roots: set[Any] = set()
        """Roots that are on the device however small they are."""
        self.unfit: set[Any] = set()
        """Roots on the host that something on the device writes or views, as it turns out."""
        self.sharding: dict[Any, Sharding] = {}
        self._count = 0

    def new(
        self, name: str, spec: TensorSpec, host: bool = False, sharding: Sharding | None = None
    ) -> Value:
        """A value with a name that is unique in the program."""
        self._count += 1
        clean = NO_NAME.sub("_", name.rsplit("/", 1)[-1])
        clean = f"v{clean}" if clean[:1].isdigit() else clean
        return Value(f"{clean}_{self._count}", spec, host, sharding)


class BlockBuilder:
    """Fills one block."""

    def __init__(self, program: ProgramValues, name: str):
        self.program, self.name = program, name
        self.inputs: list[Value] = []
        self.by_ref: set[int] = set()
        self.instrs: list[Instr] = []
        self.constants: dict[Constant, Value] = {}
        self.variables: dict[Tensor, Value] = {}
        self.roots: dict[Value, Any] = {}
        """The root of host values that alias a block input or variable."""
        self._aliases: UnionFind[Value] = UnionFind()
        """Values that share storage by contract."""
        self.forms: dict[Value, Any] = {}
        """The forms of results of alias forms, and of what is written to them, which tell how they
        lie in memory.
        """

    def state(self, t: Tensor) -> Value:
        """A variable's value."""
        host = is_small_integer(t.spec) and t not in self.program.device_roots
        value = self.variables[t] = self.program.new(
            t.name, t.spec, host, self.program.sharding.get(t)
        )
        self.roots[value] = t
        return value

    def constant(self, c: Constant) -> Value:
        """A constant's value."""
        if c not in self.constants:
            self.constants[c] = self.program.new(c.name, c.spec, is_small_integer(c.spec))
            self.roots[self.constants[c]] = c
        return self.constants[c]

    def take(
        self, captured: Iterable[Capture], moved: Collection[Any], outer: "BlockBuilder"
    ) -> dict[Any, Value]:
        """Add inputs. Returns them by their roots; those by reference by the values around this
        block, too.

        Args:
            moved: roots that are not on the host here.
            outer: the block around this one.
        """
        values: dict[Any, Value] = {}
        for t in captured:
            value = values.get(t.value) if t.by_ref else None
            if value is None:
                host = (
                    t.value.host and t.root not in moved and t.root not in self.program.device_roots
                )
                value = self.program.new(t.name, t.spec, host, t.value.sharding)
                self.roots[value] = t.root
            if t.by_ref:
                self.by_ref.add(len(self.inputs))
                values[t.value] = value
                if t.value in outer.forms:
                    self.forms[value] = outer.forms[t.value]
            self.inputs.append(value)
            values[t.root] = value
        return values

    def made_of_same(self, references: Iterable[Value]) -> tuple[list[Instr], list[Value]]:
        """How those of different references that share storage are made in this block, in order,
        and of what.
        """
        needed = {v: True for v in self.alike(references)}
        views: list[Instr] = []
        if not needed:
            return views, []
        for instr in reversed(self.instrs):
            if not needed.keys().isdisjoint(instr.outputs[:1]) and (sources := aliased(instr)):
                views.append(instr)
                needed.update(dict.fromkeys(sources, True))
        defined = {instr.outputs[0] for instr in views}
        return views[::-1], [v for v in needed if v not in defined]

    def alike(self, references: Iterable[Value]) -> list[Value]:
        """Values that share storage with a different one."""
        distinct = list(dict.fromkeys(references))
        if len(distinct) < 2:
            return []
        storages = Counter(self._aliases.find(v) for v in distinct)
        return [v for v in distinct if storages[self._aliases.find(v)] > 1]

    def view_again(self, views: Iterable[Instr], values: dict[Any, Value]) -> None:
        """Add instructions of another block, of which ``values`` has the operands; add the results
        to it.
        """
        for view in views:
            assert view.definition is not None
            sources, result = [values[v] for v in aliased(view)], view.outputs[0]
            if view.definition.writes:
                values[result] = sources[0]
                continue
            values[result] = self.program.new(
                result.name, result.spec, result.host, result.sharding
            )
            for source in sources:
                self._aliases.join(source, values[result])
            self.forms[values[result]] = self._form(
                view.definition, view.arguments, lambda v: values[v]
            )
            self.roots[values[result]] = self.roots.get(sources[0])
            arguments = {n: filled(a, lambda v: values[v]) for n, a in view.arguments.items()}
            self.instrs.append(replace(view, arguments=arguments, outputs=(values[result],)))

    def copy(self, value: Value, root: Any) -> Value:
        """An independent value; `elide_copies` removes the copy where nothing can tell.

        ``root`` names it over all lowerings.
        """
        result = self._copied(value, value.host and root not in self.program.device_roots)
        self.roots[result] = root
        return result

    def to_device(self, value: Value) -> Value:
        """A host value as a tensor on the device."""
        return self._copied(value, False) if value.host else value

    def _copied(self, value: Value, host: bool) -> Value:
        result = self.program.new(value.name.rsplit("_", 1)[0], value.spec, host, value.sharding)
        self.instrs.append(Instr("copy", {"t": value}, (result,), host=host))
        return result

    def seed(self, value: Value) -> Value:
        """What a seed is now, on the host. The program waits for one that the device makes."""
        result = self._copied(value, True)
        self.roots[result] = result
        return result

    def _form(
        self,
        definition: OpDefinition,
        arguments: Mapping[str, Any],
        value: Callable[[Value], Value],
    ) -> Any:
        """How the result of an alias form lies in memory; ``value``: this block's value for one in
        the arguments.
        """
        return definition, *(
            (n, filled(a, lambda v: (v.spec.shape, self.forms.get(value(v)))))
            for n, a in arguments.items()
        )

    def finish(self, outputs: list[Value], host: Sequence[bool] = ()) -> Block:
        """Set the outputs: on the device, except carried ones whose input is on the host."""
        keep = [*host, *[False] * (len(outputs) - len(host))]
        results = tuple(v if h else self.to_device(v) for v, h in zip(outputs, keep))
        return Block(
            self.name,
            tuple(self.inputs),
            frozenset(self.by_ref),
            tuple(self.instrs),
            results,
            self.constants,
            self.variables,
        )

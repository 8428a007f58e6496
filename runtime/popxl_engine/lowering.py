"""From graphs to blocks: calls are inlined, loops and branches become bodies, small integers move
to the host.

A graph that would be inlined very often becomes a block of its own, see `sharing`: one for each way
to use it.

A block is straight-line. Everywhere the semantics ask for an independent value (an argument by
value, a result of a call, an out-of-place view) there is a ``copy`` or a view instruction;
`aliasing` then removes the copies that nothing can observe.
"""

from collections import Counter
from dataclasses import replace
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from popxl import dtypes
from popxl.graph import Graph
from popxl.opdef import Op, OpDefinition, flatten, map_tensors
from popxl.values import Constant, Tensor, TensorSpec

from popxl_engine.blocks import Block, Instr, Place, Value, filled, sharing, values_in
from popxl_engine.shards import Sharding, result_sharding, shardings
from popxl_engine.sharing import shared_graphs
from popxl_engine.steps import Step, steps_of
from popxl_engine.stochastic import Positions

Rewrite = Callable[[List[Step], Graph], List[Step]]

START = Place()
"""Where a block runs."""
HOST_ELEMENTS = 16
"""Integer tensors of up to this many elements are computed on the host where their operands are
there.
"""


class NotOnHost(Exception):
    """A host value is written by something that runs on the device: lower again with this root on
    the device.
    """

    def __init__(self, root: Any):
        super().__init__(root)
        self.root = root


def is_small_integer(spec: Any) -> bool:
    """Whether a tensor may live on the host."""
    return (spec.dtype.is_int or spec.dtype is dtypes.bool) and spec.nelms <= HOST_ELEMENTS


class Taken(NamedTuple):
    """A value that a loop's or branch's body takes, and what it becomes there."""

    value: Value
    name: str
    spec: TensorSpec
    root: Any
    by_ref: bool


class Lowering:
    """Lowers one Ir. Roots found unfit for the host are remembered in ``device_roots``.

    Args:
        ops: those of the main graph that run; default: all.
    """

    def __init__(
        self, rewrites: Sequence[Rewrite] = (), ops: Optional[Collection[Op]] = None
    ) -> None:
        self.rewrites, self.ops = tuple(rewrites), ops
        self.device_roots: Set[Any] = set()
        self._steps: Dict[Graph, List[Step]] = {}
        self._writes: Dict[Graph, bool] = {}
        self._read: Dict[Graph, Set[Tensor]] = {}
        self._shared: Set[Graph] = set()
        self._bodies: Dict[Any, Block] = {}
        """Blocks of shared graphs, by how they are used."""
        self.positions = Positions()
        self.rounds = False
        self.sharding: Dict[Any, Sharding] = {}
        self._count = 0

    def steps(self, graph: Graph) -> List[Step]:
        """A graph's steps after fusion, the same for every caller."""
        if graph not in self._steps:
            steps = steps_of(graph)
            if self.ops is not None and graph is graph.main_graph:
                steps = [step for step in steps if step.source in self.ops]
            for rewrite in self.rewrites:
                steps = rewrite(steps, graph)
            self._steps[graph] = steps
        return self._steps[graph]

    def main(self, graph: Graph) -> Block:
        """The main graph's block."""
        self.sharding, self.everyone = shardings(graph.ir), graph.ir.replica_grouping()
        self._shared = shared_graphs(graph)
        self.rounds = bool(graph.ir._pb_ir.getSessionOptions().enableStochasticRounding)
        while True:
            self._bodies.clear()
            try:
                builder = BlockBuilder(self, Block("main"))
                on_device = (v for v in graph.variables if v.location_info is None)
                for t in (*(v if v.shard is None else v.shard for v in on_device), *graph.kept):
                    builder.state(t)
                builder.inline(graph, [], "")
                return builder.finish([])
            except NotOnHost as error:
                self.device_roots.add(error.root)

    def new(
        self, name: str, spec: TensorSpec, host: bool = False, sharding: Optional[Sharding] = None
    ) -> Value:
        """A value with a name that is unique in the program."""
        self._count += 1
        clean = "".join(c if c.isalnum() else "_" for c in name.split("/")[-1])
        clean = f"v{clean}" if clean[:1].isdigit() else clean
        return Value(f"{clean}_{self._count}", spec, host, sharding)

    def drawing(self, step: Step, at: Place) -> Place:
        """The place of a step in a graph with a seed, which it has only if it draws."""
        draws = any(self.positions.draws(op) for op in (step.source, *step.writers))
        return at if draws else replace(at, seed=None)

    def touches(self, graph: Graph) -> bool:
        """Whether anything in a graph, or in what it calls, writes to storage or shares it by
        contract.
        """
        if graph not in self._writes:
            self._writes[graph] = any(
                op.definition.writes
                or op.definition.alias
                or any(self.touches(called) for called, _ in op.called())
                for op in graph.ops
            )
        return self._writes[graph]

    def is_shared(self, graph: Graph) -> bool:
        """Whether a graph becomes a block of its own instead of being inlined wherever it is
        called.
        """
        return graph in self._shared

    def reads(self, graph: Graph) -> Set[Tensor]:
        """What a graph's steps use, and what it returns."""
        if graph not in self._read:
            used = {t for step in self.steps(graph) for t in flatten(step.arguments.values())}
            self._read[graph] = used.union(graph.outputs)
        return self._read[graph]

    def body(
        self,
        op: Op,
        graph: Graph,
        inputs: Sequence[Value],
        carried: int,
        name: str,
        outer: "BlockBuilder",
        read: Optional[Sequence[int]] = None,
    ) -> Tuple[Block, List[Value]]:
        """The body of a loop, a branch or a call of ``op``, and the values of the block around it
        that it takes.

        A carried input stays on the host only while the output that becomes it does. Instead of
        several by-reference inputs that are views of the same elements it takes these elements, and
        makes the views itself.

        Args:
            read: of a call: which of the graph's outputs the body returns, on the host where they
                are there.
        """
        by_ref = [op.is_by_reference(t) for t in graph.inputs]
        references = [v for v, is_ref in zip(inputs, by_ref) if is_ref]
        views, viewed = outer.made_of_same(references)
        made = {v for view in views for v in view.outputs}
        taken = [
            Taken(v, t.name, t.spec, (graph, i), is_ref)
            for i, (t, v, is_ref) in enumerate(zip(graph.inputs, inputs, by_ref))
            if not (is_ref and v in made)
        ]
        taken += [
            Taken(v, v.name, v.spec, outer.roots.get(v), True)
            for v in viewed
            if v not in references
        ]
        use: Any = None
        if self.is_shared(graph):
            which = read if read is None else tuple(read)
            use = (
                graph,
                carried,
                which,
                tuple(by_ref),
                *self._given(taken, outer),
                *_made(references, taken, views),
            )
            if use in self._bodies:
                return self._bodies[use], [t.value for t in taken]
            name = f"/{graph.name.split('_subgraph(')[0]}"  # however deep the first use is
        moved: Set[Any] = set()
        while True:
            builder = BlockBuilder(self, Block(name))
            found = builder.take(taken, moved, outer)
            builder.view_again(views, found)
            bound = [
                found[v if is_ref else (graph, i)]
                for i, (v, is_ref) in enumerate(zip(inputs, by_ref))
            ]
            if self.touches(graph):
                own = enumerate(zip(bound, by_ref))
                bound = [v if is_ref else builder.copy(v, (graph, i)) for i, (v, is_ref) in own]
            outputs = builder.inline(graph, bound, name)
            if read is not None:
                outputs = [outputs[i] for i in read]
            host = [v.host for v in (builder.block.inputs[:carried] if read is None else outputs)]
            moves = {(graph, i) for i, v in enumerate(outputs[:carried]) if host[i] and not v.host}
            if not moves:
                block = builder.finish(outputs, host)
                if use is not None:
                    self._bodies[use] = block
                return block, [t.value for t in taken]
            moved |= moves

    def _given(self, taken: Sequence[Taken], outer: "BlockBuilder") -> Tuple[Any, ...]:
        """What the block of a shared graph must know of each value that it takes, beyond its shape
        and type.
        """
        return tuple(
            (
                t.value.host and t.root not in self.device_roots,
                t.value.sharding,
                outer.forms.get(t.value) if t.by_ref else None,
            )
            for t in taken
        )


def _made(
    references: Sequence[Value], taken: Sequence[Taken], views: Sequence[Instr]
) -> Tuple[Any, ...]:
    """Which by-reference inputs are the same value, and how those are made that are views of what
    is taken.
    """
    if not references:
        return ()
    order: Dict[Value, int] = {}
    for t in taken:
        if t.by_ref:
            order.setdefault(t.value, len(order))
    steps = []
    for view in views:
        result = view.outputs[0]
        arguments = tuple(
            (n, filled(a, lambda v: order.get(v, v))) for n, a in view.arguments.items()
        )
        steps.append((view.definition, view.host, result.spec, result.sharding, arguments))
        order[result] = len(order)
    added = tuple(t.spec for t in taken if t.value not in references) if views else ()
    return tuple(order[v] for v in references), tuple(steps), added


class BlockBuilder:
    """Fills one block."""

    def __init__(self, lowering: Lowering, block: Block):
        self.lowering, self.block = lowering, block
        self.roots: Dict[Value, Any] = {}
        """For host values that alias a block input or variable: that root."""
        self.shared: Dict[Value, Value] = {}
        """One value for all that share storage by contract, directly or through others."""
        self.forms: Dict[Value, Any] = {}
        """For results of alias forms, and what is written to them: the forms, which tell how they
        lie in memory.
        """

    def state(self, t: Tensor) -> Value:
        """A variable's value."""
        host = is_small_integer(t.spec) and t not in self.lowering.device_roots
        value = self.block.state[t] = self.lowering.new(
            t.name, t.spec, host, self.lowering.sharding.get(t)
        )
        self.roots[value] = t
        return value

    def constant(self, c: Constant) -> Value:
        """A constant's value."""
        if c not in self.block.constants:
            self.block.constants[c] = self.lowering.new(c.name, c.spec, is_small_integer(c.spec))
            self.roots[self.block.constants[c]] = c
        return self.block.constants[c]

    def take(
        self, taken: Iterable[Taken], moved: Collection[Any], outer: "BlockBuilder"
    ) -> Dict[Any, Value]:
        """Add inputs. Returns them by their roots; those by reference by the values around this
        block, too.

        Args:
            moved: roots that are not on the host here.
            outer: the block around this one.
        """
        found: Dict[Any, Value] = {}
        for t in taken:
            value = found.get(t.value) if t.by_ref else None
            if value is None:
                host = (
                    t.value.host
                    and t.root not in moved
                    and t.root not in self.lowering.device_roots
                )
                value = self.lowering.new(t.name, t.spec, host, t.value.sharding)
                self.roots[value] = t.root
            if t.by_ref:
                self.block.by_ref.add(len(self.block.inputs))
                found[t.value] = value
                if t.value in outer.forms:
                    self.forms[value] = outer.forms[t.value]
            self.block.inputs.append(value)
            found[t.root] = value
        return found

    def made_of_same(self, references: Iterable[Value]) -> Tuple[List[Instr], List[Value]]:
        """How those of different references that share storage are made in this block, in order,
        and of what.
        """
        needed = {v: True for v in self.alike(references)}
        views: List[Instr] = []
        if not needed:
            return views, []
        for instr in reversed(self.block.instrs):
            if not needed.keys().isdisjoint(instr.outputs[:1]) and (sources := sharing(instr)):
                views.append(instr)
                needed.update(dict.fromkeys(sources, True))
        made = {instr.outputs[0] for instr in views}
        return views[::-1], [v for v in needed if v not in made]

    def alike(self, references: Iterable[Value]) -> List[Value]:
        """Those that share storage with a different one."""
        distinct = list(dict.fromkeys(references))
        if len(distinct) < 2:
            return []
        storages = Counter(self.shared.get(v, v) for v in distinct)
        return [v for v in distinct if storages[self.shared.get(v, v)] > 1]

    def view_again(self, views: Iterable[Instr], found: Dict[Any, Value]) -> None:
        """Add instructions of another block, of which ``found`` has the operands; add the results
        to it.
        """
        for view in views:
            assert view.definition is not None
            sources, result = [found[v] for v in sharing(view)], view.outputs[0]
            if view.definition.writes:
                found[result] = sources[0]
                continue
            found[result] = self.lowering.new(
                result.name, result.spec, result.host, result.sharding
            )
            for source in sources:
                self._share(source, found[result])
            self.forms[found[result]] = self._form(
                view.definition, view.arguments, lambda v: found[v]
            )
            self.roots[found[result]] = self.roots.get(sources[0])
            arguments = {n: filled(a, lambda v: found[v]) for n, a in view.arguments.items()}
            self.block.instrs.append(replace(view, arguments=arguments, outputs=[found[result]]))

    def copy(self, value: Value, root: Any) -> Value:
        """An independent value; `aliasing` removes the copy where nothing can tell.

        ``root`` names it over all lowerings.
        """
        result = self._copied(value, value.host and root not in self.lowering.device_roots)
        self.roots[result] = root
        return result

    def to_device(self, value: Value) -> Value:
        """A host value as a tensor on the device."""
        return self._copied(value, False) if value.host else value

    def _copied(self, value: Value, host: bool) -> Value:
        result = self.lowering.new(value.name.rsplit("_", 1)[0], value.spec, host, value.sharding)
        self.block.instrs.append(Instr("copy", {"t": value}, [result], host=host))
        return result

    def seed(self, value: Value) -> Value:
        """What a seed is now, on the host. The program waits for one that the device makes."""
        result = self._copied(value, True)
        self.roots[result] = result
        return result

    def inline(
        self, graph: Graph, bound: Sequence[Value], path: str, place: Place = START
    ) -> List[Value]:
        """Add a graph's ops on the given inputs; returns its outputs. ``place``: of the call."""
        env: Dict[Tensor, Value] = dict(zip(graph.inputs, bound))
        env.update(self.block.state if not path else {})
        copies = self.lowering.touches(graph)
        for c in graph.constants:
            env[c] = self.copy(self.constant(c), (c, path)) if copies else self.constant(c)
        if self.lowering.rounds and graph.rounding_seed is not None:
            place = Place(seed=self.seed(env[graph.rounding_seed]))
        add = {"call": self._call, "repeat": self._repeat, "conditional": self._conditional}
        places: Dict[int, Place] = {}
        for step in self.lowering.steps(graph):
            position = self.lowering.positions.of(step.source)
            if position not in places:
                places[position] = place.inside(position)
            at = (
                places[position]
                if place.seed is None
                else self.lowering.drawing(step, places[position])
            )
            add.get(step.definition.name, self._op)(step, env, path, at)
        return [env[t] for t in graph.outputs]

    def _call(self, step: Step, env: Dict[Tensor, Value], path: str, place: Place) -> None:
        graph: Graph = step.arguments["graph"]
        if self.lowering.is_shared(graph):
            self._call_shared(step, env, path, place)
            return
        copies = self.lowering.touches(graph)
        bound = [
            env[t]
            if step.source.is_by_reference(g) or not copies
            else self.copy(env[t], (step.source, g))
            for g, t in zip(graph.inputs, step.arguments["inputs"])
        ]
        outputs = self.inline(graph, bound, f"{path}/{graph.name.split('_subgraph(')[0]}", place)
        for i, (t, value) in enumerate(zip(step.outputs, outputs)):
            env[t] = self.copy(value, (step.source, i))

    def _call_shared(self, step: Step, env: Dict[Tensor, Value], path: str, place: Place) -> None:
        """Run a graph's own block once. What it returns is apart from all else: it needs no
        copies.
        """
        used = self.lowering.reads(step.source.graph)
        read = [i for i, t in enumerate(step.outputs) if t in used]
        for i, value in zip(
            read, self._run_shared(step, self._inputs(step, env), read, path, place)
        ):
            env[step.outputs[i]] = value

    def _run_shared(
        self, step: Step, inputs: Sequence[Value], read: Sequence[int], path: str, place: Place
    ) -> List[Value]:
        """Those of a call's results, or of a loop's after one iteration, that are read."""
        graph: Graph = step.arguments["graph"]
        inner = f"{path}/{graph.name.split('_subgraph(')[0]}"
        body, inputs = self.lowering.body(step.source, graph, inputs, 0, inner, self, read)
        self._check_host(body, inputs)
        inputs = [v if b.host else self.to_device(v) for v, b in zip(inputs, body.inputs)]
        outputs = [
            self.lowering.new(step.outputs[i].name, result.spec, result.host, result.sharding)
            for i, result in zip(read, body.outputs)
        ]
        self.roots.update((value, (step.source, i)) for i, value in zip(read, outputs))
        arguments = {"inputs": tuple(inputs)}
        instr = Instr(
            "call", arguments, outputs, source=step.source, bodies=(body,), path=path, place=place
        )
        self.block.instrs.append(instr)
        moved = self.lowering.device_roots
        return [self.to_device(v) if v.host and self.roots[v] in moved else v for v in outputs]

    def _inputs(self, step: Step, env: Dict[Tensor, Value]) -> List[Value]:
        """What a loop's or call's block is given: copies where the graph may write to what it takes
        by reference.
        """
        graph: Graph = step.arguments["graph"]
        references = self._references(step)
        return [
            env[t] if g in references or not references else self.copy(env[t], (step.source, g))
            for g, t in zip(graph.inputs, step.arguments["inputs"])
        ]

    def _repeat(self, step: Step, env: Dict[Tensor, Value], path: str, place: Place) -> None:
        graph: Graph = step.arguments["graph"]
        inputs, inner = self._inputs(step, env), f"{path}/{graph.name.split('_subgraph(')[0]}"
        carried, first, count = len(graph.outputs), 0, step.arguments["repeat_count"]
        if not count:
            env.update(
                (t, self.copy(v, (step.source, i)))
                for i, (t, v) in enumerate(zip(step.outputs, inputs))
            )
            return
        if count == 1 or self._is_carried_and_seen(graph, inputs, self._references(step)):
            inputs[:carried] = self._first_iteration(step, inputs, path, place)
            first = 1
            if count == 1:
                env.update(zip(step.outputs, inputs))
                return
        body, inputs = self.lowering.body(step.source, graph, inputs, carried, inner, self)
        self._check_host(body, inputs)
        inputs = [v if b.host else self.to_device(v) for v, b in zip(inputs, body.inputs)]
        outputs = [
            self.lowering.new(t.name, t.spec, v.host, v.sharding)
            for t, v in zip(step.outputs, body.outputs)
        ]
        self.roots.update((v, (graph, i)) for i, v in enumerate(outputs))
        arguments = {"repeat_count": count - first, "first": first, "inputs": tuple(inputs)}
        instr = Instr(
            "repeat", arguments, outputs, source=step.source, bodies=(body,), path=path, place=place
        )
        self.block.instrs.append(instr)
        env.update(zip(step.outputs, outputs))

    def _first_iteration(
        self, step: Step, inputs: Sequence[Value], path: str, place: Place
    ) -> List[Value]:
        """What a loop carries after its first iteration, maybe the only one.

        What becomes a carried input is a copy, as only the first iteration changes the caller's.
        """
        graph: Graph = step.arguments["graph"]
        if self.lowering.is_shared(graph):
            return self._run_shared(step, inputs, range(len(graph.outputs)), path, place.inside(0))
        references = self._references(step)
        bound = [
            v if g in references else self.copy(v, (step.source, 0, g))
            for g, v in zip(graph.inputs, inputs)
        ]
        results = self.inline(
            graph, bound, f"{path}/{graph.name.split('_subgraph(')[0]}", place.inside(0)
        )
        return [self.copy(v, (step.source, 0, i)) for i, v in enumerate(results)]

    @staticmethod
    def _references(step: Step) -> Set[Tensor]:
        """Inputs of its graph that a loop or call takes by reference."""
        return {t for t in step.arguments["graph"].inputs if step.source.is_by_reference(t)}

    def _is_carried_and_seen(
        self, graph: Graph, inputs: Sequence[Value], by_ref: Collection[Tensor]
    ) -> bool:
        """Whether a loop carries a by-reference input whose storage another by-reference input has,
        too.
        """
        references = [v for t, v in zip(graph.inputs, inputs) if t in by_ref]
        storages = Counter(self.shared.get(v, v) for v in references)
        carried = zip(graph.inputs[: len(graph.outputs)], inputs)
        return any(t in by_ref and storages[self.shared.get(v, v)] > 1 for t, v in carried)

    def _share(self, source: Value, result: Value) -> None:
        """Note that both share storage. A result that does already is a join of tensors."""
        one, other = self.shared.get(source, source), self.shared.get(result, result)
        if other is not result:
            self.shared.update((v, one) for v, known in list(self.shared.items()) if known is other)
        self.shared[other] = one

    def _check_host(self, body: Block, inputs: Sequence[Value]) -> None:
        """A by-reference input that the body needs on the device cannot be a host value here."""
        for i, (value, inner) in enumerate(zip(inputs, body.inputs)):
            if i in body.by_ref and value.host and not inner.host:
                raise NotOnHost(self.roots[value])

    def _conditional(self, step: Step, env: Dict[Tensor, Value], path: str, place: Place) -> None:
        a = step.arguments
        bodies: List[Block] = []
        arguments: Dict[str, Any] = {"cond": env[a["cond"]]}
        for branch in ("then", "else"):
            graph: Graph = a[f"{branch}_branch"]
            inputs = [env[t] for t in a[f"{branch}_inputs"]]
            name = f"{path}/{graph.name.split('_subgraph(')[0]}"
            body, inputs = self.lowering.body(step.source, graph, inputs, 0, name, self)
            inputs = [v if b.host else self.to_device(v) for v, b in zip(inputs, body.inputs)]
            arguments[f"{branch}_inputs"] = tuple(inputs)
            bodies.append(body)
        results = bodies[0].outputs
        outputs = [
            self.lowering.new(t.name, t.spec, sharding=v.sharding)
            for t, v in zip(step.outputs, results)
        ]
        instr = Instr(
            "conditional",
            arguments,
            outputs,
            source=step.source,
            bodies=tuple(bodies),
            path=path,
            place=place,
        )
        self.block.instrs.append(instr)
        env.update(zip(step.outputs, outputs))

    def _op(self, step: Step, env: Dict[Tensor, Value], path: str, place: Place) -> None:
        definition = step.definition
        arguments = {n: map_tensors(v, lambda t: env[t]) for n, v in step.arguments.items()}
        inputs = list(values_in(arguments.values()))
        specs = [t.spec for t in step.outputs]
        host = (
            definition.host is not None
            and bool(inputs)
            and all(v.host for v in inputs)
            and all(is_small_integer(s) for s in specs)
        )
        written = [arguments[p] for p in definition.writes]
        for value in (*written, *(inputs if definition.alias else ())):
            if value.host and not host:
                raise NotOnHost(self.roots[value])
        host = host and not any(
            (step.source, i) in self.lowering.device_roots for i in range(len(specs))
        )
        operands, everyone = [v.sharding for v in inputs], self.lowering.everyone
        outputs = [
            self.lowering.new(
                t.name,
                s,
                host,
                result_sharding(
                    definition, arguments, s, operands, self.lowering.sharding, everyone
                ),
            )
            for t, s in zip(step.outputs, specs)
        ]
        for i, value in enumerate(outputs):
            alias = written or (inputs if definition.alias else ())
            for operand in alias if definition.alias else written[:1] if i == 0 else ():
                self._share(operand, value)
            if definition.alias:
                self.forms[value] = self._form(definition, arguments, lambda v: v)
            elif i == 0 and written and written[0] in self.forms:
                self.forms[value] = self.forms[written[0]]
            self.roots[value] = self.roots[alias[0]] if host and alias else (step.source, i)
        instr = Instr(
            "op", arguments, outputs, definition, step.source, host, path=path, place=place
        )
        instr.positions = tuple(self.lowering.positions.of(op) for op in step.writers)
        self.block.instrs.append(instr)
        env.update(zip(step.outputs, outputs))

    def _form(
        self, definition: OpDefinition, arguments: Dict[str, Any], value: Callable[[Value], Value]
    ) -> Any:
        """How the result of an alias form lies in memory; ``value``: this block's value for one in
        the arguments.
        """
        return definition, *(
            (n, filled(a, lambda v: (v.spec.shape, self.forms.get(value(v)))))
            for n, a in arguments.items()
        )

    def finish(self, outputs: List[Value], host: Sequence[bool] = ()) -> Block:
        """Set the outputs: on the device, except carried ones whose input is on the host."""
        keep = [*host, *[False] * (len(outputs) - len(host))]
        self.block.outputs = [v if h else self.to_device(v) for v, h in zip(outputs, keep)]
        return self.block

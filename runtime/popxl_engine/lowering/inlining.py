"""The way from graphs to blocks: calls are inlined, loops and branches become bodies, small
integers move to the host.

A graph that would be inlined very often becomes a block of its own, see `outlining`: one for each
way to use it.

A block is straight-line. Everywhere the semantics ask for an independent value (an argument by
value, a result of a call, an out-of-place view) there is a ``copy`` or a view instruction;
`passes.elide_copies` then removes those that nothing can observe.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from popxl.graph import Graph
from popxl.op_records import Op
from popxl.tensor import Tensor

from popxl_engine.ir import Block, Instr, RngPath, Value, filled, values_in
from popxl_engine.lowering.block_builder import BlockBuilder, Capture, is_small_integer
from popxl_engine.lowering.graphs import GraphPass, op_of, short_name
from popxl_engine.lowering.outlining import Specialization, specialization
from popxl_engine.lowering.program_graphs import ProgramGraphs
from popxl_engine.shards import result_sharding

Env = dict[Value, Value]
"""What the values of a graph's block have become."""

START = RngPath()
"""The place where a block runs."""


def inner_path(path: str, graph: Graph) -> str:
    """The path of what is in a graph that is called there."""
    return f"{path}/{short_name(graph)}"


def lower(main: Graph, run_passes: GraphPass, ops: Collection[Op] | None = None) -> Block:
    """A program's block: that of its main graph. It is lowered again, with all that is unfit for
    the host on the device, until nothing is.

    Args:
        run_passes: what passes make of the block of each graph.
        ops: those of the main graph that run; default: all.
    """
    program = ProgramGraphs(main, run_passes, ops)
    while True:
        program.bodies.clear()
        program.unfit.clear()
        builder = Inliner(program, "main")
        on_device = (v for v in main.variables if v.location_info is None)
        state = {v if v.shard is None else v.shard: None for v in on_device}
        # the last: what other parts make, of a program that no session has arranged yet
        for t in {
            **state,
            **dict.fromkeys(main.retained),
            **program.graph_block(main).block.state,
        }:
            builder.state(t)
        builder.inline(main, [], "")
        block = builder.finish([])
        if not program.unfit:
            return block
        assert program.unfit.isdisjoint(program.device_roots)
        program.device_roots |= program.unfit


class Inliner(BlockBuilder):
    """Fills a block with what graphs do."""

    def __init__(self, program: ProgramGraphs, name: str):
        super().__init__(program, name)
        self.program: ProgramGraphs = program

    def inline(
        self, graph: Graph, bound: Sequence[Value], path: str, rng_path: RngPath = START
    ) -> list[Value]:
        """Add a graph's ops on the given inputs; returns its outputs. ``rng_path``: of the call."""
        lowered = self.program.graph_block(graph)
        env: Env = dict(zip(lowered.block.inputs, bound))
        env.update((v, self.variables[t]) for t, v in lowered.block.state.items())
        copies = self.program.writes_or_aliases(graph)
        for c, v in lowered.block.constants.items():
            env[v] = self.copy(self.constant(c), (c, path)) if copies else self.constant(c)
        if self.program.stochastic_rounding and graph.rounding_seed is not None:
            rng_path = RngPath(seed=self.seed(env[lowered.values[graph.rounding_seed]]))
        add = {"call": self._call, "repeat": self._repeat, "conditional": self._conditional}
        paths: dict[int, RngPath] = {}
        for instr in lowered.block.instrs:
            assert instr.definition is not None
            position = self.program.positions.of(op_of(instr))
            if position not in paths:
                paths[position] = rng_path.inside(position)
            at = paths[position]
            if rng_path.seed is not None:
                at = self.program.drawing(instr, at)
            add.get(instr.definition.name, self._op)(instr, env, path, at)
        return [env[v] for v in lowered.block.outputs]

    def _call(self, instr: Instr, env: Env, path: str, rng_path: RngPath) -> None:
        graph: Graph = instr.arguments["graph"]
        if graph in self.program.outlined:
            self._call_outlined(instr, env, path, rng_path)
            return
        copies = self.program.writes_or_aliases(graph)
        bound = [
            env[t]
            if op_of(instr).is_by_reference(g) or not copies
            else self.copy(env[t], (op_of(instr), g))
            for g, t in zip(graph.inputs, instr.arguments["inputs"])
        ]
        outputs = self.inline(graph, bound, inner_path(path, graph), rng_path)
        for i, (t, value) in enumerate(zip(instr.outputs, outputs)):
            env[t] = self.copy(value, (op_of(instr), i))

    def _call_outlined(self, instr: Instr, env: Env, path: str, rng_path: RngPath) -> None:
        """Run a graph's own block once. What it returns is apart from all else: it needs no
        copies.
        """
        used = self.program.graph_block(op_of(instr).graph).used
        read = [i for i, t in enumerate(instr.outputs) if t in used]
        for i, value in zip(
            read, self._run_outlined(instr, self._inputs(instr, env), read, path, rng_path)
        ):
            env[instr.outputs[i]] = value

    def _run_outlined(
        self,
        instr: Instr,
        inputs: Sequence[Value],
        read: Sequence[int],
        path: str,
        rng_path: RngPath,
    ) -> list[Value]:
        """The values of a call's results, or of a loop's after one iteration, that are read."""
        graph: Graph = instr.arguments["graph"]
        body, taken = self._body(instr, graph, inputs, path, read=read)
        outputs = [
            self.program.new(instr.outputs[i].name, result.spec, result.host, result.sharding)
            for i, result in zip(read, body.outputs)
        ]
        self.roots.update((value, (op_of(instr), i)) for i, value in zip(read, outputs))
        self._run("call", instr, {"inputs": taken}, outputs, [body], path, rng_path)
        moved = self.program.device_roots
        return [self.to_device(v) if v.host and self.roots[v] in moved else v for v in outputs]

    def _inputs(self, instr: Instr, env: Env) -> list[Value]:
        """What a loop's or call's block is given: copies where the graph may write to what it takes
        by reference.
        """
        graph: Graph = instr.arguments["graph"]
        references = self._references(instr)
        return [
            env[t] if g in references or not references else self.copy(env[t], (op_of(instr), g))
            for g, t in zip(graph.inputs, instr.arguments["inputs"])
        ]

    def _repeat(self, instr: Instr, env: Env, path: str, rng_path: RngPath) -> None:
        graph: Graph = instr.arguments["graph"]
        inputs = self._inputs(instr, env)
        carried, first, count = len(graph.outputs), 0, instr.arguments["repeat_count"]
        if not count:
            env.update(
                (t, self.copy(v, (op_of(instr), i)))
                for i, (t, v) in enumerate(zip(instr.outputs, inputs))
            )
            return
        if count == 1 or self._is_carried_and_seen(graph, inputs, self._references(instr)):
            inputs[:carried] = self._first_iteration(instr, inputs, path, rng_path)
            first = 1
            if count == 1:
                env.update(zip(instr.outputs, inputs))
                return
        body, taken = self._body(instr, graph, inputs, path, carried)
        outputs = [
            self.program.new(t.name, t.spec, v.host, v.sharding)
            for t, v in zip(instr.outputs, body.outputs)
        ]
        self.roots.update((v, (graph, i)) for i, v in enumerate(outputs))
        arguments = {"repeat_count": count - first, "first": first, "inputs": taken}
        self._run("repeat", instr, arguments, outputs, [body], path, rng_path)
        env.update(zip(instr.outputs, outputs))

    def _first_iteration(
        self, instr: Instr, inputs: Sequence[Value], path: str, rng_path: RngPath
    ) -> list[Value]:
        """What a loop carries after its first iteration, maybe the only one.

        What becomes a carried input is a copy, as only the first iteration changes the caller's.
        """
        graph: Graph = instr.arguments["graph"]
        if graph in self.program.outlined:
            return self._run_outlined(
                instr, inputs, range(len(graph.outputs)), path, rng_path.inside(0)
            )
        references = self._references(instr)
        bound = [
            v if g in references else self.copy(v, (op_of(instr), 0, g))
            for g, v in zip(graph.inputs, inputs)
        ]
        results = self.inline(graph, bound, inner_path(path, graph), rng_path.inside(0))
        return [self.copy(v, (op_of(instr), 0, i)) for i, v in enumerate(results)]

    @staticmethod
    def _references(instr: Instr) -> set[Tensor]:
        """Inputs of its graph that a loop or call takes by reference."""
        return {t for t in instr.arguments["graph"].inputs if op_of(instr).is_by_reference(t)}

    def _is_carried_and_seen(
        self, graph: Graph, inputs: Sequence[Value], by_ref: Collection[Tensor]
    ) -> bool:
        """Whether a loop carries a by-reference input whose storage another by-reference input has,
        too.
        """
        references = [v for t, v in zip(graph.inputs, inputs) if t in by_ref]
        storages = Counter(self._aliases.find(v) for v in references)
        carried = zip(graph.inputs[: len(graph.outputs)], inputs)
        return any(t in by_ref and storages[self._aliases.find(v)] > 1 for t, v in carried)

    def _body(
        self,
        instr: Instr,
        graph: Graph,
        inputs: Sequence[Value],
        path: str,
        carried: int = 0,
        read: Sequence[int] | None = None,
    ) -> tuple[Block, tuple[Value, ...]]:
        """The block of a graph that an instruction runs, and what it takes, where it takes it: a
        by-reference input that it needs on the device cannot be a host value here.
        """
        name = inner_path(path, graph)
        body, taken = self._block_of(op_of(instr), graph, inputs, carried, name, read)
        for i, (value, inner) in enumerate(zip(taken, body.inputs)):
            if i in body.by_ref and value.host and not inner.host:
                self.program.unfit.add(self.roots[value])
        pairs = zip(taken, body.inputs)
        return body, tuple([v if inner.host else self.to_device(v) for v, inner in pairs])

    def _block_of(
        self,
        op: Op,
        graph: Graph,
        inputs: Sequence[Value],
        carried: int,
        name: str,
        read: Sequence[int] | None = None,
    ) -> tuple[Block, list[Value]]:
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
        views, viewed = self.made_of_same(references)
        defined = {v for view in views for v in view.outputs}
        captured = [
            Capture(v, t.name, t.spec, (graph, i), is_ref)
            for i, (t, v, is_ref) in enumerate(zip(graph.inputs, inputs, by_ref))
            if not (is_ref and v in defined)
        ]
        captured += [
            Capture(v, v.name, v.spec, self.roots.get(v), True)
            for v in viewed
            if v not in references
        ]
        key: Specialization | None = None
        if graph in self.program.outlined:
            which = read if read is None else tuple(read)
            key = (
                graph,
                carried,
                which,
                tuple(by_ref),
                *specialization(captured, references, views, self),
            )
            if key in self.program.bodies:
                return self.program.bodies[key], [t.value for t in captured]
            name = inner_path("", graph)  # however deep the first use is
        moved: set[Any] = set()
        while True:
            builder = Inliner(self.program, name)
            found = builder.take(captured, moved, self)
            builder.view_again(views, found)
            bound = [
                found[v if is_ref else (graph, i)]
                for i, (v, is_ref) in enumerate(zip(inputs, by_ref))
            ]
            if self.program.writes_or_aliases(graph):
                own = enumerate(zip(bound, by_ref))
                bound = [v if is_ref else builder.copy(v, (graph, i)) for i, (v, is_ref) in own]
            outputs = builder.inline(graph, bound, name)
            if read is not None:
                outputs = [outputs[i] for i in read]
            host = [v.host for v in (builder.inputs[:carried] if read is None else outputs)]
            moves = {(graph, i) for i, v in enumerate(outputs[:carried]) if host[i] and not v.host}
            if not moves:
                block = builder.finish(outputs, host)
                if key is not None:
                    self.program.bodies[key] = block
                return block, [t.value for t in captured]
            moved |= moves

    def _run(
        self,
        kind: str,
        instr: Instr,
        arguments: Mapping[str, Any],
        outputs: Sequence[Value],
        bodies: Sequence[Block],
        path: str,
        rng_path: RngPath,
    ) -> None:
        """Add an instruction that runs blocks."""
        run = Instr(
            kind,
            arguments,
            tuple(outputs),
            source=op_of(instr),
            bodies=tuple(bodies),
            path=path,
            rng_path=rng_path,
        )
        self.instrs.append(run)

    def _conditional(self, instr: Instr, env: Env, path: str, rng_path: RngPath) -> None:
        a = instr.arguments
        bodies: list[Block] = []
        arguments: dict[str, Any] = {"cond": env[a["cond"]]}
        for branch in ("then", "else"):
            graph: Graph = a[f"{branch}_branch"]
            inputs = [env[t] for t in a[f"{branch}_inputs"]]
            body, arguments[f"{branch}_inputs"] = self._body(instr, graph, inputs, path)
            bodies.append(body)
        results = bodies[0].outputs
        outputs = [
            self.program.new(t.name, t.spec, sharding=v.sharding)
            for t, v in zip(instr.outputs, results)
        ]
        self._run("conditional", instr, arguments, outputs, bodies, path, rng_path)
        env.update(zip(instr.outputs, outputs))

    def _op(self, instr: Instr, env: Env, path: str, rng_path: RngPath) -> None:
        definition = instr.definition
        assert definition is not None
        arguments = {n: filled(a, lambda v: env[v]) for n, a in instr.arguments.items()}
        inputs = list(values_in(arguments.values()))
        specs = [t.spec for t in instr.outputs]
        host = (
            definition.host is not None
            and bool(inputs)
            and all(v.host for v in inputs)
            and all(is_small_integer(s) for s in specs)
        )
        written = [arguments[p] for p in definition.writes]
        for value in (*written, *(inputs if definition.alias else ())):
            if value.host and not host:
                self.program.unfit.add(self.roots[value])
        host = host and not any(
            (op_of(instr), i) in self.program.device_roots for i in range(len(specs))
        )
        operands, everyone = [v.sharding for v in inputs], self.program.everyone
        outputs = [
            self.program.new(
                t.name,
                s,
                host,
                result_sharding(
                    definition, arguments, s, operands, self.program.sharding, everyone
                ),
            )
            for t, s in zip(instr.outputs, specs)
        ]
        for i, value in enumerate(outputs):
            alias = written or (inputs if definition.alias else ())
            for operand in alias if definition.alias else written[:1] if i == 0 else ():
                self._aliases.join(operand, value)
            if definition.alias:
                self.forms[value] = self._form(definition, arguments, lambda v: v)
            elif i == 0 and written and written[0] in self.forms:
                self.forms[value] = self.forms[written[0]]
            self.roots[value] = self.roots[alias[0]] if host and alias else (op_of(instr), i)
        self.instrs.append(
            Instr(
                "op",
                arguments,
                tuple(outputs),
                definition,
                op_of(instr),
                host,
                path=path,
                rng_path=rng_path,
                writers=instr.writers,
                rng_positions=tuple(self.program.positions.of(op) for op in instr.writers),
            )
        )
        env.update(zip(instr.outputs, outputs))

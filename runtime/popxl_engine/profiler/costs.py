"""The work of a program's phases and loops as the planner counts it, and that of single
instructions after fusion.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any, DefaultDict, Dict, Iterator, List, Tuple

from popxl.graph import Graph
from popxl.ir import Ir
from popxl.op_records import OPS, Op, OpDefinition, call_arguments, op_cost
from popxl.profile import Work
from popxl.values import Tensor, TensorSpec

from popxl_engine.analysis.effects import instrs_of
from popxl_engine.compiler import compile_unfused
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.planner.costs import Costs, Counter
from popxl_engine.planner.phases import in_phases

Stretch = Tuple[str, int]
"""A phase, and which of its stretches in the program: a phase that is called again later has
several.
"""


def as_work(costs: Costs) -> Work:
    """The sums of the planner, per replica."""
    sent = sum(sent for _, _, sent in costs.collectives.values())
    return Work(sum(costs.flops.values()), costs.loaded, costs.stored, costs.host, sent)


def stretches(ir: Ir, block: Block) -> Iterator[Tuple[Stretch, Instr, int]]:
    """The instructions of all phases, each with its phase's stretch, and how often a run comes
    by.
    """
    count: Dict[str, int] = {}
    before = None
    for phase, instr, times in in_phases(ir, block):
        if (phase, times) != before:
            count[phase] = count.get(phase, -1) + 1
        before = phase, times
        yield (phase, count[phase]), instr, times


class PlannedWork:
    """Work of the program before any fusion, as in plans: of phases in a run, and of loops with all
    their rounds.
    """

    def __init__(self, ir: Ir):
        block = compile_unfused(ir).block
        self._counter = Counter()
        costs: DefaultDict[Stretch, Costs] = defaultdict(Costs)
        self._times: Dict[Stretch, int] = {}
        for stretch, instr, times in stretches(ir, block):
            costs[stretch].add(self._counter.count([instr]))
            self._times[stretch] = times
        self.stretches = {stretch: as_work(cost) for stretch, cost in costs.items()}
        loops = (instr for instr in instrs_of(block) if instr.kind == "repeat")
        self._loops = {loop_key(instr): as_work(self._counter.count([instr])) for instr in loops}

    def loop(self, instr: Instr) -> Work:
        """The work of a repeat in a program that may be fused."""
        return self._loops.get(loop_key(instr), Work())

    def phases(self) -> "Dict[str, Work]":
        """The work of each phase in a run."""
        found: Dict[str, Work] = {}
        for stretch, work in self.stretches.items():
            name, _ = stretch
            found[name] = Work.sum([found.get(name, Work()), work.times(self._times[stretch])])
        return found


def loop_key(instr: Instr) -> Tuple[str, Op]:
    """What tells a repeat from all others of its program, however it is lowered."""
    assert instr.source is not None
    return instr.bodies[0].name, instr.source


class InstructionWork:
    """The work of single instructions. A fused one does that of its op and of the ops that are gone
    because of it.

    What it makes again is the work of those that are gone because of the other op.
    """

    def __init__(self, block: Block):
        self._counter = Counter()
        self._gone: Dict[Op, List[Op]] = {}
        """For the op of a fused instruction, the ops that it does beside."""
        kept: Dict[Op, List[OpDefinition]] = {}
        for instr in instrs_of(block):
            for op in (instr.source,):
                if op is not None and instr.definition is not None:
                    kept.setdefault(op, []).append(instr.definition)
        for graph in {op.graph for op in kept}:
            self._find_gone(graph, kept)

    def _find_gone(self, graph: Graph, kept: Dict[Op, List[OpDefinition]]) -> None:
        """Give each op that is gone to the first fused one that uses, maybe through others, what it
        makes or changes.

        An op that stands for another one counts its FLOPs by itself, so that nothing passes it. One
        whose results no fused one uses belongs to a fused one that makes, or shares, an operand of
        it.
        """
        order = {op: i for i, op in enumerate(graph.ops)}
        users: Dict[Tensor, List[Op]] = {}
        home: Dict[Op, Op] = {}
        for op in reversed(graph.ops):
            definitions = kept.get(op, [])
            later = [
                user
                for t in (*op.outputs, *op.written)
                for user in users.get(t, ())
                if user in home
            ]
            if any(d is not op.definition for d in definitions):
                home[op] = op
            elif later:
                home[op] = home[min(later, key=lambda user: order[user])]
                if not definitions:
                    self._gone.setdefault(home[op], []).append(op)
            for t in op.inputs:
                users.setdefault(t, []).append(op)
        makers = {t: op for op in graph.ops for t in op.outputs}
        for op in graph.ops:
            if op not in home and op not in kept:
                others = (user for t in op.inputs for user in (makers.get(t), *users[t]))
                near = [home[other] for other in others if other in home]
                if near:
                    home[op] = min(near, key=lambda user: order[user])
                    self._gone.setdefault(home[op], []).append(op)

    def of(self, instr: Instr) -> Work:
        """An instruction's work, without that of its bodies."""
        if instr.kind != "op" or instr.host:
            return Work()
        assert instr.definition is not None and instr.source is not None
        counted = as_work(self._counter.count([instr]))
        if instr.definition is instr.source.definition:
            return counted
        if instr.definition.name not in OPS:
            done = [op for of in (instr.source,) if of is not None for op in self._gone.get(of, ())]
            return replace(counted, flops=counted.flops + sum(op_cost(op).flops for op in done))
        return replace(counted, flops=_own_flops(instr))


def _own_flops(instr: Instr) -> int:
    """The FLOPs of an op that stands for another one, from what it is given."""
    definition = instr.definition
    assert definition is not None
    if definition.cost is None:
        return 0
    results = tuple(StandIn(v.spec.shape, v.spec.dtype) for v in instr.outputs)
    args, kwargs = call_arguments(
        definition, {name: _known(a) for name, a in instr.arguments.items()}
    )
    flops: int = definition.cost(
        results[0] if len(results) == 1 else results, *args, **kwargs
    ).flops
    return flops


class StandIn(TensorSpec):
    """What cost rules ask of a tensor."""

    @property
    def spec(self) -> TensorSpec:
        """The same."""
        return self


def _known(argument: Any) -> Any:
    """An argument with what is known of values in their place."""
    if isinstance(argument, Value):
        return StandIn(argument.spec.shape, argument.spec.dtype)
    if isinstance(argument, (tuple, list)):
        return tuple(_known(a) for a in argument)
    return argument

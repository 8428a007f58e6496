"""Work and traffic of a lowered program, counted without running it: a loop's body once, times its
repeats.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from popxl.ir import Ir
from popxl.op_records import Op, op_cost
from popxl.replica_grouping import ReplicaGrouping

from popxl_engine.analysis.effects import is_exchange
from popxl_engine.compiler import compile  # noqa: A004
from popxl_engine.ir import Block, Instr, Value, blocks_of
from popxl_engine.ops.definition import declared_cost
from popxl_engine.passes import LEGALIZATION

Group = tuple[str, int, int]
"""Op, size of its groups, their stride (0 where they have no constant one)."""


@dataclass
class Costs:
    """Sums over instructions."""

    flops: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    loaded_bytes: int = 0
    stores: int = 0
    stored_bytes: int = 0
    host_bytes: int = 0
    collectives: dict[Group, tuple[int, int, int]] = field(default_factory=dict)
    """Calls, bytes brought, bytes sent."""

    def add(self, other: "Costs", times: int = 1) -> None:
        """Add another sum ``times`` times."""
        for name, flops in other.flops.items():
            self.flops[name] = self.flops.get(name, 0) + times * flops
        for name in ("loads", "loaded_bytes", "stores", "stored_bytes", "host_bytes"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for group, numbers in other.collectives.items():
            before = self.collectives.get(group, (0, 0, 0))
            calls, brought, sent = (b + times * n for b, n in zip(before, numbers))
            self.collectives[group] = calls, brought, sent

    @property
    def weight(self) -> tuple[int, int]:
        """What makes one branch costlier than another."""
        moved = (
            self.loaded_bytes
            + self.stored_bytes
            + sum(sent for _, _, sent in self.collectives.values())
        )
        return sum(self.flops.values()), moved


class CostCounter:
    """Counts costs of a program's instructions. ``is_first_costlier``: for each conditional,
    whether its first branch costs more; that one is counted.
    """

    def __init__(self, program: Block) -> None:
        self.is_first_costlier: dict[Op, bool] = {}
        self._read = frozenset(v for block in blocks_of(program) for v in _read_in(block))
        self._bodies: dict[Block, Costs] = {}

    def count(self, instrs: Iterable[Instr]) -> Costs:
        """The costs of instructions, with all repeats of their bodies."""
        costs = Costs()
        for instr in instrs:
            if instr.kind == "call":
                costs.add(self._body(instr.bodies[0]))
            elif instr.kind == "repeat":
                costs.add(self._body(instr.bodies[0]), instr.arguments["repeat_count"])
            elif instr.kind == "conditional":
                then, other = (self._body(body) for body in instr.bodies)
                assert instr.source is not None
                self.is_first_costlier[instr.source] = then.weight >= other.weight
                costs.add(then if self.is_first_costlier[instr.source] else other)
            elif instr.kind in ("op", "begin"):
                self._add_op(costs, instr)
        return costs

    def _worked_out(self, instr: Instr) -> list[Value | None]:
        """An op's results, less those that it leaves out, as nothing reads them."""
        assert instr.definition is not None
        needs_all = not instr.definition.residuals
        return [v if needs_all or v in self._read else None for v in instr.outputs]

    def _body(self, body: Block) -> Costs:
        if body not in self._bodies:
            self._bodies[body] = self.count(body.instrs)
        return self._bodies[body]

    def _add_op(self, costs: Costs, instr: Instr) -> None:
        op, definition = instr.source, instr.definition
        assert op is not None and definition is not None
        if definition is op.definition and not definition.residuals:
            cost = op_cost(op)
        else:
            cost = declared_cost(definition, instr.arguments, self._worked_out(instr))
        if cost.flops and not instr.host:
            for name, flops in (cost.parts or {definition.name: cost.flops}).items():
                costs.flops[name] = costs.flops.get(name, 0) + flops
        assert cost.bytes is not None
        if "remote" in definition.effects:
            if "load" in definition.name:
                costs.loads, costs.loaded_bytes = costs.loads + 1, costs.loaded_bytes + cost.bytes
            else:
                costs.stores, costs.stored_bytes = costs.stores + 1, costs.stored_bytes + cost.bytes
        elif "host" in definition.effects:
            costs.host_bytes += cost.bytes
        elif instr.kind == "begin" or is_exchange(instr):
            brought = sum(t.spec.nbytes for t in op.inputs)
            costs.add(Costs(collectives={_group(op): (1, brought, cost.bytes)}))


def costlier_branch(ir: Ir) -> Callable[[Op], bool]:
    """Says of a conditional of a program whether its first branch costs more. The program is
    counted for the first that is asked for.
    """

    @cache
    def counted() -> dict[Op, bool]:
        block = compile(ir, passes=LEGALIZATION, ops=ir.main_graph.ops).block
        counter = CostCounter(block)
        counter.count(block.instrs)
        return counter.is_first_costlier

    return lambda op: counted()[op]


def _read_in(block: Block) -> Iterator[Value]:
    for instr in block.instrs:
        yield from instr.inputs()
    yield from block.outputs


def _group(op: Op) -> Group:
    given: Any = op.arguments.get("group")
    group: ReplicaGrouping = given if given is not None else op.graph.ir.replica_grouping()
    return op.definition.name, group.group_size, group.stride if group.is_const else 0

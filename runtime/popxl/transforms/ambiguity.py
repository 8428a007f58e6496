"""Writes in place whose order nothing fixes: PopXL refuses such programs when a Session is made,
and so do we.

Two accesses of one storage, at least one of them a write, are ambiguous if neither has to run
before the other: by the data that ops hand on, or by `in_sequence`. Ops run in the order in which
they were made, so that a program has a result anyhow; it is not the one that another schedule would
give.

A call counts as a write of an input only if one of its results is an alias of that input, as in
PopXL: a called graph that changes what it takes by reference, and returns nothing of it, reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from popart import popart_exception

from popxl.context import ExecutionContext
from popxl.graph import Graph, called_first
from popxl.ir import Ir
from popxl.opdef import Op
from popxl.ops.shape import resolve_slices
from popxl.tensor import Tensor
from popxl.transforms.op_order import OpOrder, Steps
from popxl.transforms.storage import aliased

Box = tuple[tuple[int, int], ...] | None
"""First and last-but-one position on each axis of a storage's owner; None: all of it."""

STEPS_PER_OPERAND = 16
"""Upper limit of the work of one check, for each op, operand and result of the graph."""

WIDEST_JOIN = 64
"""A view of more tensors than this counts as storage of its own, so that views of views do not grow
without limit.
"""


class Region(NamedTuple):
    """The place of a tensor's elements: a part of the storage that ``root`` owns."""

    root: Tensor
    box: Box = None
    is_plain: bool = True
    """Whether the tensor's axes are the root's, so that a slice of it is a smaller box."""


class Access(NamedTuple):
    """One op reads or writes a region through one of its operands."""

    op: Op
    operand: Tensor
    region: Region
    is_write: bool


class Called(NamedTuple):
    """What calls of a graph do to the inputs that they give by reference."""

    written: set[Tensor]
    """Inputs that it changes and returns aliases of."""
    returned: list[set[Tensor]]
    """The inputs of which each output is one."""


@dataclass
class Recent:
    """The last write to a box, and the reads since."""

    write: Access | None = None
    reads: list[Access] = field(default_factory=list)


def check_ambiguity(ir: Ir, steps: Steps | None = None) -> None:
    """Refuse a program with writes in place whose order nothing fixes.

    Linear in the program: a graph takes at most `STEPS_PER_OPERAND` steps for each of its ops,
    operands and results, whatever the graphs that it calls, each of which is looked at once. One
    pass finds which storage is written; only its accesses are looked at further. As creation order
    is one of the valid orders, the accesses of a storage are all ordered if each write comes after
    the write before it and after the reads in between, and each read after the last
    write: every access is in at most two such pairs. `OpOrder` decides most pairs in constant time
    and searches for the others. Where the steps of a graph do not suffice, what is not decided
    passes.

    Args:
        steps: counts the steps, over all graphs.
    Raises:
        popart_exception: names the tensor, both ops, and what to do.
    """
    total = steps or Steps()
    known: dict[Graph, Called] = {}
    for graph in called_first(ir.main_graph):
        total.take(len(graph.ops))
        regions, writes = _find_storage(graph, known)
        roots = _roots((t for ts in writes.values() for t in ts), regions)
        changed = roots.intersection(graph.inputs)
        returned = [changed.intersection(_roots((t,), regions)) for t in graph.outputs]
        known[graph] = Called(set().union(*returned), returned)
        if roots:
            _check_graph(graph, _accesses(graph, roots, regions, writes), total)


def _check_graph(graph: Graph, accesses: list[Access], total: Steps) -> None:
    """Check the accesses of written storage, given in the order of the ops."""
    size = sum(1 + len(op.inputs) + len(op.outputs) for op in graph.ops)
    steps = Steps(STEPS_PER_OPERAND * size)
    parts: dict[ExecutionContext, list[Op]] = {}
    for op in graph.ops:
        parts.setdefault(op.execution, []).append(op)
    for execution, ops in parts.items():  # they run one after another
        part = [a for a in accesses if a.op.execution is execution]
        if any(a.is_write for a in part) and not _is_one_sequence(part):
            _check_part(OpOrder(ops, steps), part)
    total.count += steps.count


def _is_one_sequence(accesses: list[Access]) -> bool:
    """Whether all of them are steps of one ordered block, as in a program that is built in
    sequence.
    """
    block = accesses[0].op.sequence_block
    return (
        block is not None
        and block.is_ordered
        and all(a.op.sequence_block is block for a in accesses)
    )


def _check_part(order: OpOrder, accesses: list[Access]) -> None:
    recent: dict[Tensor, dict[Box, Recent]] = {}
    for access in accesses:
        boxes = recent.setdefault(access.region.root, {})
        for box, known in list(boxes.items()):
            if not order.steps.take():
                return
            if _overlap(box, access.region.box):
                for before in _unchecked(known, access):
                    if not order.is_before(before.op, access.op):
                        _refuse(before, access)
                if (
                    access.is_write
                    and box != access.region.box
                    and _overlap_is_all(box, access.region.box)
                ):
                    del boxes[box]
        mine = boxes.setdefault(access.region.box, Recent())
        if access.is_write:
            mine.write, mine.reads = access, []
        else:
            mine.reads.append(access)


def _unchecked(known: Recent, access: Access) -> list[Access]:
    """Accesses that an access has to come after; others come before these."""
    if access.is_write and known.reads:
        return [a for a in known.reads if a.op is not access.op]
    return [] if known.write is None or known.write.op is access.op else [known.write]


def _roots(tensors: Iterable[Tensor], regions: dict[Tensor, tuple[Region, ...]]) -> set[Tensor]:
    """Owners of the storage of tensors."""
    return {region.root for t in tensors for region in regions.get(t) or (Region(t),)}


def _find_storage(
    graph: Graph, known: dict[Graph, Called]
) -> tuple[dict[Tensor, tuple[Region, ...]], dict[Op, set[Tensor]]]:
    """The places of the tensors that lie in storage of others, and what each op that writes writes
    to.

    Args:
        known: graphs that it calls.
    """
    regions: dict[Tensor, tuple[Region, ...]] = {}
    writes: dict[Op, set[Tensor]] = {}
    for op in graph._ops:
        definition = op.definition
        if definition.writes or "control" in definition.effects:
            if written := _written(op, known):
                writes[op] = written
                if op.called():
                    _add_returned(op, known, regions)
        if definition.writes or definition.alias:
            for result in op.outputs:
                if found := _regions_of_result(result, regions):
                    regions[result] = found
    return regions, writes


def _accesses(
    graph: Graph,
    roots: set[Tensor],
    regions: dict[Tensor, tuple[Region, ...]],
    writes: dict[Op, set[Tensor]],
) -> list[Access]:
    """Every access of some storage, in the order of the ops. What makes a view reads nothing."""
    accesses: list[Access] = []
    for op in graph._ops:
        written = writes.get(op, ())
        viewed = op.viewed if op.definition.alias else ()
        for t in dict.fromkeys(op.inputs):
            found = regions.get(t)
            if found is None:
                if t in roots and t not in viewed:
                    accesses.append(Access(op, t, Region(t), t in written))
            elif t not in viewed:
                accesses += [
                    Access(op, t, region, t in written) for region in found if region.root in roots
                ]
    return accesses


def _written(op: Op, known: dict[Graph, Called]) -> set[Tensor]:
    """Operands that the op writes to: for calls those that it gives by reference and has an alias
    of as a result.
    """
    if not op.called():
        return set(op.written)
    return {
        outer
        for graph, inputs in op.called()
        for inner, outer in zip(graph.inputs, inputs)
        if inner in known[graph].written and op.is_by_reference(inner)
    }


def _add_returned(
    op: Op, known: dict[Graph, Called], regions: dict[Tensor, tuple[Region, ...]]
) -> None:
    """Add where the results of a call are that are aliases of what it writes to."""
    for graph, inputs in op.called():
        given = {i: o for i, o in zip(graph.inputs, inputs) if op.is_by_reference(i)}
        for result, inside in zip(op.outputs, known[graph].returned):
            if found := _joined([given[t] for t in inside if t in given], regions):
                regions[result] = found


def _regions_of_result(
    result: Tensor, regions: dict[Tensor, tuple[Region, ...]]
) -> tuple[Region, ...]:
    """The place where a result that aliases operands is; () for one with storage of its own."""
    sources = aliased(result)
    op = result._op
    if not result.nelms:  # it shares no element with anything
        return ()
    if len(sources) != 1 or op is None:
        return _joined(sources, regions)
    found = regions.get(sources[0]) or (Region(sources[0]),)
    if op.definition.writes:
        return found
    if op.definition.name == "slice_" and len(found) == 1 and found[0].is_plain:
        return (Region(found[0].root, _sliced(op, found[0]), True),)
    return _joined(sources, regions)


def _joined(
    sources: Sequence[Tensor], regions: dict[Tensor, tuple[Region, ...]]
) -> tuple[Region, ...]:
    """The places of a view of tensors."""
    joined = (region for t in sources for region in regions.get(t) or (Region(t),))
    found = tuple(dict.fromkeys(Region(r.root, r.box, False) for r in joined))
    return found if len(found) <= WIDEST_JOIN else ()


def _sliced(op: Op, region: Region) -> Box:
    a, shape = op.arguments, op.viewed[0].shape
    offsets = [first for first, _ in region.box] if region.box is not None else [0] * len(shape)
    slices = resolve_slices(shape, a["start"], a["stop"], a["step"], a["axis"])
    ranges = [range(*s.indices(n)) for s, n in zip(slices, shape)]
    return tuple((at + min(r), at + max(r) + 1) for at, r in zip(offsets, ranges))


def _overlap(one: Box, other: Box) -> bool:
    return (
        one is None or other is None or all(a < d and c < b for (a, b), (c, d) in zip(one, other))
    )


def _overlap_is_all(inner: Box, outer: Box) -> bool:
    """Whether every part of ``inner`` is in ``outer``."""
    if inner is None or outer is None:
        return outer is None
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer))


def _refuse(before: Access, access: Access) -> None:
    graph, t = access.op.graph, access.region.root
    raise popart_exception(
        f"Inplacing ambiguity detected. Session: got %{t.name}: {t.spec} of graph "
        f"'{graph.name or 'main'}', which {_described(before)} and {_described(access)}; expected "
        "an order of the two, but nothing says which comes first. Put both into `with "
        "popxl.in_sequence():`, let one use the result of the other, or use the out-of-place "
        "form of the write. With the session option enableInplaceAmbiguityChecking = False they "
        "run in the order in which they were made."
    )


def _described(access: Access) -> str:
    through = "" if access.operand is access.region.root else f" through %{access.operand.name}"
    return (
        f"op '{access.op.definition.name}', built at {access.op.where}, "
        f"{'writes to' if access.is_write else 'reads'}{through}"
    )

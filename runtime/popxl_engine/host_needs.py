"""What a program takes of the host's memory where its replicas run on processors: rows that have
memory, and tensors, phase by phase.
"""

from collections.abc import Sequence, Set

from popxl.ir import Ir
from popxl.plan import Event
from popxl.remote_files import HostNeeds

from popxl_engine.checks import check_executable
from popxl_engine.compiler import compile, ops_by_run  # noqa: A004
from popxl_engine.machine.device import PROCESSOR
from popxl_engine.machine.lifetimes import Lifetimes
from popxl_engine.machine.mapped_files import can_be_mapped
from popxl_engine.machine.paging.paged_buffer import RowId, nbytes_of
from popxl_engine.planner.costs import costlier_branch
from popxl_engine.planner.dry_run import peak_bytes
from popxl_engine.planner.phases import MAIN
from popxl_engine.residency import blocks_apart, readable_rows, row_events, stays, uses_of

TOGETHER = 16
"""Replicas that are dry-run together; of more, each is taken to have its peak when all have."""


def host_needs(ir: Ir, mapped: bool) -> HostNeeds:
    """See `popxl.extensions.host_needs`."""
    check_executable(ir)
    block = compile(ir, ops=ops_by_run(ir).run).block
    apart = blocks_apart(ir, PROCESSOR.where)
    here, replicas = ir.instance_replication_factor, ir.replication_factor
    together, where = 1 < replicas <= TOGETHER, PROCESSOR.where
    tensors: dict[str, int] = {}
    for each in (block, *apart):
        peaks = peak_bytes(ir, True, together, costlier_branch(ir), where, each)
        tensors.update({name: max(most, tensors.get(name, 0)) for name, most in peaks.items()})
    share = here / replicas if together else here
    everything = sum(nbytes_of(b) * b.entries for b in ir.remote_buffers)
    dropped = mappable_rows(ir) if mapped else set()
    everything -= sum(nbytes_of(buffer) for buffer, _ in dropped)
    events = row_events(ir, block) if stays(ir, PROCESSOR) else None
    if events:
        rows = most_held(ir, events, readable_rows(ir, apart), dropped)
    else:
        rows = dict.fromkeys(tensors, everything)
    # a phase that takes none has those beside it that others have left
    beside = max(rows.values(), default=0)
    found = {
        phase: (here * rows.get(phase, beside), round(share * tensors.get(phase, 0)))
        for phase in {*rows, *tensors}
    }
    most: tuple[int, int] = max(found.values(), key=sum, default=(0, 0))
    return HostNeeds(*most, all_rows=here * everything, phases=found)


def mappable_rows(ir: Ir) -> set[RowId]:
    """Rows that a variable's memory-mapped file may be."""
    found: set[RowId] = set()
    for variable in ir.main_graph.variables:
        location = variable.location_info
        if location is not None and can_be_mapped(variable, ir.instance_replication_factor):
            found.add((location.buffer, location.offset))
    return found


def most_held(
    ir: Ir, events: Sequence[Event], readable: set[RowId], dropped: Set[RowId]
) -> dict[str, int]:
    """Most bytes of rows that have memory at a time on one replica, by phase.

    A row has memory from its first use until its contents are over; those that pass something on
    from run to run always have.

    Args:
        readable: rows that may be read between runs.
        dropped: rows that do not count.
    """
    sizes = {(b, i): nbytes_of(b) for b in ir.remote_buffers for i in range(b.entries)}
    sizes.update(dict.fromkeys(dropped, 0))
    uses = uses_of(ir, events)
    used = {row for row, _ in uses}
    lifetimes = Lifetimes(uses, readable)
    held = (used | readable) - set(lifetimes.over_before)
    total = sum(sizes[row] for row in held)
    most = {MAIN: total}
    for time, (event, (row, _)) in enumerate(zip(events, uses), start=1):
        if row not in held:
            held.add(row)
            total += sizes[row]
        most[event.phase] = max(most.get(event.phase, 0), total)
        if time in lifetimes.over_after and row in held:
            held.remove(row)
            total -= sizes[row]
    most[MAIN] = max(most[MAIN], total)  # it ends the run, too
    return most

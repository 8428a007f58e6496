"""What a program takes of the host's memory where its replicas run on processors: rows that have
memory, and tensors, phase by phase.
"""

from collections.abc import Sequence

from popxl.ir import Ir
from popxl.plan import Event
from popxl.remote_files import HostNeeds

from popxl_engine.checks import check_executable
from popxl_engine.compiler import compile, ops_by_run  # noqa: A004
from popxl_engine.machine.device import PROCESSOR
from popxl_engine.machine.lifetimes import Lifetimes
from popxl_engine.machine.paging.paged_buffer import RowId, nbytes_of
from popxl_engine.planner.costs import costlier_branch
from popxl_engine.planner.dry_run import peak_bytes
from popxl_engine.planner.phases import MAIN
from popxl_engine.residency import readable_rows, row_events, stays, uses_of

TOGETHER = 16
"""Replicas that are dry-run together; of more, each is taken to have its peak when all have."""


def host_needs(ir: Ir) -> HostNeeds:
    """See `popxl.extensions.host_needs`."""
    check_executable(ir)
    upload_ops, run_ops = ops_by_run(ir)
    block = compile(ir, ops=run_ops).block
    after_upload = compile(ir, ops=upload_ops).block if upload_ops else None
    here, replicas = ir.instance_replication_factor, ir.replication_factor
    together, where = 1 < replicas <= TOGETHER, PROCESSOR.where
    whole = None if upload_ops else block
    tensors = peak_bytes(ir, True, together, costlier_branch(ir), where, whole)
    share = here / replicas if together else here
    everything = sum(nbytes_of(b) * b.entries for b in ir.remote_buffers)
    events = row_events(ir, block) if stays(ir, PROCESSOR) else None
    if events:
        rows = most_held(ir, events, readable_rows(ir, after_upload))
    else:
        rows = dict.fromkeys(tensors, everything)
    found = {
        phase: (here * rows.get(phase, 0), round(share * tensors.get(phase, 0)))
        for phase in {*rows, *tensors}
    }
    most: tuple[int, int] = max(found.values(), key=sum, default=(0, 0))
    return HostNeeds(*most, all_rows=here * everything)


def most_held(ir: Ir, events: Sequence[Event], readable: set[RowId]) -> dict[str, int]:
    """Most bytes of rows that have memory at a time on one replica, by phase.

    A row has memory from its first use until its contents are over; those that pass something on
    from run to run always have.

    Args:
        readable: rows that may be read between runs.
    """
    sizes = {b: nbytes_of(b) for b in ir.remote_buffers}
    uses = uses_of(ir, events)
    used = {row for row, _ in uses}
    lifetimes = Lifetimes(uses, readable)
    held = (used | readable) - set(lifetimes.over_before)
    total = sum(sizes[buffer] for buffer, _ in held)
    most = {MAIN: total}
    for time, (event, (row, _)) in enumerate(zip(events, uses), start=1):
        if row not in held:
            held.add(row)
            total += sizes[row[0]]
        most[event.phase] = max(most.get(event.phase, 0), total)
        if time in lifetimes.over_after and row in held:
            held.remove(row)
            total -= sizes[row[0]]
    return most

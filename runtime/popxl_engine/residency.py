"""What memory for moving rows must know of a program: the order of its rows, and how many it uses
at a time.

Rows come and go between files and the host's memory
(`popxl.extensions.keep_remote_memory_in_files`), or between the host's memory and a device's
(`popxl.extensions.limit_device_memory`; on a GPU always).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from popxl.errors import GraphError, RemoteMemoryError
from popxl.ir import Ir
from popxl.plan import Event
from popxl.remote_files import DeviceNeeds

from popxl_engine.analysis.effects import instrs_run
from popxl_engine.compiler import compile, ops_by_run  # noqa: A004
from popxl_engine.ir import Block
from popxl_engine.machine.device import Device
from popxl_engine.machine.lifetimes import Lifetimes
from popxl_engine.machine.paging import FileStore, HostStore, Paging, StagedStore, Store, budget_of
from popxl_engine.machine.paging.paged_buffer import RowId, in_blocks, nbytes_of
from popxl_engine.planner.phases import MAIN
from popxl_engine.planner.row_usage import InUse, in_use
from popxl_engine.planner.sequence import events_of

AUTO = 0.9
"""Share of the memory that is free on a GPU which a program takes where nothing is said."""
HOST, DEVICE = "host memory", "device memory for rows"
"""Kinds of memory that rows come and go in."""
MAX_INSTRS_FOLLOWED = 10_000_000
"""Instructions of a run that is followed to know the order of its rows: some minutes."""


def paging_of(
    ir: Ir, block: Block | None, apart: Sequence[Block], device: Device, replicas: int
) -> Paging | None:
    """How rows come and go; None where they are used where they are. ``POPXL_LOOK_AHEAD=0``: no
    look-ahead.

    Args:
        block: of the compiled program; None where it is interpreted.
        apart: of what runs between runs, for uploads and downloads, and finds the rows that runs
            left.
        replicas: in this process.
    Raises:
        RemoteMemoryError: a limit on the device's memory that the program does not fit into.
    """
    if not ir.remote_buffers or stays(ir, device):
        return None
    on_host = _on_host(ir, device)

    def open_store(nbytes: int, largest: int) -> Store:
        if ir.remote_files is None:
            return HostStore(nbytes, device)
        store = FileStore(ir.remote_files.folder, nbytes)
        return store if on_host else StagedStore(store, largest, device)

    found = _in_use(ir, device.where, block, apart)
    events = row_events(ir, block) if block is not None else None
    memory = ir.remote_files.memory if on_host else _device_memory(ir, device, replicas, found)
    return Paging(
        what=HOST if on_host else DEVICE,
        store="host memory" if ir.remote_files is None else "files",
        memory=memory,
        open_store=open_store,
        device=device,
        events=uses_of(ir, events) if events is not None else None,
        variables=readable_rows(ir, apart),
        needed=(found.rows, f"phase {found.phase}"),
        look_ahead=os.environ.get("POPXL_LOOK_AHEAD", "1") not in ("", "0"),
    )


def lifetimes_of(
    ir: Ir, block: Block | None, apart: Sequence[Block], device: Device
) -> Lifetimes | None:
    """When rows that are used where they are may give up their memory; None where that is not
    known.

    Arguments as of `paging_of`.
    """
    if block is None or not ir.remote_buffers or not stays(ir, device):
        return None
    events = row_events(ir, block)
    return Lifetimes(uses_of(ir, events), readable_rows(ir, apart)) if events else None


def _on_host(ir: Ir, device: Device) -> bool:
    return device.where.type == "cpu" and ir.device_memory is None


def stays(ir: Ir, device: Device) -> bool:
    """Whether rows are used where they are."""
    return _on_host(ir, device) and ir.remote_files is None


def readable_rows(ir: Ir, apart: Iterable[Block]) -> set[RowId]:
    """Rows that may be read between runs: by the host, or by what runs there for uploads and
    downloads.
    """
    locations = [v.location_info for v in ir.main_graph.variables if v.location_info is not None]
    found = {(location.buffer, location.offset) for location in locations}
    for block in apart:
        events = row_events(ir, block)
        if events is None:
            found |= {(b, i) for b in ir.remote_buffers for i in range(b.entries)}
        else:
            found |= {row for row, _ in uses_of(ir, events)}
    return found


def blocks_apart(ir: Ir, where: torch.device) -> list[Block]:
    """What runs between runs, for uploads and downloads, compiled for a device."""
    parts = ops_by_run(ir)
    between = parts.after_upload, parts.before_download
    return [compile(ir, where, ops=ops).block for ops in between if ops]


def device_needs(ir: Ir, device: str) -> DeviceNeeds:
    """See `popxl.extensions.device_needs`."""
    where = torch.device(device)
    found = _most(ir, where, [None, *blocks_apart(ir, where)])
    working = found.working
    return DeviceNeeds(found.rows + working, _all_rows(ir) + working, working)


def _in_use(ir: Ir, where: torch.device, block: Block | None, apart: Sequence[Block]) -> InUse:
    """What a replica needs at a time on a device, as far as that is known before."""
    try:
        return _most(ir, where, [block, *apart])
    except GraphError:  # it finds out when it runs
        return InUse(0, MAIN, 0)


def _most(ir: Ir, where: torch.device, blocks: Iterable[Block | None]) -> InUse:
    """The most of what blocks need, see `_dry_run`."""
    found = [_dry_run(ir, where, block) for block in blocks]
    return replace(
        max(found, key=lambda each: each.rows), working=max(each.working for each in found)
    )


def _dry_run(ir: Ir, where: torch.device, block: Block | None = None) -> InUse:
    """What a replica needs at a time on a device, with room for one more row; no more than all rows
    take. ``block``: of the whole program, compiled for it; default: it is compiled.
    """
    largest = max((in_blocks(nbytes_of(b)) for b in ir.remote_buffers), default=0)
    found = in_use(ir, lambda buffer: in_blocks(nbytes_of(buffer)), where, block)
    return replace(found, rows=min(found.rows + largest, _all_rows(ir)) if found.rows else 0)


def _all_rows(ir: Ir) -> int:
    """Bytes of all rows of a replica."""
    return sum(in_blocks(nbytes_of(b)) * b.entries for b in ir.remote_buffers)


def _device_memory(ir: Ir, device: Device, replicas: int, needed: InUse) -> int:
    """Bytes of a device for the rows of a process's replicas: what is left beside all else that the
    program needs.
    """
    limit = ir.device_memory
    if device.where.type == "cuda":
        free, total = torch.cuda.mem_get_info(device.where)
        # torch keeps it
        free += torch.cuda.memory_reserved(device.where) - torch.cuda.memory_allocated(device.where)
        # other sessions give it up while this one runs
        free += budget_of(DEVICE, device.where).held_bytes
        most = (
            AUTO * free if limit is None else limit * total if isinstance(limit, float) else limit
        )
        limit = min(int(most), free)
    elif isinstance(limit, float):
        raise RemoteMemoryError(
            f"device memory: got a share of {limit} on a processor; expected bytes. Give a "
            "number of bytes."
        )
    assert isinstance(limit, int)
    rows, working = replicas * needed.rows, replicas * needed.working
    if limit < rows + working:
        raise RemoteMemoryError(
            f"device memory: got {limit} bytes of {device.where}; expected at least "
            f"{rows + working}: {rows} for the rows in use at a time in phase {needed.phase}, and "
            f"{working} for all else. Take more, or smaller micro-batches, recomputation, or more "
            "replicas to shard over."
        )
    return limit - working


def row_events(ir: Ir, block: Block) -> list[Event] | None:
    """The rows that every run takes, as far as they follow from constants and loop counters alone.

    None, too, where a run is very long: one of nested calls may be longer than anybody can wait
    for.
    """
    if instrs_run(block) > MAX_INSTRS_FOLLOWED:
        return None
    try:
        return [event for event in events_of(ir, block, {}) if event.kind != "collective"]
    except GraphError:  # a row whose number is in a variable, or on the device
        return None


def uses_of(ir: Ir, events: Sequence[Event]) -> list[tuple[RowId, bool]]:
    """The rows of events of a program, each with whether it is stored."""
    buffers = {str(b.remote_buffer_id): b for b in ir.remote_buffers}
    return [((buffers[event.name], event.row), event.kind == "store") for event in events]

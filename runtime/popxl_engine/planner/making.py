"""Puts a plan together."""

from collections import defaultdict

import torch
from popxl.ir import Ir
from popxl.plan import Collective, Phase, Plan, TimelineStep
from popxl.remote_buffer import RemoteBuffer

from popxl_engine.analysis.effects import effects_of_instr
from popxl_engine.checks import check_executable
from popxl_engine.compiler import compile  # noqa: A004
from popxl_engine.ir import Block
from popxl_engine.machine.paging.paged_buffer import nbytes_of
from popxl_engine.passes import LEGALIZATION, LINKS_ALL, PASSES_APART, enabled_passes
from popxl_engine.planner.costs import CostCounter, Costs
from popxl_engine.planner.dry_run import peak_bytes
from popxl_engine.planner.phases import in_phases, runs_of, steps_of_run
from popxl_engine.planner.timeline import timelines


def make_plan(
    ir: Ir,
    borrows_rows: bool = False,
    together: bool = False,
    device: str = "cpu",
    with_peaks: bool = True,
) -> Plan:
    """See `popxl.planning.plan`."""
    check_executable(ir)
    # work and traffic are those of the program, before any fusion, as if each replica had a machine
    links = enabled_passes(passes=LINKS_ALL)
    block = compile(ir, passes=(*links, *LEGALIZATION)).block
    counter = CostCounter(block)
    costs: defaultdict[str, Costs] = defaultdict(Costs)
    reached: defaultdict[str, set[RemoteBuffer]] = defaultdict(set)
    for name, instr, times in in_phases(ir, block):
        costs[name].add(counter.count([instr]), times)
        effects = effects_of_instr(instr)
        reached[name] |= effects.loaded_buffers | effects.stored_buffers
    timeline = timelines(ir, block, counter)
    where = torch.device(device)
    peaks: dict[str, int] = {}
    if with_peaks:
        apart = None if together or ir.replication_factor == 1 else _apart(ir, where)
        takes_first = counter.is_first_costlier.__getitem__
        peaks = peak_bytes(ir, borrows_rows, together, takes_first, where, apart)
    runs = runs_of(ir)
    buffers = {b: nbytes_of(b) * b.entries for b in ir.remote_buffers}
    return Plan(
        replicas=ir.replication_factor,
        steps=steps_of_run(ir),
        phases=tuple(
            _phase(
                name,
                runs[name],
                costs[name],
                peaks.get(name, 0),
                sum(buffers[b] for b in reached[name]),
                timeline.get(name, ()),
            )
            for name in costs
        ),
        remote_memory_bytes=sum(buffers.values()),
        buffers={
            f"{b.remote_buffer_id}: "
            f"{b.entries} x {b.tensor_dtype.name}{list(b.tensor_shape)}": nbytes
            for b, nbytes in buffers.items()
        },
    )


def _apart(ir: Ir, device: torch.device) -> Block:
    """A program as it is compiled where each replica has a machine."""
    return compile(ir, device, enabled_passes(device, PASSES_APART)).block


def _phase(
    name: str,
    runs: int,
    costs: Costs,
    peak: int,
    reached: int,
    timeline: tuple[TimelineStep, ...],
) -> Phase:
    collectives: list[tuple[tuple[str, int, int], tuple[int, int, int]]] = sorted(
        costs.collectives.items()
    )
    return Phase(
        name=name,
        runs=runs,
        flops_by_op=dict(sorted(costs.flops.items())),
        loads=costs.loads,
        loaded_bytes=costs.loaded_bytes,
        stores=costs.stores,
        stored_bytes=costs.stored_bytes,
        host_bytes=costs.host_bytes,
        peak_bytes=peak,
        remote_memory_bytes=reached,
        collectives=tuple(Collective(*group, *numbers) for group, numbers in collectives),
        timeline=timeline,
    )

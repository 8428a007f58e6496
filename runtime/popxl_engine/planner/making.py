"""Puts a plan together."""

from typing import Dict, List, Set, Tuple

import torch
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.plan import Collective, Phase, Plan
from popxl.remote_buffer import RemoteBuffer

from popxl_engine.blocks import Block, Instr
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.lowering import Lowering
from popxl_engine.machine.memory import Rows
from popxl_engine.optimise import optimise
from popxl_engine.planner.costs import Costs, Counter
from popxl_engine.planner.phases import in_phases, runs_of, step_of
from popxl_engine.planner.rehearsal import peak_bytes


def make_plan(ir: Ir, borrows_rows: bool = False, together: bool = False, device: str = "cpu") -> Plan:
    """See `popxl.plan.plan`."""
    block = Lowering().main(ir.main_graph)  # work and traffic are those of the program, before any fusion
    optimise(block)
    graph, inner, steps = step_of(ir, block)
    counter, grouped = Counter(), _grouped(graph, inner)
    costs = {name: counter.count(instrs) for name, instrs in grouped.items()}
    peaks = peak_bytes(ir, borrows_rows, together, counter.dearer, torch.device(device))
    runs = runs_of(graph)
    buffers = {b: Rows(b.tensor_shape, torch_dtype(b.tensor_dtype), b.entries).nbytes for b in ir.remote_buffers}
    reached = {name: sum(buffers[b] for b in _reached(instrs)) for name, instrs in grouped.items()}
    return Plan(
        replicas=ir.replication_factor,
        steps=steps,
        phases=tuple(_phase(name, runs.get(name, 1), costs[name], peaks.get(name, 0), reached[name]) for name in costs),
        remote_memory_bytes=sum(buffers.values()),
        buffers={
            f"{b.remote_buffer_id}: {b.entries} x {b.tensor_dtype.name}{list(b.tensor_shape)}": nbytes
            for b, nbytes in buffers.items()
        },
    )


def _grouped(graph: Graph, block: Block) -> Dict[str, List[Instr]]:
    found: Dict[str, List[Instr]] = {}
    for name, instr in in_phases(graph, block):
        found.setdefault(name, []).append(instr)
    return found


def _reached(instrs: List[Instr]) -> Set[RemoteBuffer]:
    """Remote buffers that instructions load from or store to, in bodies too."""
    around = Block("", instrs=instrs)
    return around.buffers("remote_load") | around.buffers("remote_store")


def _phase(name: str, runs: int, costs: Costs, peak: int, reached: int) -> Phase:
    collectives: List[Tuple[Tuple[str, int, int], Tuple[int, int, int]]] = sorted(costs.collectives.items())
    return Phase(
        name=name,
        runs=runs,
        flops_by_op=dict(sorted(costs.flops.items())),
        loads=costs.loads,
        loaded_bytes=costs.loaded,
        stores=costs.stores,
        stored_bytes=costs.stored,
        host_bytes=costs.host,
        peak_bytes=peak,
        remote_memory_bytes=reached,
        collectives=tuple(Collective(*group, *numbers) for group, numbers in collectives),
    )

"""Collectives of one process among several, timed for `collectives.py`: ours, and by Gloo."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as distributed
from popdist import exchange, getInstanceIndex, getNumInstances
from popxl_engine.kernels.collectives import APART, READS, by_tree, reduction
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.machine.allocator import keep_tensors_together
from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.communicator import Communicator
from popxl_engine.machine.fabric import Fabric

from benchmarks.harness import BenchmarkError

CASES = {
    "gather a weight's shards, 600 KiB": ("gather", "float16", 307_200),
    "scatter the sum of its gradients, 4.7 MiB": ("scatter", "float32", 1_228_800),
    "sum activations, 8.75 MiB": ("reduce", "float16", 4_587_520),
    "sum activations, 2.5 MiB": ("reduce", "float16", 1_310_720),
    "gather activations, 640 KiB": ("gather", "float16", 327_680),
    "gather, 24 KiB": ("gather", "float16", 12_288),
    "sum, 4.1 KiB": ("reduce", "float32", 1040),
    "sum one number": ("reduce", "float32", 1),
}
"""Collective, type, numbers that a replica brings."""
Run = Callable[[], Any]


def ways(kind: str, t: Any, size: int, position: int) -> tuple[Run, dict[str, Run]]:
    """A collective of the runtime, and by Gloo; each gives this replica's result."""
    op, arguments = {
        "gather": (
            "replicated_all_gather",
            {"axis": 0, "output_shape": "meta_shape", "whole": (size * t.numel(),)},
        ),
        "scatter": (
            "replicated_reduce_scatter",
            {"op": "add", "configure_output_for_replicated_tensor_sharding": True},
        ),
        "reduce": ("replicated_all_reduce", {"op": "add"}),
    }[kind]
    arguments["group"] = None
    fabric = Fabric(size, range(position, position + 1))

    def ours() -> Any:
        arrival = Arrival(
            site=op,
            members=tuple(range(size)),
            operands=[t],
            combine=lambda ts: KERNELS[op](ts, **arguments),
            apart=lambda team, own: APART[op](team, own, **arguments),
            describe=op,
            reads=READS.get(op, "all"),
            reduce=reduction(op, arguments.get("op")),
        )
        _, results = fabric.finish([fabric.begin({position: arrival})])
        return results[position]

    length = -(-t.numel() // size)
    padded = torch.cat([t, t.new_zeros(length * size - t.numel())])
    team = Communicator(size, position, distributed.group.WORLD)

    def scattered() -> Any:
        pieces = torch.empty_like(padded)
        distributed.all_to_all_single(pieces, padded)
        return by_tree(list(pieces.view(size, -1)), "add")

    theirs: dict[str, dict[str, Run]] = {
        "gather": {"gather": lambda: team.gather(t).view(-1)},
        "scatter": {"all to all": scattered},
        "reduce": {
            "gather": lambda: by_tree(list(team.gather(t)), "add"),
            "all to all": lambda: team.gather(scattered()).view(-1)[: t.numel()],
        },
    }
    return ours, theirs[kind]


def timed(run: Run, count: int) -> float:
    """Seconds of one of so many."""
    begin = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begin) / count


def run_instance(options: Mapping[str, Any]) -> None:
    """One process: every case by every way, in turn; instance 0 prints the least seconds."""
    torch.set_num_threads(1)
    keep_tensors_together()  # as runs do
    size, position = getNumInstances(), getInstanceIndex()
    exchange.connect()
    store = distributed.FileStore(options["store"], size)
    distributed.init_process_group("gloo", store=store, rank=position, world_size=size)
    for case, (kind, dtype, numbers) in CASES.items():
        t = torch.randn(numbers, generator=torch.Generator().manual_seed(position))
        ours, theirs = ways(kind, t.to(getattr(torch, dtype)), size, position)
        runs = {"ours": ours, **theirs}
        expected = ours().clone()
        counts = {}
        for name, run in runs.items():
            if not torch.equal(run(), expected):
                raise BenchmarkError(f"{case}: {name} gives other bits")
            took = exchange.gather(timed(run, 2))[0]
            counts[name] = max(2, int(options["seconds"] / took))
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options["rounds"]):
            for name, run in runs.items():
                exchange.barrier()
                found[name].append(timed(run, counts[name]))
        seconds = {name: min(of) for name, of in found.items()}
        own = seconds.pop("ours")
        way = min(seconds, key=seconds.__getitem__)
        figures = {"case": case, "seconds": own, "gloo_seconds": seconds[way], "gloo_way": way}
        if position == 0:
            print(json.dumps(figures | {"ratio": own / seconds[way]}), flush=True)
    exchange.barrier()
    distributed.destroy_process_group()

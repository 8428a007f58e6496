"""Training with state three times larger than the memory that the process may use, from files on a
local disk.

    python benchmarks/larger_than_memory.py              # 248 M parameters, 7 GB on the disk
    python benchmarks/larger_than_memory.py --batches 1 16 --folder /another/disk

The limit is a third of weights and optimizer state: 12 bytes a parameter with moments in float32, 8
in bfloat16, for which the largest batch is measured too. Where the system lets us, a memory cgroup
holds the process to it; else files go past the page cache, and the largest resident set with what
is cached of them is compared with it. The same steps in memory, without a limit, are the compute
ceiling, and their losses must be the same bits. The disk's bandwidth is
measured in the same run. A step can take no less than the larger of the two: "of the bound" is that
over what it took. The traffic of weights and optimizer is the same for every batch, so that the bar
is for the largest, where the steps come nearest to those in memory.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import (  # noqa: E402
    BenchmarkError,
    Figures,
    Measurement,
    Variant,
    add_run_counts,
    gib,
    machine,
    main_or_worker,
    measure,
    print_json,
    run_counts,
    table,
)
from benchmarks.memory_limits import Cgroup, cached_bytes, join_cgroup, remove_cgroup  # noqa: E402

SHARE = 3
"""State over the limit, at least."""
BAR = 0.8
"""Of the bound, at least."""
WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
PROCESS_MIB = 480
"""What a process takes beside its rows, with some to spare: Python, PyTorch, the program,
activations of a layer.
"""
BLOCK_MIB = 8
"""Of a transfer, where the disk is measured."""


class Larger:
    """A training session whose rows are in files, or in memory."""

    def __init__(self, options: Figures):
        self.cgroup: Cgroup | None = None
        if options["limit"]:
            self.cgroup = join_cgroup(options["cgroup"], options["limit"], options["cgroup_kind"])
        from benchmarks.phased import PhasedTrainer
        from popxl_gpt.config.schema import Config, Execution, Model, Training
        from popxl_gpt.utils.runtime import file_traffic

        model, batch = Model(**options["model"], dropout=0.0), options["batch"]
        training = Training(
            steps=1000,
            global_batch_size=batch,
            learning_rate=1e-4,
            schedule="constant",
            moment_precision=options["moments"],
            stochastic_rounding=True,
        )
        execution = Execution(
            memmap_dir=options["folder"],
            host_memory=options["host_memory"],
            device_iterations=options["iterations"],
        )
        config = Config(
            name="larger_than_memory", model=model, training=training, execution=execution
        )
        self.trainer = PhasedTrainer(
            config, tokens(batch, model.sequence_length, model.vocabulary_size)
        )
        self.traffic = lambda: file_traffic(self.trainer.session)
        self.folder, self.cached = options["folder"], 0

    def step(self, count: int) -> Figures:
        """Optimizer steps; the last loss, and what was moved and waited for in each."""
        before = self.traffic()
        figures = self.trainer.step(count)
        after = self.traffic()
        if after is None:
            return figures
        names = (
            "read_bytes",
            "written_bytes",
            "waited_for_reads",
            "waited_for_writes",
            "waited_for_memory",
            "waited",
        )
        moved = {name: (getattr(after, name) - getattr(before, name)) / count for name in names}
        if not after.is_direct:
            self.cached = max(self.cached, cached_bytes(Path(self.folder)))
        return {**figures, **moved, "is_direct": after.is_direct, "file_bytes": after.file_bytes}

    def finish(self) -> Figures:
        """Most of its files that was in the page cache, whether a cgroup held the process, and the
        most it counted.
        """
        if self.folder:
            self.cached = max(self.cached, cached_bytes(Path(self.folder)))
        peak = None if self.cgroup is None else self.cgroup.peak_bytes
        return {
            "cached_bytes": self.cached,
            "cgroup": self.cgroup is not None,
            "cgroup_peak_bytes": peak,
        }


def tokens(batch: int, sequence: int, vocabulary: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless random (ids, labels), the same for all variants."""
    random = np.random.default_rng(0)
    while True:
        rows = random.integers(0, vocabulary, (batch, sequence + 1))
        yield rows[:, :-1], rows[:, 1:]


def disk_bandwidth(folder: str, mib: int) -> Figures:
    """Bytes/s of reading, writing, and both at once, each the best of one, two and four threads a
    way.
    """
    from popxl_engine.machine.device import Pages
    from popxl_engine.machine.paging import FileStore

    size = max(1, min(BLOCK_MIB, mib)) * 2**20
    count = max(1, mib * 2**20 // size)
    store = FileStore(folder, 2 * count * size)

    def run(way: str, numbers: range) -> None:
        block = Pages(size).bytes
        for number in numbers:
            getattr(store, way)(number * size, block)

    def rate(ways: tuple[str, ...], threads: int) -> float:
        jobs = [
            threading.Thread(
                target=run, args=(way, range(half * count + first, (half + 1) * count, threads))
            )
            for half, way in enumerate(ways)
            for first in range(threads)
        ]
        begin = time.perf_counter()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return len(ways) * count * size / (time.perf_counter() - begin)

    run("write", range(2 * count))  # else the first reads find nothing written
    kinds = {"read": ("read",), "write": ("write",), "both": ("read", "write")}
    found: Figures = {
        name: max(rate(ways, threads) for threads in (1, 2, 4)) for name, ways in kinds.items()
    }
    found["is_direct"] = store.is_direct
    store.close()
    return found


def variants_of(
    arguments: argparse.Namespace, batch: int, moments: str, limit: int
) -> list[Variant]:
    """In memory, in files, and in files without looking ahead."""
    rows = (
        limit - PROCESS_MIB * 2**20
        if arguments.host_memory is None
        else arguments.host_memory * 2**20
    )
    if rows <= 0:
        raise BenchmarkError(
            f"limit: got {gib(limit)}; expected more than the {PROCESS_MIB} MiB of a process, for "
            "rows. Measure a larger model, or give --limit and --host_memory."
        )
    sizes = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size", "precision")
    model = {name: getattr(arguments, name) for name in sizes}
    plain = {
        "model": model,
        "batch": batch,
        "moments": moments,
        "iterations": arguments.device_iterations,
    }
    plain |= {"folder": None, "host_memory": None, "limit": None}
    found = [Variant(name="in memory", options=plain)]
    for name, environment in (
        ("in files", {}),
        ("in files, fetched when asked for", {"POPXL_LOOK_AHEAD": "0"}),
    ):
        own = {"folder": arguments.folder, "host_memory": rows, "limit": limit}
        own["cgroup"] = f"larger_than_memory.{os.getpid()}.{batch}.{moments}.{len(found)}"
        own["cgroup_kind"] = arguments.cgroup
        found.append(Variant(name=name, options={**plain, **own}, environment=environment))
    return found


def compare(
    measured: list[Measurement], tokens_per_step: int, disk: Figures, limit: int
) -> dict[str, Figures]:
    """Figures of each variant, beside the bound that the disk and the first variant, in memory,
    give.
    """
    alone, found = measured[0], {}
    for m in measured:
        rounds = m.steps[-len(m.seconds) :]
        moved, waited = (
            float(np.median([step.get(name, 0.0) for step in rounds]))
            for name in ("read_bytes", "waited")
        )
        written = float(np.median([step.get("written_bytes", 0.0) for step in rounds]))
        transfer = (moved + written) / disk["both"]
        bound = max(alone.median, transfer)
        found[m.name] = {
            **m.figures(),
            "tokens_per_s": tokens_per_step / m.median,
            "transfer_seconds": transfer,
            "of_bound": bound / m.median,
            "of_memory": alone.median / m.median,
            "waiting": waited / m.median,
            "read_bytes": moved,
            "written_bytes": written,
            "within_limit": m is alone or m.peak_bytes + m.finish["cached_bytes"] <= limit,
            **m.finish,
            "losses_equal": [step["loss"] for step in m.steps]
            == [step["loss"] for step in alone.steps],
            "loss": m.steps[-1]["loss"],
        }
    return found


def row(batch: int, name: str, figures: Figures) -> list[str]:
    """A line of the table."""
    return [
        f"{batch}, {name}",
        f"{figures['tokens_per_s']:.1f}",
        f"{figures['seconds']:.3f}",
        f"{100 * figures['spread']:.0f} %",
        f"{100 * figures['of_memory']:.0f} %",
        f"{100 * figures['of_bound']:.0f} %",
        f"{100 * figures['waiting']:.0f} %",
        gib(figures["read_bytes"]),
        gib(figures["written_bytes"]),
        gib(figures["peak_bytes"] + figures["cached_bytes"]),
        "same" if figures["losses_equal"] else "DIFFERENT",
    ]


HEADERS = (
    *("sequences a step", "tokens/s", "s/step", "spread", "of memory", "of bound", "waiting"),
    *("read", "written", "peak", "losses"),
)


def measured_with(
    moments: str, batches: list[int], arguments: argparse.Namespace, disk: Figures, model: Any
) -> Figures:
    """Measure some batches with moments of a type, and print them."""
    from popxl_gpt.execution.planning.model_size import parameter_count

    width = WIDTHS[arguments.precision] + 2 * WIDTHS[moments]
    state = parameter_count(model) * width
    limit = state // SHARE if arguments.limit is None else arguments.limit * 2**20
    print(
        f"moments in {moments}: {width} bytes of state a parameter, {gib(state)}, limit "
        f"{gib(limit)}\n",
        flush=True,
    )
    found: dict[int, dict[str, Figures]] = {}
    rows = []
    for batch in batches:
        variants = variants_of(arguments, batch, moments, limit)
        try:
            measured = measure(Path(__file__), variants, **run_counts(arguments))
        finally:
            for variant in variants[1:]:
                remove_cgroup(variant.options["cgroup"], arguments.cgroup)
        found[batch] = compare(measured, batch * model.sequence_length, disk, limit)
        rows += [row(batch, variant.name, found[batch][variant.name]) for variant in variants]
    print(table(HEADERS, rows))
    ours = [figures["in files"] for figures in found.values()]
    held = (
        "held by a cgroup"
        if all(f["cgroup"] for f in ours)
        else "not held by a cgroup: compared with the peak"
    )
    in_limit = all(f["within_limit"] for f in ours)
    print(f"limit {gib(limit)}, {held}: {'kept' if in_limit else 'EXCEEDED'}\n", flush=True)
    met = found[max(found)]["in files"]["of_bound"] >= BAR and in_limit
    return {
        "state_bytes": state,
        "limit_bytes": limit,
        "batches": found,
        "within_limit": in_limit,
        "met": met,
    }


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {
        "layers": 34,
        "hidden_size": 768,
        "heads": 12,
        "sequence_length": 256,
        "vocabulary_size": 8192,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--precision", default="float32", choices=list(WIDTHS), help="of weights and activations"
    )
    parser.add_argument(
        "--moments",
        nargs="+",
        default=list(WIDTHS),
        choices=list(WIDTHS),
        help="the first: all batches",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4], help="sequences of a step"
    )
    add_run_counts(parser, rounds=3)
    parser.add_argument(
        "--host_memory",
        type=int,
        help=f"MiB for rows; default: the limit without {PROCESS_MIB} MiB",
    )
    parser.add_argument(
        "--limit", type=int, help="MiB that the process may use; default: a third of the state"
    )
    parser.add_argument(
        "--disk_mib", type=int, default=1024, help="MiB that are moved each way to measure the disk"
    )
    parser.add_argument(
        "--folder", default=str(ROOT / "runs" / "larger_than_memory"), help="on the disk to use"
    )
    parser.add_argument(
        "--cgroup",
        default="auto",
        choices=["auto", "v1", "none"],
        help="auto: a cgroup of version 2, where there are any",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args()

    from popxl_gpt.config.schema import Model
    from popxl_gpt.execution.planning.model_size import parameter_count

    model = Model(**{name: getattr(arguments, name) for name in sizes})
    disk = disk_bandwidth(arguments.folder, arguments.disk_mib)
    rates = ", ".join(f"{name} {disk[name] / 1e9:.2f}" for name in ("read", "write", "both"))
    print(f"{parameter_count(model) / 1e6:.0f} M parameters in {arguments.precision}")
    print(
        f"disk, GB/s: {rates}; {'direct' if disk['is_direct'] else 'through the page cache'}\n",
        flush=True,
    )
    largest = [max(arguments.batches)]
    found = {
        moments: measured_with(
            moments, largest if number else arguments.batches, arguments, disk, model
        )
        for number, moments in enumerate(arguments.moments)
    }
    met = all(figures["met"] for figures in found.values())
    bar = f"at least {100 * BAR:.0f} % of the bound at {largest[0]}, within the limit"
    print(f"bar: {bar}: {'met' if met else 'missed'}")
    batches = [by_name for figures in found.values() for by_name in figures["batches"].values()]
    if not all(figures["losses_equal"] for by_name in batches for figures in by_name.values()):
        raise BenchmarkError("losses: got others from files than in memory; expected the same bits")
    print_json(
        {
            "benchmark": "larger_than_memory",
            "machine": machine(),
            "parameters": parameter_count(model),
            "disk": disk,
            "moments": found,
            "met": met,
        }
    )
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    main_or_worker(Larger, main)

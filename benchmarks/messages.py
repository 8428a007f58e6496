"""Two processes of this machine give each other a buffer: by the runtime's messages, and by Gloo
over TCP.

    python benchmarks/messages.py

The two take turns in the same processes. The least time of several rounds counts: of one exchange,
both ways, and the processor time that it takes in one process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SIZES = {2**10: 500, 2**14: 500, 2**17: 200, 2**18: 200, 2**20: 100, 100_000_000: 3}
"""Bytes of a buffer -> exchanges in a round."""
ROUNDS = 7
INSTANCES = 2


def measure(exchange_once: Callable[[], None], count: int) -> tuple[float, float]:
    """Seconds of one exchange, and of the processor."""
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        exchange_once()
    return (time.perf_counter() - begin) / count, (time.process_time() - used) / count


def run_instance(folder: Path) -> None:
    import torch
    import torch.distributed as distributed
    from popdist import exchange, getInstanceIndex

    rank = getInstanceIndex()
    other = 1 - rank
    messages = exchange.connect().messages
    store = distributed.FileStore(str(folder / "gloo"), INSTANCES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=INSTANCES)
    for size, count in SIZES.items():
        own, theirs = (
            torch.full((size,), rank, dtype=torch.uint8),
            torch.empty(size, dtype=torch.uint8),
        )

        def by_messages(own: torch.Tensor = own, theirs: torch.Tensor = theirs) -> None:
            begun = [
                messages.receive(other, 1, theirs.numpy()),
                messages.send(other, 1, own.numpy()),
            ]
            messages.wait(begun, 60)

        def by_gloo(own: torch.Tensor = own, theirs: torch.Tensor = theirs) -> None:
            begun = [distributed.irecv(theirs, other, tag=1), distributed.isend(own, other, tag=1)]
            for work in begun:
                work.wait()

        found: dict[str, list[tuple[float, float]]] = {"messages": [], "gloo": []}
        for _ in range(ROUNDS):
            for name, function in (("messages", by_messages), ("gloo", by_gloo)):
                theirs.fill_(9)
                exchange.barrier()
                found[name].append(measure(function, count))
                assert bool((theirs == other).all())
        if rank == 0:
            told = [
                (min(w for w, _ in each) * 1e6, min(p for _, p in each) * 1e6)
                for each in found.values()
            ]
            (ours, ours_used), (gloo, gloo_used) = told
            print(
                f"| {size:,} | {ours:,.0f} | {gloo:,.0f} | {ours / gloo:.2f} | "
                f"{ours_used:,.0f} | {gloo_used:,.0f} |",
                flush=True,
            )
    distributed.destroy_process_group()


def main() -> None:
    """Measure and print a line for each size."""
    if "RANK" in os.environ:
        return run_instance(Path(sys.argv[1]))
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(
        "| bytes | messages, µs | Gloo, µs | ratio | messages, processor µs | Gloo, processor µs |",
        flush=True,
    )
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "poprun", "--num-instances", str(INSTANCES)]
        subprocess.run([*launcher, sys.executable, str(Path(__file__)), folder], check=True)
    return None


if __name__ == "__main__":
    main()

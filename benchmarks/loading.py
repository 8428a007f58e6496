"""How fast batches are made of prepared files, and whether a program that takes a million tokens a
second ever waits for one; and what the order of a thousand million samples, or documents, takes.

    python benchmarks/loading.py                     # data/files/stdlib, batches of 16 samples
    python benchmarks/loading.py --data FOLDER --batch 512 --rate 2e6

A consumer takes a batch, sleeps as long as it would compute on it, and takes the next one. What it
waits for is the time inside `BatchLoader.batch` after the first call. Making is processor time of
the same batches without a thread. The order is a function of seed and place: batches of far apart
steps are drawn, and the memory that this takes is what Python's allocator counts at its peak.
Documents are shuffled on the disk when a text is prepared: of a thousand million, the buckets are
as many and as large as memory's bound lets them be; some are scattered over two of them, which are
so large that they are scattered again.
"""

import argparse
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    ROOT,
    Figures,
    machine,
    print_json,
    require_file,
    table,
)
from popxl_gpt.data import shuffle  # noqa: E402
from popxl_gpt.data.dataset import TokenDataset  # noqa: E402
from popxl_gpt.data.dataset_info import read_info  # noqa: E402
from popxl_gpt.data.loader import BatchLoader  # noqa: E402
from popxl_gpt.data.sampling import BatchSampler  # noqa: E402

WAITING_BAR = 0.01
"""Share of a consumer's time that it may wait."""
SAMPLES = 10**9
ORDER_BYTES_BAR = 2**20
"""Memory that drawing a batch of `SAMPLES` may take."""
DOCUMENTS, LENGTH = 400_000, 200
"""Documents that are shuffled as some of `SAMPLES`, and their tokens."""
SHUFFLE_BYTES_BAR = 2**28
"""Memory that this may take."""


def made(dataset: TokenDataset, batch: int, count: int) -> float:
    """Tokens that a second of processor time makes batches of."""
    with BatchLoader(dataset, batch, prefetch=0) as loader:
        loader.batch(0)
        begin = time.process_time()
        for step in range(1, count + 1):
            loader.batch(step)
        seconds = time.process_time() - begin
    return batch * dataset.sequence_length * count / seconds


def waited(dataset: TokenDataset, batch: int, rate: float, count: int) -> Figures:
    """What a consumer of `rate` tokens/s waits: its share of the time, and the longest time."""
    rest = batch * dataset.sequence_length / rate
    waits = []
    with BatchLoader(dataset, batch) as loader:
        loader.batch(0)  # nothing is made ahead of it
        begin = time.perf_counter()
        for step in range(1, count + 1):
            time.sleep(rest)
            asked = time.perf_counter()
            loader.batch(step)
            waits.append(time.perf_counter() - asked)
        whole = time.perf_counter() - begin
    return {"share": sum(waits) / whole, "longest": max(waits), "median": statistics.median(waits)}


def ordered(batch: int, count: int) -> Figures:
    """Drawing batches of `SAMPLES`: processor time of a sample, and bytes at the peak."""
    sampler = BatchSampler(samples=SAMPLES, global_batch_size=batch, seed=1)
    steps = np.linspace(0, 3 * SAMPLES // batch, count, dtype=np.int64)
    begin = time.process_time()
    for step in steps:
        sampler.indices(int(step))
    seconds = time.process_time() - begin
    tracemalloc.start()
    for step in steps:
        sampler.indices(int(step))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"microseconds": 1e6 * seconds / (batch * count), "bytes": peak}


def shuffled() -> Figures:
    """Shuffling `DOCUMENTS` of `SAMPLES`: processor time of a document, and bytes at the peak."""
    shuffle.MAX_BUCKETS = 2
    token_ids = np.zeros(LENGTH, np.uint32)
    begin = time.process_time()
    tracemalloc.start()
    with tempfile.TemporaryDirectory() as folder:
        documents = shuffle.DocumentShuffle(Path(folder) / "buckets", 0, 4 * LENGTH * SAMPLES)
        for _ in range(DOCUMENTS):
            documents.add(token_ids)
        found = sum(1 for _ in documents)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == DOCUMENTS
    seconds = time.process_time() - begin
    return {"microseconds": 1e6 * seconds / DOCUMENTS, "bytes": peak}


def main() -> int:
    """Measure and print; exit code 0, with `--check` 1 when a bar is missed, 2 without data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "files" / "stdlib")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--rate", type=float, default=1e6, help="tokens a second that are taken")
    parser.add_argument("--steps", type=int, default=400, help="batches of each measurement")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args()
    require_file(
        arguments.data / "dataset.json", "a prepared text", "Make it: python data/prepare.py stdlib"
    )
    info = read_info(arguments.data)
    assert info is not None
    dataset = TokenDataset(
        str(arguments.data / "train-*.tfrecord"), info["sequence_length"], info["vocabulary_size"]
    )
    rate = made(dataset, arguments.batch, arguments.steps)
    waits = waited(dataset, arguments.batch, arguments.rate, arguments.steps)
    order, documents = ordered(arguments.batch, arguments.steps), shuffled()
    rows = [
        ["made, tokens/s of processor time", f"{rate:,.0f}"],
        [f"waited at {arguments.rate:,.0f} tokens/s", f"{100 * waits['share']:.2f} %"],
        ["longest wait", f"{1e3 * waits['longest']:.2f} ms"],
        [f"order of {SAMPLES:,} samples", f"{order['microseconds']:.1f} µs a sample"],
        ["its memory", f"{order['bytes']:,} bytes"],
        [f"shuffling {SAMPLES:,} documents", f"{documents['microseconds']:.1f} µs a document"],
        ["its memory", f"{documents['bytes']:,} bytes"],
    ]
    print(table([f"batches of {arguments.batch} samples", "figure"], rows))
    met = (
        waits["share"] <= WAITING_BAR
        and order["bytes"] <= ORDER_BYTES_BAR
        and documents["bytes"] <= SHUFFLE_BYTES_BAR
    )
    print(
        f"\nbars: at most {WAITING_BAR:.0%} of the time waited, {ORDER_BYTES_BAR:,} bytes for an "
        f"order, {SHUFFLE_BYTES_BAR:,} for a shuffle: "
        f"{'met' if met else 'missed'}"
    )
    figures = {"made": rate, "waits": waits, "order": order, "shuffle": documents, "met": met}
    print_json({"benchmark": "loading", "machine": machine(), **figures})
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())

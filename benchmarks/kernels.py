"""Rates of single kernels at a GPT's shapes, in alternation: which way of computing it should an
engine call?

    python benchmarks/kernels.py                         # GPT-2 small, both dtypes, all sections
    python benchmarks/kernels.py --sections attention gelu --dtypes bfloat16 --rows 1024
    OMP_NUM_THREADS=1 python benchmarks/kernels.py       # one thread, by CPU time: holds when busy

A time is the median over rounds; in each section a * marks the fastest way. Products stand beside
what this CPU multiplies at most (`ceilings.py`).
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Figures, ceiling_share, machine, percent, print_json, table  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.kernel_sections import Section

SECTIONS = (
    "products", "vocabulary", "cross_entropy", "attention", "gelu", "norms", "adam", "memory"
)  # fmt: skip
"""Functions of `kernel_sections`."""
WITHOUT_DTYPE = ("adam", "memory")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def seconds_of(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    budget: float,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median seconds of a call of each, alternating; every way gets about `budget` seconds."""
    calls: dict[str, int] = {}
    for name, way in ways.items():
        way()
        start = clock()
        way()
        calls[name] = max(1, int(budget / rounds / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = clock()
            for _ in range(calls[name]):
                way()
            times[name].append((clock() - start) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[256, 1024], help="tokens in a product"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each way")
    parser.add_argument(
        "--keep_memory", action="store_true", help="tell malloc to reuse freed memory (mallopt)"
    )
    arguments = parser.parse_args()
    # not at the top: `--help` is answered at once
    import torch

    from benchmarks import kernel_sections

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    if arguments.keep_memory:
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

    result: Figures = {"benchmark": "kernels", "machine": machine(), "sections": []}
    for name in arguments.sections:
        single = name in WITHOUT_DTYPE
        for dtype in arguments.dtypes[:1] if single else arguments.dtypes:
            for rows in arguments.rows[:1] if single else arguments.rows:
                for section in getattr(kernel_sections, name)(rows, getattr(torch, dtype)):
                    times = seconds_of(section.ways, arguments.rounds, arguments.budget, clock)
                    shares = shares_of(section, dtype, times)
                    show(section, "" if single else dtype, times, shares)
                    figures = {
                        "title": section.title,
                        "dtype": dtype,
                        "seconds": times,
                        "unit": section.unit,
                        "ceiling_shares": shares,
                    }
                    result["sections"].append({**figures, "work": section.work})
    print_json(result)


def shares_of(section: "Section", dtype: str, times: Mapping[str, float]) -> Figures:
    """Of what this CPU multiplies at most, by way, where a section's work is products."""
    if section.unit != "GFLOP/s":
        return {}
    return {way: ceiling_share(section.work, seconds, dtype) for way, seconds in times.items()}


def show(section: "Section", dtype: str, times: Mapping[str, float], shares: Figures) -> None:
    """One section as a table, the fastest way marked."""
    best = min(times.values())
    rows = [
        [
            f"{'*' if value == best else ' '} {way}",
            f"{1e3 * value:.3f}",
            f"{section.work / value / 1e9:.1f}",
            *([percent(shares[way])] if shares else []),
        ]
        for way, value in times.items()
    ]
    headers = ["way", "ms", section.unit, *(["of ceiling"] if shares else [])]
    print(f"\n{section.title} {dtype}".rstrip() + "\n" + table(headers, rows), flush=True)


if __name__ == "__main__":
    main()

"""What this CPU can do at most: multiply from registers and from the second cache, read and copy
memory, write and read its disk; with one thread, and with one for each core.

    python benchmarks/ceilings.py                   # the disk is that of build/
    python benchmarks/ceilings.py --folder /mnt/nvme --disk_bytes 4294967296

Beside the ceilings stand the products of square matrices that the runtime calls, with their share.
Benchmarks of steps and products, and runs as MFU, tell their share of what is multiplied from
registers. A rate is the best of many goes in a quarter of a second: other programs only lower it.
Loops that multiply are timed while their threads have a core. Disks are read and written past the
system's cache; where the file system does not allow that, it is told.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from poprun.cores import usable_cores  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    ROOT,
    Figures,
    Flags,
    ended,
    flag,
    make_parser,
    percent,
    script,
    table,
)

DTYPES = ("float32", "bfloat16")
BLOCK = 1 << 22
"""Bytes that the disk takes at a time."""


def cpu_rates(threads: int) -> Figures:
    """FLOP/s and bytes/s with so many threads."""
    import torch  # not at the top: `--help` is answered at once
    from popxl_engine.planner.measuring import (
        WIDTHS,
        copy_rate,
        multiply_rate,
        product_rate,
        read_rate,
    )

    torch.set_num_threads(threads)
    found: Figures = {"read": read_rate(), "copy": copy_rate()}
    for name in DTYPES:
        dtype = getattr(torch, name)
        registers, cache = (multiply_rate(dtype, from_cache=where) for where in (False, True))
        products = {width: product_rate(width, dtype) for width in WIDTHS}
        found[name] = {"registers": registers, "second_cache": cache, "products": products}
        found[name]["share"] = max(products.values()) / registers if registers else None
    return found


def disk_rates(folder: Path, threads: int, size: int) -> Figures:
    """Bytes/s from a file in a folder, to it, and both at once, by so many threads each way, which
    share the bytes.
    """
    from popxl_engine.machine.device import Pages
    from popxl_engine.machine.paging import FileStore

    block = min(BLOCK, size // threads)
    count = size // threads // block
    store = FileStore(str(folder), 2 * threads * count * block)

    def move(way: str, place: int) -> None:
        own = Pages(block).bytes
        own.random_()  # some disks compress
        for number in range(place * count, (place + 1) * count):
            getattr(store, way)(number * block, own)

    def rate(*ways: str) -> float:
        jobs = [(way, threads * half + n) for half, way in enumerate(ways) for n in range(threads)]
        begin = time.perf_counter()
        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(move, *zip(*jobs)))
        return len(jobs) * count * block / (time.perf_counter() - begin)

    rate("write", "write")  # else the first reads find nothing written
    rates = {"read": rate("read"), "write": rate("write"), "both": rate("read", "write")}
    store.close()
    return rates | {"is_direct": store.is_direct}


ROWS = {
    **{
        f"{name}, {label}": (lambda f, name=name, of=of: of(f[name]), "GFLOP/s")
        for name in DTYPES
        for label, of in (
            ("from registers", lambda f: f["registers"]),
            ("from the second cache", lambda f: f["second_cache"]),
            ("products of the runtime", lambda f: max(f["products"].values())),
        )
    },
    **{name: (lambda f, name=name: f[name], "GB/s") for name in ("read", "copy")},
    **{
        f"disk, {name}": (lambda f, name=name: f["disk"][name], "GB/s")
        for name in ("read", "write", "both")
    },
}


def show(results: dict[int, Figures]) -> None:
    """Print the table, a column for each number of threads."""
    rows = [
        [label, *(f"{of(figures) / 1e9:.2f} {unit}" for figures in results.values())]
        for label, (of, unit) in ROWS.items()
    ]
    for name in DTYPES:
        shares = [figures[name]["share"] for figures in results.values()]
        rows.append([f"{name}, products over registers", *map(percent, shares)])
    headers = [f"{threads} thread{'s' * (threads > 1)}" for threads in results]
    print(table(["ceiling", *headers], rows))
    if not all(figures["disk"]["is_direct"] for figures in results.values()):
        print("\nThe disk's file system has no direct I/O: memory that caches it may be measured.")


CORES = usable_cores()
FLAGS: Flags = {
    "--threads": {"type": int, "nargs": "+", "default": sorted({1, CORES})},
    "--folder": flag(ROOT / "build", "on the disk to measure", type=Path),
    "--disk_bytes": flag(1 << 29, "written and read"),
}


def main() -> int:
    """Measure and print."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    results = {}
    for threads in arguments.threads:
        disk = disk_rates(arguments.folder, threads, arguments.disk_bytes)
        results[threads] = {**cpu_rates(threads), "disk": disk}
    show(results)
    return ended("ceilings", arguments, met=True, threads=results)


if __name__ == "__main__":
    script(main)

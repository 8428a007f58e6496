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

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, Figures, machine, print_json, table  # noqa: E402

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
    """Bytes/s to and from files in a folder, one for each thread, which share the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    own = size // threads // BLOCK * BLOCK
    with tempfile.TemporaryDirectory(dir=folder) as place:
        files = [Path(place) / str(number) for number in range(threads)]
        is_direct = _opens_directly(files[0])
        rates: Figures = {"is_direct": is_direct}
        for name, work in (("disk_write", _write), ("disk_read", _read)):
            rates[name] = _in_threads(lambda path: work(path, own, is_direct), files) * own
    return rates


def _opens_directly(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def _in_threads(work: Callable[[Path], None], files: list[Path]) -> float:
    """Files a second."""
    with ThreadPoolExecutor(len(files)) as pool:
        begin = time.perf_counter()
        list(pool.map(work, files))
        return len(files) / (time.perf_counter() - begin)


def _write(path: Path, size: int, is_direct: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if is_direct else 0)
    block, file = mmap.mmap(-1, BLOCK), os.open(path, flags, 0o600)
    block.write(os.urandom(1 << 16) * (BLOCK >> 16))  # some disks compress
    try:
        os.posix_fallocate(file, 0, size)
        for _ in range(size // BLOCK):
            written = os.write(file, block)
            if written != BLOCK:
                raise OSError(f"{path}: {written} of {BLOCK} bytes were written")
        os.fsync(file)
    finally:
        os.close(file)


def _read(path: Path, size: int, is_direct: bool) -> None:
    block = mmap.mmap(-1, BLOCK)
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
    try:
        os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
        while os.readv(file, [block]):
            pass
    finally:
        os.close(file)


def show(results: dict[int, Figures]) -> None:
    """Print the table, a column for each number of threads."""
    rows = []
    for name in DTYPES:
        for label, of in (
            ("from registers", lambda f: f["registers"]),
            ("from the second cache", lambda f: f["second_cache"]),
            ("products of the runtime", lambda f: max(f["products"].values())),
        ):
            rates = [f"{of(figures[name]) / 1e9:.1f} GFLOP/s" for figures in results.values()]
            rows.append([f"{name}, {label}", *rates])
        shares = [figures[name]["share"] for figures in results.values()]
        rows.append([f"{name}, share", *("" if s is None else f"{s:.0%}" for s in shares)])
    for name in ("read", "copy", "disk_write", "disk_read"):
        rates = [f"{figures[name] / 1e9:.2f} GB/s" for figures in results.values()]
        rows.append([name.replace("_", ", "), *rates])
    headers = [f"{threads} thread{'s' * (threads > 1)}" for threads in results]
    print(table(["ceiling", *headers], rows))
    if not all(figures["is_direct"] for figures in results.values()):
        print("\nThe disk's file system has no direct I/O: memory that caches it may be measured.")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build", help="on the disk to measure"
    )
    parser.add_argument("--disk_bytes", type=int, default=1 << 29, help="written and read")
    arguments = parser.parse_args()
    least = max(arguments.threads) * BLOCK
    if arguments.disk_bytes < least:
        parser.error(f"--disk_bytes: got {arguments.disk_bytes}; expected at least {least}.")
    results = {
        threads: {
            **cpu_rates(threads),
            **disk_rates(arguments.folder, threads, arguments.disk_bytes),
        }
        for threads in arguments.threads
    }
    show(results)
    print_json({"benchmark": "ceilings", "machine": machine(), "threads": results})


if __name__ == "__main__":
    main()

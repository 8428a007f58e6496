"""Measure variants side by side: one process each, kept alive, told in turn to take a step. Noise
meets all alike.

A benchmark script defines `build(options) -> Workload` and calls `main_or_worker`. Started with
`--worker OPTIONS` it is one variant's process and obeys `measure`; otherwise it is the benchmark.
"""

import argparse
import functools
import json
import os
import platform
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from poprun.cores import usable_cores

ROOT = Path(__file__).resolve().parent.parent
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment that tells glibc to reuse freed blocks instead of handing their pages back and
faulting them in again.
"""

LAST_WORDS = 15
"""Lines that a program which fails printed last."""

Figures = dict[str, Any]
Arguments = argparse.Namespace


class Workload(Protocol):
    """What one variant's process runs. With a method `finish() -> Figures`, that is called once,
    after the last step and outside all timing.
    """

    def step(self, count: int) -> Figures:
        """Do `count` steps; return figures to keep (a loss, say), as JSON takes them."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One process to measure."""

    name: str
    options: Mapping[str, Any]
    """Handed to the script's `build`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    tree: Path = ROOT
    """The checkout whose script and packages run."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one variant did."""

    name: str
    seconds: tuple[float, ...]
    """Per step, one value per round, warm-up left out."""
    cpu_seconds: tuple[float, ...]
    """The same by processor time over all threads: with one thread, what a busy machine cannot
    distort.
    """
    peak_bytes: int
    """Largest resident set of the process over its whole life, by the kernel's count."""
    steps: tuple[Figures, ...]
    """What the workload returned, per round, warm-up included."""
    finish: Figures

    @property
    def median(self) -> float:
        """Seconds per step."""
        return statistics.median(self.seconds)

    @property
    def cpu_median(self) -> float:
        """Processor seconds per step."""
        return statistics.median(self.cpu_seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    def figures(self) -> Figures:
        """For the JSON line: seconds per step and bytes."""
        return {
            "seconds": self.median,
            "spread": self.spread,
            "all_seconds": list(self.seconds),
            "cpu_seconds": self.cpu_median,
            "peak_bytes": self.peak_bytes,
        }


class BenchmarkError(Exception):
    """A variant's process failed; the message has its last words."""


class Missing(Exception):
    """What a case needs is not here; the message says how to get it."""


class VariantProcess:
    """A running variant; `ask` sends one command and waits for its reply."""

    def __init__(self, script: Path, variant: Variant, timeout: float):
        self.variant, self.timeout = variant, timeout
        self.errors = tempfile.TemporaryFile("w+")
        tree = variant.tree
        packages = [str(tree), str(tree / "runtime"), os.environ.get("PYTHONPATH")]
        python_path = os.pathsep.join(filter(None, packages))
        if tree != ROOT:
            script = tree / script.resolve().relative_to(ROOT)
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--worker", json.dumps(dict(variant.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": python_path, **variant.environment},
        )

    def ask(self, command: str, **arguments: Any) -> Figures:
        """Send a command. Raises BenchmarkError when the process dies or says nothing for `timeout`
        seconds.
        """
        with suppress(BrokenPipeError):  # it has died: its output is at an end
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], self.timeout)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        what = f"gave no answer to '{command}' for {self.timeout:.0f} s"
        if ready:
            what = f"died with exit code {self.process.wait()}"
        else:
            self.process.kill()
        self.errors.seek(0)
        words = self.errors.read().strip().splitlines()[-LAST_WORDS:]
        raise BenchmarkError(
            "\n".join([f"variant '{self.variant.name}' {what}; its last words:", *words])
        )

    def stop(self) -> None:
        """End the process; kill it if closing its input is not enough."""
        with suppress(BrokenPipeError):  # what it could not be told any more
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def measure(
    script: Path,
    variants: Sequence[Variant],
    *,
    rounds: int,
    warmup: int,
    steps_per_round: int = 1,
    timeout: float = 1800.0,
) -> list[Measurement]:
    """Run all variants in alternation: every round lets each do `steps_per_round` steps, in an
    order that turns round.

    Args:
        script: The benchmark's own file; it is started again for each variant.
        timeout: Seconds that one answer may take, building and compiling included.

    Raises:
        BenchmarkError: A variant's process failed, or memory will not do for all of them.
    """
    running: list[VariantProcess] = []
    try:
        for variant in variants:
            running.append(VariantProcess(script, variant, timeout))
            running[-1].ask("build")
        replies: dict[str, list[Figures]] = {variant.name: [] for variant in variants}
        growth = 0
        for number in range(warmup + rounds):
            for process in running if number % 2 == 0 else reversed(running):
                free = free_bytes()
                if number == 0 and free < growth:
                    raise BenchmarkError(
                        f"variant '{process.variant.name}' would need about {gib(growth)} more "
                        f"for its first steps, as one before it did, but {gib(free)} are free: "
                        "without room all would wait for the disk. Measure fewer variants at a "
                        "time."
                    )
                replies[process.variant.name].append(process.ask("step", count=steps_per_round))
                growth = max(growth, free - free_bytes())
        ends = {process.variant.name: process.ask("finish") for process in running}
        return [
            Measurement(
                name=name,
                seconds=tuple(of["seconds"] / steps_per_round for of in replies[name][warmup:]),
                cpu_seconds=tuple(
                    of["cpu_seconds"] / steps_per_round for of in replies[name][warmup:]
                ),
                peak_bytes=end["peak_bytes"],
                steps=tuple(of["figures"] for of in replies[name]),
                finish=end["finish"],
            )
            for name, end in ends.items()
        ]
    finally:
        for process in running:
            process.stop()


def free_bytes() -> int:
    """Memory that processes may still take, of the machine's and of this process's limits."""
    from popxl.extensions import host_memory  # not at the top: processes of variants need it not

    return host_memory().available


def worker(build: Callable[[Figures], Workload], options: Figures) -> None:
    """Obey the benchmark: one JSON command per line of input, one JSON reply per line of output."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the workload prints is not a reply
    workload: Workload | None = None
    for line in sys.stdin:
        message = json.loads(line)
        reply: Figures = {}
        if message["command"] == "build":
            workload = build(options)
        elif message["command"] == "step":
            start, cpu_start = time.perf_counter(), time.process_time()
            figures = workload.step(message["count"])
            cpu_seconds = time.process_time() - cpu_start
            reply = {
                "seconds": time.perf_counter() - start,
                "cpu_seconds": cpu_seconds,
                "figures": figures,
            }
        elif message["command"] == "finish":
            reply = {"peak_bytes": peak_resident_bytes()}
            reply["finish"] = getattr(workload, "finish", dict)()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def peak_resident_bytes() -> int:
    """Largest resident set of this process so far, in bytes, by the kernel's count."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def main_or_worker(build: Callable[[Figures], Workload], main: Callable[[], int]) -> None:
    """Entry point of a benchmark script: the benchmark itself, or one variant's process when asked
    by `measure`.
    """
    if sys.argv[1:2] == ["--worker"]:
        worker(build, json.loads(sys.argv[2]))
    else:
        script(main)


def script(main: Callable[[], int]) -> None:
    """Entry point of a benchmark script that starts no variants."""
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


def output_of(command: Sequence[str], **more: Any) -> str:
    """What a program prints, from its start to its end.

    Args:
        more: for `subprocess.run`.

    Raises:
        BenchmarkError: it failed; with its last words.
    """
    places = {"cwd": ROOT, **more}
    done = subprocess.run(command, capture_output=True, text=True, **places)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-LAST_WORDS:])
        raise BenchmarkError(
            f"{' '.join(command)[:200]}: died with exit code {done.returncode}; its last words:\n"
            f"{words}"
        )
    return done.stdout


def require_file(path: Path, what: str, remedy: str) -> Path:
    """The path, or exit code 2 with a message that says what is missing and what to give."""
    if not path.is_file():
        print(f"{what}: got no file at {path}; expected {what}. {remedy}", file=sys.stderr)
        sys.exit(2)
    return path


def machine() -> Figures:
    """What the figures hold for: processor, memory, versions, and how busy the machine already is.
    No host names.
    """
    import torch  # not at the top: `--help` is answered at once
    from popxl.extensions import host_memory

    information = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in information if line.startswith("model name")]
    has_tiles = any("amx_bf16" in line.split() for line in information if line.startswith("flags"))
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "vector": "AMX" if has_tiles else torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(host_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def multiply_ceiling(dtype: str) -> float | None:
    """FLOP/s of a loop that only multiplies, on PyTorch's threads, measured once, in a quarter of a
    second: see `ceilings.py`. None without a compiler.

    Args:
        dtype: float16 is multiplied as float32, as kernels do.
    """
    import torch  # as in `machine`
    from popxl_engine.planner.measuring import multiply_rate

    return multiply_rate(getattr(torch, dtype), from_cache=False) or None


def ceiling_share(flops: float, seconds: float, dtype: str) -> float | None:
    """FLOPs in some time over what that loop would have done in it. Of a model's step its FLOPs are
    `flops_per_token`'s, so that the share is what a run's progress line calls MFU.
    """
    ceiling = multiply_ceiling(dtype)
    return flops / seconds / ceiling if ceiling else None


def percent(share: float | None) -> str:
    """A share for a table."""
    return "-" if share is None else f"{share:.0%}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text: the first column to the left, figures to the right."""
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]

    def show(line: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([show(headers), "  ".join("-" * width for width in widths), *map(show, rows)])


Columns = Mapping[str, Callable[[Figures], str]]
"""Headers, and what of a row's figures stands below each."""


def show(columns: Columns, rows: Iterable[Figures]) -> None:
    """Print figures as a table."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    print(table(list(columns), cells), flush=True)


Flags = Mapping[str, Mapping[str, Any]]
"""Names of flags, and what argparse is told of each."""
CHECK: Flags = {
    "--check": {"action": "store_true", "help": "exit with 1 when a bar is missed"},
}


def make_parser(description: str | None, flags: Flags) -> argparse.ArgumentParser:
    """The parser of a benchmark's flags."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, told in flags.items():
        parser.add_argument(name, **told)
    return parser


def flag(default: Any, words: str | None = None, **more: Any) -> dict[str, Any]:
    """A flag of its default's type."""
    return {"type": type(default), "default": default, "help": words} | more


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """The type of a word among names: `choices` of argparse refuse a list without a word."""

    def checked(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"got {word}; expected some of {', '.join(names)}.")
        return word

    return checked


def ended(
    benchmark: str,
    arguments: Arguments,
    *,
    met: bool | None,
    bar_text: str | None = None,
    **figures: Any,
) -> int:
    """Print the bar, and the figures as one line of JSON, the last of every benchmark.

    Returns:
        The exit code: 1 where the bars are to be checked, and are not met or were not measured.
    """
    if bar_text is not None:
        print(f"\n{bar_text}: {outcome(bool(met))}")
    figures |= {"benchmark": benchmark, "machine": machine(), "met": met}
    print(json.dumps(figures, sort_keys=True))
    return 1 if getattr(arguments, "check", False) and not met else 0


def outcome(met: bool) -> str:
    """The verdict on a bar."""
    return "met" if met else "missed"


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"

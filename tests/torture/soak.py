"""Many tiny steps, with validations and checkpoints: memory, descriptors and threads stay as they
are.
"""

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.torture.application import MODES, Program, Workshop, last_line
from tests.torture.judge import Broken, check_words
from tests.torture.torture import Torture

STEPS, LONG_STEPS = 3_000, 100_000
EVENTS = 20
"""Validations, and as many checkpoints, in a run."""
SECONDS = 0.5
"""From one look at the processes to the next."""
STALLED_SECONDS = 300
GROWTH = 2**22
"""Bytes that the median of a process's memory may grow by, from the second quarter of the steps to
the last: the report comes to its full size in some thousand steps, and the allocator has holes."""


@dataclass(frozen=True)
class Sample:
    """A process at some moment."""

    step: int
    memory: int
    """Bytes that are in memory and the process's own."""
    descriptors: int
    threads: int


def trial(case: int, shop: Workshop) -> str:
    mode, steps = list(MODES.values())[case], LONG_STEPS if shop.is_long else STEPS
    folder, every = shop.fresh(), steps // EVENTS // 3 * 3  # whole calls of any mode
    settings = {
        "steps": steps // 3 * 3, "checkpoint__every": every, "validate_every": every,
        "checkpoint__load": "none", "log_every": every,
        "layers": 1, "global_batch_size": mode.instances, "micro_batch_size": 1, "samples": 0,
    }  # fmt: skip
    with shop.start(mode, folder, is_cold=True, **settings) as program:
        samples = watch(program, folder / "runs/run/metrics.jsonl")
        code, output = program.wait(), program.output
    check_words(code, output)
    if code != 0:
        raise Broken(f"mode {mode.name} ended with exit code {code}: {last_line(output)}")
    told = [f"{name}: {judge(found, steps)}" for name, found in samples.items()]
    return f"{mode.name}, {steps} steps: {'; '.join(told)}"


def watch(program: Program, metrics: Path) -> "dict[str, list[Sample]]":
    """Look at the processes that train until the run ends. Returns samples of each."""
    samples: dict[str, list[Sample]] = {}
    lines, read, stalled = 0, 0, time.monotonic()
    while program.is_alive():
        if metrics.exists():
            with open(metrics, "rb") as file:
                file.seek(read)
                found = file.read()
            if found:
                lines, read, stalled = (
                    lines + found.count(b"\n"),
                    read + len(found),
                    time.monotonic(),
                )
        if lines:
            for member in program.members():
                with suppress(OSError):  # it has ended
                    if b"pretraining.py" in Path(f"/proc/{member}/cmdline").read_bytes():
                        samples.setdefault(f"process {member}", []).append(look(member, lines))
        if time.monotonic() - stalled > STALLED_SECONDS:
            raise Broken(f"stands still after {lines} steps")
        time.sleep(SECONDS)
    return samples


def look(process: int, step: int) -> Sample:
    """A process as it is now. OSError where it has ended."""
    folder = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    if "RssAnon" not in status:
        raise ProcessLookupError(process)
    memory = int(status["RssAnon"].split()[0]) * 1024
    return Sample(step, memory, len(os.listdir(folder / "fd")), int(status["Threads"]))


def judge(samples: Sequence[Sample], steps: int) -> str:
    """What a process has at the end. Raises Broken where that is more than it was."""
    early = [sample for sample in samples if steps / 4 <= sample.step < steps / 2]
    late = [sample for sample in samples if sample.step >= 3 * steps / 4]
    if not early or not late:
        raise Broken(f"was not seen in all quarters of {steps} steps")
    found = []
    for name, allowed in (("memory", GROWTH), ("descriptors", 0), ("threads", 0)):
        before, after = (
            statistics.median_high(getattr(sample, name) for sample in part)
            for part in (early, late)
        )
        if after > before + allowed:
            raise Broken(f"{name} grew from {before} to {after} in {steps // 2} steps")
        found.append(f"{name} {before} -> {after}")
    return ", ".join(found)


SOAK = Torture(
    "soak",
    "Memory, descriptors and threads of a run are the same after any number of steps.",
    trial,
    lambda shop: len(MODES),
)

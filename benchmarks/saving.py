"""What a checkpoint costs that is written while training goes on: how much longer the steps take
meanwhile, as a share of the time from one checkpoint to the next.

    python benchmarks/saving.py
    python benchmarks/saving.py --presets tiny --rounds 2

Presets run on one replica; `files` is the wide model with its rows in files, for which training
waits while a checkpoint is written. A round takes steps that nothing disturbs, then begins a
checkpoint and takes steps until it is written. What these take longer than as many undisturbed
ones, reading the state included, is what the checkpoint costs. Beside it stands the time of one
that is waited for.
The bar is on processor time, which other work on the machine distorts least; where a processor is
idle, training loses less.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Figures, machine, print_json, table  # noqa: E402
from benchmarks.phased import PhasedTrainer  # noqa: E402
from benchmarks.profiling import batches  # noqa: E402
from benchmarks.verifying import named  # noqa: E402
from popxl_gpt.config.presets import override  # noqa: E402
from popxl_gpt.config.schema import Checkpoint, Config  # noqa: E402

BAR = 0.02
"""Of the time from one checkpoint to the next."""
BETWEEN = 60 * Checkpoint().every_minutes
"""Seconds from one to the next, by default."""


Clocks = np.ndarray
"""Seconds of the wall and of the processors, float64 [2]."""


def now() -> Clocks:
    """Of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def step_seconds(trainer: PhasedTrainer, steps: int) -> Clocks:
    """Of a step, nothing else going on."""
    begin = now()
    trainer.step(steps)
    return (now() - begin) / steps


def compare(config: Config, folder: Path, rounds: int, steps: int) -> Figures:
    """Seconds of an undisturbed step, of a checkpoint that is waited for, and what one costs that
    is written behind; bytes of it.
    """
    # not at the top: `--help` is answered at once
    from popxl_gpt.execution.checkpoints.saved_state import Position
    from popxl_gpt.execution.checkpoints.saving import begin_save, save

    trainer = PhasedTrainer(config, batches(config))
    trainer.step(2)
    plain, waited, reading, cost = [], [], [], []
    for number in range(1, rounds + 1):
        before = step_seconds(trainer, steps)
        begin, taken = now(), 0
        saving = begin_save(trainer.session, config, folder, Position(2 * number, ""))
        reading.append(now() - begin)
        while not saving.is_done:
            trainer.step(1)
            taken += 1
        saving.finish()
        meanwhile = now() - begin
        plain.append((before + step_seconds(trainer, steps)) / 2)
        cost.append(meanwhile - taken * plain[-1])
        begin = now()
        path = save(trainer.session, config, folder, Position(2 * number + 1, ""))
        waited.append(now() - begin)
    figures: Figures = {"bytes": float(sum(file.stat().st_size for file in path.iterdir()))}
    measured = (("step", plain), ("waited", waited), ("reading", reading), ("cost", cost))
    for name, found in measured:
        for clock, seconds in zip(("wall", "cpu"), np.median(found, axis=0)):
            figures[f"{name}_{clock}_seconds"] = float(seconds)
    figures["share"] = figures["cost_cpu_seconds"] / BETWEEN
    return figures


def chosen(name: str, folder: Path) -> Config:
    """A preset, or the wide model with half of its rows in memory at a time."""
    if name == "files":
        return override(named("wide"), memmap_dir=str(folder / "rows"), host_memory="300MiB")
    return named(name)


def row(name: str, figures: Figures) -> list[str]:
    """A line of the table."""
    seconds = [
        f"{figures[f'{part}_{clock}_seconds']:.3f}"
        for part in ("step", "waited", "reading", "cost")
        for clock in ("wall", "cpu")
    ]
    return [name, f"{figures['bytes'] / 1e6:.0f}", *seconds, f"{figures['share']:.3%}"]


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--presets", nargs="+", default=["mini", "wide", "files"], help="models to run"
    )
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints of each kind")
    parser.add_argument("--steps", type=int, default=3, help="undisturbed steps before and after")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.presets:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            config = chosen(name, Path(folder))
            found[name] = compare(config, Path(folder), arguments.rounds, arguments.steps)
    parts = ("s/step", "waited for", "reading", "cost")
    heads = ["preset", "MB", *(f"{part}{cpu}" for part in parts for cpu in ("", " (cpu)"))]
    heads += [f"of {BETWEEN / 60:g} min"]
    print(table(heads, [row(name, figures) for name, figures in found.items()]))
    worst = max(figures["share"] for figures in found.values())
    met = worst <= BAR
    print(f"\nbar: a checkpoint costs at most {BAR:.0%} of the time in between: ", end="")
    print("met" if met else "missed")
    results = {"presets": found, "worst": worst, "met": met}
    print_json({"benchmark": "saving", "machine": machine(), **results})
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())

"""What recording a step costs: runs of the training program with marks and without, in turn, in one
process.

    python benchmarks/profiling.py
    python benchmarks/profiling.py --presets tiny --rounds 100

Preset tiny is the worst case, with kernels of a few microseconds; mini is a small model that people
do train. Both run on one replica. The bar is on processor time, which other work on the machine
distorts least.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Figures, machine, print_json, table  # noqa: E402
from benchmarks.phased import PhasedTrainer  # noqa: E402
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.utils.runtime import profile  # noqa: E402

BAR = 0.05
"""Share of a step that recording it may take."""
ALONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}


def batches(config: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random tokens."""
    random = np.random.default_rng(0)
    shape = (config.training.global_batch_size, config.model.sequence_length + 1)
    while True:
        tokens = random.integers(0, config.model.vocabulary_size, shape)
        yield tokens[:, :-1], tokens[:, 1:]


def compare(name: str, rounds: int, warmup: int) -> Figures:
    """Seconds of steps with marks and without, and how many marks a step has."""
    config = preset(name, **ALONE, warmup_steps=0)
    trainer = PhasedTrainer(config, batches(config))
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    spans = 0
    for number in range(warmup + rounds):
        for is_recorded in (False, True) if number % 2 else (True, False):
            with profile(trainer.session) if is_recorded else nullcontext([]) as profiles:
                begin = time.process_time(), time.perf_counter()
                trainer.step(1)
                end = time.process_time(), time.perf_counter()
            spans = sum(len(found.spans) + found.left_out for found in profiles) or spans
            if number >= warmup:
                seconds[is_recorded].append((end[0] - begin[0], end[1] - begin[1]))
    figures: Figures = {"spans": spans}
    for place, clock in enumerate(("cpu", "wall")):
        plain, recorded = (
            statistics.median(pair[place] for pair in seconds[key]) for key in (False, True)
        )
        figures |= {f"{clock}_seconds": plain, f"{clock}_cost": recorded / plain - 1}
    return figures


def row(name: str, figures: Figures) -> list[str]:
    """A line of the table."""
    costs = [f"{100 * figures[f'{clock}_cost']:.1f} %" for clock in ("cpu", "wall")]
    return [
        name,
        f"{figures['cpu_seconds']:.4f}",
        f"{figures['wall_seconds']:.4f}",
        str(figures["spans"]),
        *costs,
    ]


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["tiny", "mini"], help="models to run")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each kind")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each kind before them")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        name: compare(name, arguments.rounds, arguments.warmup) for name in arguments.presets
    }
    heads = ["preset", "cpu s/step", "s/step", "spans", "cost (cpu)", "cost (wall)"]
    print(table(heads, [row(name, figures) for name, figures in found.items()]))
    worst = max(figures["cpu_cost"] for figures in found.values())
    met = worst <= BAR
    print(
        f"\nbar: recording takes at most {BAR:.0%} of a step's processor time: "
        f"{'met' if met else 'missed'}"
    )
    print_json(
        {
            "benchmark": "profiling",
            "machine": machine(),
            "presets": found,
            "worst": worst,
            "met": met,
        }
    )
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())

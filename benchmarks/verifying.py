"""What running phases twice costs: steps that verify all their phases and steps that verify none,
in turn, in one process.

    python benchmarks/verifying.py
    python benchmarks/verifying.py --presets tiny --rounds 20

`--verify_every N` verifies one phase in N steps, each in its turn. So what a step takes more that
verifies all, as a share of the step, is what one verification takes more, as a share of a phase, on
average. Presets run on one replica. The bar is on processor time, which other work on the machine
distorts least.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Figures, machine, print_json, table  # noqa: E402
from benchmarks.phased import PhasedTrainer  # noqa: E402
from benchmarks.profiling import ALONE, batches  # noqa: E402
from popxl_gpt.config.presets import override, preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.utils.runtime import replay_phases  # noqa: E402

BAR = 1.2
"""Phases that a verification may take more, on average."""
WIDE = {
    "layers": 4,
    "hidden_size": 768,
    "heads": 12,
    "vocabulary_size": 16384,
    "global_batch_size": 4,
    "micro_batch_size": 4,
    "precision": "bfloat16",
    "dropout": 0.1,
}
"""Layers of GPT-2 small, with few tokens in a step: updates take a large part of it."""


def named(name: str) -> Config:
    """A preset on one replica, or the wide model."""
    if name == "wide":
        return override(preset("mini", **ALONE, warmup_steps=0), **WIDE)
    return preset(name, **ALONE, warmup_steps=0)


def compare(config: Config, rounds: int, warmup: int) -> Figures:
    """Seconds of steps that verify nothing, and what one takes more that verifies all of it."""
    trainer = PhasedTrainer(config, batches(config))
    everything = list(range(3 * config.model.layers + 4))
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(warmup + rounds):
        for is_verified in (False, True) if number % 2 else (True, False):
            around = replay_phases(trainer.session, everything) if is_verified else nullcontext([])
            with around as found:
                begin = time.process_time(), time.perf_counter()
                trainer.step(1)
                end = time.process_time(), time.perf_counter()
            assert not found, found
            if number >= warmup:
                seconds[is_verified].append((end[0] - begin[0], end[1] - begin[1]))
    figures: Figures = {}
    for place, clock in enumerate(("cpu", "wall")):
        plain, verified = (
            statistics.median(pair[place] for pair in seconds[key]) for key in (False, True)
        )
        figures |= {f"{clock}_seconds": plain, f"{clock}_cost": verified / plain - 1}
    return figures


def row(name: str, figures: Figures) -> list[str]:
    """A line of the table."""
    seconds = [f"{figures[f'{clock}_seconds']:.4f}" for clock in ("cpu", "wall")]
    return [name, *seconds, *(f"{figures[f'{clock}_cost']:.2f}" for clock in ("cpu", "wall"))]


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["mini", "wide"], help="models to run")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each kind")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each kind before them")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        name: compare(named(name), arguments.rounds, arguments.warmup) for name in arguments.presets
    }
    heads = ["preset", "cpu s/step", "s/step", "phases (cpu)", "phases (wall)"]
    print(table(heads, [row(name, figures) for name, figures in found.items()]))
    worst = max(figures["cpu_cost"] for figures in found.values())
    met = worst <= BAR
    print(f"\nbar: a verification takes at most {BAR} phases: {'met' if met else 'missed'}")
    results = {"presets": found, "worst": worst, "met": met}
    print_json({"benchmark": "verifying", "machine": machine(), **results})
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())

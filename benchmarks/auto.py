"""The choice of `--auto` beside every way to execute a model: three small models on one replica.

    python benchmarks/auto.py                  # by the wall clock, on a quiet machine
    python benchmarks/auto.py --processor      # by processor time, with one thread

Each way is a program of the whole model and batch, timed in rounds: all ways, then all again. The
fastest step of each counts, as other programs only slow steps down. Bar: what is chosen takes at
most 5 % longer than the best of all. The prediction stands beside the chosen one's time.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Figures, machine, print_json, table  # noqa: E402
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402

if TYPE_CHECKING:
    from popxl_gpt.execution.planning.trial import Clock

BAR = 1.05
ALONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
MODELS = {
    "demo": lambda: preset("demo"),
    "wide": lambda: preset(
        "demo", layers=3, hidden_size=384, heads=6, sequence_length=128, vocabulary_size=1024
    ),
    "deep": lambda: preset(
        "demo", layers=8, hidden_size=64, heads=4, sequence_length=64, vocabulary_size=512,
        global_batch_size=16, micro_batch_size=1,
    ),
    "tiny": lambda: preset("tiny", layers=1, global_batch_size=4, **ALONE),
}  # fmt: skip
"""By name; the last one is for tests."""
COMPARED = ("demo", "wide", "deep")


def compared(config: Config, rounds: int, steps: int, seconds: float, clock: "Clock") -> Figures:
    """The time of each way to execute a model, and of the one that is chosen."""
    # not at the top: `--help` is answered at once
    from popxl_gpt.execution.planning.axes import in_words, ways
    from popxl_gpt.execution.planning.executing import choose
    from popxl_gpt.execution.planning.trial import step_times
    from popxl_gpt.execution.pretraining import pretraining, training_program

    compared_ways = ways(config, ())
    times: dict[str, float] = {}
    for _ in range(rounds):
        for way in compared_ways:
            fastest = min(step_times(pretraining, way, 1, steps, clock))
            times[in_words(way)] = min(fastest, times.get(in_words(way), fastest))
    choice = choose(config, (), pretraining, training_program, seconds=seconds, clock=clock)
    chosen, best = in_words(choice.config), min(times, key=lambda name: times[name])
    return {
        "ways": times,
        "best": best,
        "chosen": chosen,
        "ratio": times[chosen] / times[best],
        "predicted_seconds": choice.seconds,
        "predicted_to_measured": choice.seconds / times[chosen],
        "tried": [in_words(each.placed.config) for each in choice.tried],
        "search_seconds": choice.search_seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print; 1 where a choice misses the bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=COMPARED)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed in each round, after one more")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the search")
    parser.add_argument("--processor", action="store_true", help="time by the processor's clock")
    options = parser.parse_args(arguments)
    clock = time.process_time if options.processor else time.perf_counter
    found = {
        name: compared(MODELS[name](), options.rounds, options.steps, options.seconds, clock)
        for name in options.models
    }
    rows = [
        [
            name,
            str(len(figures["ways"])),
            figures["best"],
            figures["chosen"],
            f"{figures['ratio']:.3f}",
            f"{figures['predicted_to_measured']:.2f}",
            f"{figures['search_seconds']:.0f} s",
        ]
        for name, figures in found.items()
    ]
    heads = ["model", "ways", "best of all", "chosen", "to the best", "prediction", "search"]
    print(table(heads, rows))
    worst = max(figures["ratio"] for figures in found.values())
    print(f"\nworst: {worst:.3f} of the best; at most {BAR} wanted")
    print_json(
        {
            "benchmark": "auto",
            "clock": "processor" if options.processor else "wall",
            "machine": machine(),
            "models": found,
            "worst": worst,
            "met": worst <= BAR,
        }
    )
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())

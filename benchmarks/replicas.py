"""Step time of the training program against the number of its replicas, in one process.

    python benchmarks/replicas.py                     # the `test` model, a global batch of 32
    python benchmarks/replicas.py --batch 8 --rounds 5

Every layout does the same work on the same machine, so that whatever a step takes beyond the single
replica's is what splitting costs. Eight data-parallel replicas are held to a bar. The share of
collectives is that of the replicas' time in a step that is recorded after the others; that of the
ceiling is what is multiplied over what the threads could (`ceilings.py`).
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    CHECK,
    Figures,
    Flags,
    Measurement,
    Variant,
    ceiling_share,
    ended,
    flag,
    gib,
    main_or_worker,
    make_parser,
    measure,
    outcome,
    percent,
    table,
)
from benchmarks.phased import PhasedTrainer, random_batches  # noqa: E402
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.execution.planning.model_size import flops_per_step  # noqa: E402
from popxl_gpt.utils.runtime import profile  # noqa: E402

OVERHEAD_BAR = 1.3
"""Step time of eight data-parallel replicas over the single replica's, at most."""
ALONE, BAR = "1 x 1 x 1", "8 x 1 x 1"
LAYOUTS = (ALONE, "2 x 1 x 1", "4 x 1 x 1", BAR, "1 x 2 x 1", "1 x 1 x 2", "1 x 2 x 2", "2 x 2 x 2")
"""dp x tp1 x tp2."""
SIZES = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
FLAGS: Flags = {
    "--batch": flag(32, "samples of a step, over all replicas"),
    "--rounds": flag(2, "measured steps of each layout"),
    "--warmup": flag(1, "steps before them"),
    "--together": flag(2, "layouts in memory at a time, beside the single replica"),
    "--layouts": {"nargs": "+", "help": "only these, by the names in the table"},
    **{f"--{name}": {"type": int, "help": "default: the preset's"} for name in SIZES},
    **CHECK,
}
HEADERS = (
    *("layout", "s/step", "cpu s/step", "spread", "ratio", "in collectives", "of ceiling"),
    *("peak memory", "loss"),
)


def configuration(options: Mapping[str, Any]) -> Config:
    """The settings of a layout's run."""
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    layout = dict(zip(names, map(int, options["layout"].split(" x "))))
    return preset(
        "test", **options["model"], **layout, global_batch_size=options["batch"], warmup_steps=0
    )


class Replicas(PhasedTrainer):
    """The training session of a layout."""

    def __init__(self, options: Figures):
        config = configuration(options)
        super().__init__(config, random_batches(config))

    def finish(self) -> Figures:
        """The share of collectives in a step that is recorded."""
        with profile(self.session) as profiles:
            self.step(1)
        (found,) = profiles
        spans = [span.end - span.begin for span in found.spans if span.lane == "collectives"]
        return {"collectives_share": sum(spans) / 1e9 / len(found.replicas) / found.seconds}


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """The single replica first."""
    given = vars(arguments)
    model = {name: given[name] for name in SIZES if given[name] is not None}
    options = {"model": model, "batch": arguments.batch}
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    # as demo/pretraining.py has it
    environment = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "1000"}
    return [
        Variant(name=layout, options={**options, "layout": layout}, environment=environment)
        for layout in LAYOUTS
        if layout in (ALONE, *(arguments.layouts or LAYOUTS))
    ]


def compare(measurements: Sequence[Measurement]) -> dict[str, Figures]:
    """Figures of each layout, with its ratio to the first, in the same rounds."""
    alone = measurements[0]
    return {
        m.name: {
            **m.figures(),
            **m.finish,
            "ratio": m.median / alone.median,
            "cpu_ratio": m.cpu_median / alone.cpu_median,
            "loss": m.steps[-1]["loss"],
        }
        for m in measurements
    }


def step_share(variant: Variant, seconds: float) -> float | None:
    """What a layout multiplies in a step, over what all its threads could in so many seconds."""
    config = configuration(variant.options)
    threads = int(variant.environment["OMP_NUM_THREADS"])
    return ceiling_share(flops_per_step(config), seconds, config.model.precision, threads)


def row(name: str, figures: Figures) -> list[str]:
    """A line of the table."""
    return [
        name,
        f"{figures['seconds']:.3f}",
        f"{figures['cpu_seconds']:.3f}",
        f"{100 * figures['spread']:.0f} %",
        f"{figures['ratio']:.2f}x",
        f"{100 * figures['collectives_share']:.1f} %",
        percent(figures["ceiling_share"]),
        gib(figures["peak_bytes"]),
        f"{figures['loss']:.4f}",
    ]


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    alone, *others = variants_of(arguments)
    figures: dict[str, Figures] = {}
    title = f"step time of the test model, {arguments.batch} samples a step, by layout"
    print(f"{title} (dp x tp1 x tp2)\n")
    for first in range(0, max(len(others), 1), arguments.together):
        group = [alone, *others[first : first + arguments.together]]
        measured = measure(Path(__file__), group, rounds=arguments.rounds, warmup=arguments.warmup)
        figures = {**compare(measured), **figures}
    for variant in (alone, *others):
        own = figures[variant.name]
        own["ceiling_share"] = step_share(variant, own["seconds"])
    print(table(HEADERS, [row(v.name, figures[v.name]) for v in (alone, *others)]))
    overhead = figures[BAR]["ratio"] if BAR in figures else None
    met = overhead is not None and overhead <= OVERHEAD_BAR
    if overhead is not None:
        print(f"\nbar: {BAR} at most {OVERHEAD_BAR}x the single replica: {outcome(met)}")
    result = {"batch": arguments.batch, "layouts": figures, "overhead": overhead}
    return ended("replicas", arguments, met=met, **result)


if __name__ == "__main__":
    main_or_worker(Replicas, main)

"""Step time of the training program against the number of its replicas, in one process and in
several.

    python benchmarks/replicas.py                     # the `test` model, a global batch of 32
    python benchmarks/replicas.py --batch 8 --rounds 5 --processes 1 2

Every layout does the same work on the same machine, so that whatever a step takes beyond the single
replica's is what splitting costs. Eight data-parallel replicas are held to a bar. The share of
collectives is that of the replicas' time in a step that is recorded after the others; that of the
ceiling is what is multiplied over what the threads could (`ceilings.py`).

A second table has data-parallel replicas over processes, which poprun starts, beside their plans by
`--plan --devices`: each replica has its share of the speeds that this machine is measured to have.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from poprun.cores import usable_cores  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    CHECK,
    ROOT,
    Arguments,
    Columns,
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
    output_of,
    percent,
    show,
    table,
)
from benchmarks.phased import PhasedTrainer  # noqa: E402
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.config.schema import Config  # noqa: E402
from popxl_gpt.execution.planning.machine import speeds  # noqa: E402
from popxl_gpt.execution.planning.model_size import flops_per_step  # noqa: E402
from popxl_gpt.execution.planning.options import PlanOptions  # noqa: E402
from popxl_gpt.execution.planning.run_plan import plan_step  # noqa: E402
from popxl_gpt.execution.pretraining import training_program  # noqa: E402
from popxl_gpt.utils.runtime import profile  # noqa: E402

OVERHEAD_BAR = 1.3
"""Step time of eight data-parallel replicas over the single replica's, at most."""
ALONE, BAR = "1 x 1 x 1", "8 x 1 x 1"
LAYOUTS = (ALONE, "2 x 1 x 1", "4 x 1 x 1", BAR, "1 x 2 x 1", "1 x 1 x 2", "1 x 2 x 2", "2 x 2 x 2")
"""dp x tp1 x tp2."""
SCALED = (1, 2, 4, 8)
"""Data-parallel replicas of the second table."""
SIZES = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
FLAGS: Flags = {
    "--batch": flag(32, "samples of a step, over all replicas"),
    "--rounds": flag(2, "measured steps of each layout"),
    "--warmup": flag(1, "steps before them"),
    "--together": flag(2, "layouts in memory at a time, beside the single replica"),
    "--layouts": {"nargs": "+", "help": "only these, by the names in the table"},
    "--processes": flag((1, 2, 4), "of the second table", type=int, nargs="*"),
    **{f"--{name}": {"type": int, "help": "default: the preset's"} for name in SIZES},
    **CHECK,
}
COLUMNS: Columns = {
    "layout": "{layout}".format_map,
    "s/step": "{seconds:.3f}".format_map,
    "cpu s/step": "{cpu_seconds:.3f}".format_map,
    "spread": lambda figures: f"{100 * figures['spread']:.0f} %",
    "ratio": "{ratio:.2f}x".format_map,
    "in collectives": lambda figures: f"{100 * figures['collectives_share']:.1f} %",
    "of ceiling": lambda figures: percent(figures["ceiling_share"]),
    "peak memory": lambda figures: gib(figures["peak_bytes"]),
    "loss": "{loss:.4f}".format_map,
}


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
        super().__init__(configuration(options))

    def finish(self) -> Figures:
        """The share of collectives in a step that is recorded."""
        with profile(self.session) as profiles:
            self.step(1)
        (found,) = profiles
        spans = [span.end - span.begin for span in found.spans if span.lane == "collectives"]
        return {"collectives_share": sum(spans) / 1e9 / len(found.replicas) / found.seconds}


def variants_of(arguments: Arguments) -> list[Variant]:
    """The single replica first."""
    options = {"model": model_of(arguments), "batch": arguments.batch}
    threads = os.environ.get("OMP_NUM_THREADS", str(usable_cores()))
    environment = {"OMP_NUM_THREADS": threads}
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


def model_of(arguments: Arguments) -> dict[str, int]:
    """The sizes that are given."""
    given = vars(arguments)
    return {name: given[name] for name in SIZES if given[name] is not None}


def scaling(arguments: Arguments) -> list[Figures]:
    """Measured and planned steps of data-parallel replicas, a row for each number of processes."""
    found: list[Figures] = []
    model, here = model_of(arguments), None
    for replicas in SCALED:
        options = {"model": model, "batch": arguments.batch, "layout": f"{replicas} x 1 x 1"}
        config = configuration(options)
        here = here or speeds(config, PlanOptions())[0]
        own = {name: getattr(here, name) / replicas for name in ("flops", "link", "remote")}
        plan = plan_step(training_program, config, replace(here, **own), ())
        for processes in (number for number in arguments.processes if number <= replicas):
            found.append(
                {
                    "replicas": replicas,
                    "processes": processes,
                    "seconds": measured_seconds(config, model, processes, arguments),
                    "planned_seconds": plan.seconds,
                    "planned_exposed_seconds": plan.exposed,
                    "device_peak_bytes": plan.program.peak_bytes,
                    "remote_bytes_per_replica": plan.program.remote_memory_bytes,
                }
            )
    for each in found:
        each["efficiency"] = found[0]["seconds"] / each["seconds"]
        each["planned_efficiency"] = found[0]["planned_seconds"] / each["planned_seconds"]
    return found


def measured_seconds(
    config: Config, model: Mapping[str, int], processes: int, arguments: Arguments
) -> float:
    """Seconds of a step in so many processes, by the application's own measurement."""
    replicas = config.execution.data_parallel
    values = {**model, "data_parallel": replicas, "global_batch_size": arguments.batch}
    values |= {"tensor_parallel_1": 1, "tensor_parallel_2": 1, "warmup_steps": 0}
    values |= {"measured_runs": arguments.rounds, "unmeasured_runs": arguments.warmup}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    sizes = ["--num-replicas", str(replicas), "--num-instances", str(processes)]
    program = [str(ROOT / "execution" / "pretraining.py"), "--config", "test", *flags]
    printed = output_of([sys.executable, "-m", "poprun", *sizes, sys.executable, *program])
    return float(json.loads(printed.splitlines()[-1])["seconds_per_step"])


SCALING_HEADERS = (
    *("replicas", "processes", "s/step", "planned", "of that exposed", "efficiency", "planned"),
    *("device memory", "remote memory"),
)


def scaling_row(figures: Figures) -> list[str]:
    """A line of the second table."""
    return [
        str(figures["replicas"]),
        str(figures["processes"]),
        f"{figures['seconds']:.3f}",
        f"{figures['planned_seconds']:.3f}",
        f"{figures['planned_exposed_seconds']:.3f}",
        percent(figures["efficiency"]),
        percent(figures["planned_efficiency"]),
        gib(figures["device_peak_bytes"]),
        gib(figures["remote_bytes_per_replica"]),
    ]


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    alone, *others = variants_of(arguments)
    figures: dict[str, Figures] = {}
    samples = f"{arguments.batch} samples a step"
    print(f"step time of the test model, {samples}, by layout (dp x tp1 x tp2)\n")
    for first in range(0, max(len(others), 1), arguments.together):
        group = [alone, *others[first : first + arguments.together]]
        measured = measure(Path(__file__), group, rounds=arguments.rounds, warmup=arguments.warmup)
        figures = {**compare(measured), **figures}
    for variant in (alone, *others):
        config, own = configuration(variant.options), figures[variant.name]
        flops, dtype = flops_per_step(config), config.model.precision
        own["ceiling_share"] = ceiling_share(flops, own["seconds"], dtype)
    show(COLUMNS, [{"layout": v.name, **figures[v.name]} for v in (alone, *others)])
    over_processes = scaling(arguments) if arguments.processes else []
    if over_processes:
        title = "step time of data-parallel replicas over processes, beside their plans"
        print(f"\n{title}\n\n{table(SCALING_HEADERS, list(map(scaling_row, over_processes)))}")
    overhead = figures[BAR]["ratio"] if BAR in figures else None
    met = overhead is not None and overhead <= OVERHEAD_BAR
    bar = f"bar: {BAR} at most {OVERHEAD_BAR}x the single replica" if BAR in figures else None
    result = {"batch": arguments.batch, "layouts": figures, "processes": over_processes}
    return ended("replicas", arguments, met=met, bar_text=bar, overhead=overhead, **result)


if __name__ == "__main__":
    main_or_worker(Replicas, main)

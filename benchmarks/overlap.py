"""Steps of two machines over a shaped link, with messages beside computation and without.

    python benchmarks/overlap.py           # two and a half minutes; needs root

Network namespaces play the machines, as in `collectives.py`: each has one process of one thread,
and a replica of its own. A first run over a link without a limit gives a step's computation. Then
the link gets the speed by which messages would take a share of a step in which nothing runs beside
them. What a step takes beyond its computation is exposed. The plan beside it has the same link, and
the device's speed from the first run.
"""

import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    CHECK,
    Arguments,
    Columns,
    Figures,
    Flags,
    ended,
    flag,
    make_parser,
    script,
    show,
)
from benchmarks.played_machines import can_play_machines, machines, outputs  # noqa: E402
from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.execution.planning.machine import speeds  # noqa: E402
from popxl_gpt.execution.planning.options import PlanOptions  # noqa: E402
from popxl_gpt.execution.planning.run_plan import StepPlan, plan_step  # noqa: E402
from popxl_gpt.execution.pretraining import training_program  # noqa: E402

PASSES = {
    "none": "-pipeline_loops,-overlap_collectives",
    "overlap_collectives": "-pipeline_loops",
    "pipeline_loops, too": "",
}
"""What runs messages beside computation, and `POPXL_PASSES` for it."""
UNLIMITED = 100.0
"""Gb/s of a link that takes no time."""
EXPOSED_BAR, PLAN_BAR = 0.15, 1.1
"""What is exposed with all passes, of the step; that step over the planned one, at most."""
COLUMNS: Columns = {
    "passes": "{passes}".format_map,
    "s/step": "{seconds:.3f}".format_map,
    "exposed": "{exposed_seconds:.3f}".format_map,
    "planned": "{planned_seconds:.3f}".format_map,
    "exposed in the plan": "{planned_exposed_seconds:.3f}".format_map,
}
FLAGS: Flags = {
    "--layers": flag(16, "of a model as wide as preset mini"),
    "--share": flag(0.4, "of a step, which messages take with nothing beside them"),
    "--steps": flag(4, "measured in a run"),
    "--rounds": flag(2, "runs of each, in turn"),
    **CHECK,
}


def sizes(arguments: Arguments) -> dict[str, int]:
    """Settings of the run: layers are nearly all of it."""
    return {
        "layers": arguments.layers,
        "vocabulary_size": 512,
        "data_parallel": 2,
        "micro_batch_size": 4,
        "global_batch_size": 8,
    }


def seconds_per_step(gigabits: float, passes: str, arguments: Arguments) -> float:
    """Seconds of a step over such a link."""
    values = {**sizes(arguments), "measured_runs": arguments.steps, "unmeasured_runs": 2}
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    program = ["execution/pretraining.py", "--config", "mini", *flags]
    with machines(2, gigabits) as names:
        printed = outputs(names, program, POPXL_PASSES=passes)
    return float(json.loads(printed[0].splitlines()[-1])["seconds_per_step"])


def planned(tflops: float, gigabits: float, passes: str, arguments: Arguments) -> StepPlan:
    """The plan of a step on such devices and such a link."""
    os.environ["POPXL_PASSES"] = passes
    config = preset("mini", **sizes(arguments))
    options = PlanOptions(device_tflops=tflops, link_gbps=gigabits / 8, remote_gbps=20)
    return plan_step(training_program, config, *speeds(config, options))


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when a bar is missed; 2 where this
    machine cannot play others.
    """
    arguments = make_parser(__doc__, FLAGS).parse_args()
    if not can_play_machines("overlap"):
        return 2
    compute = seconds_per_step(UNLIMITED, PASSES["none"], arguments)
    plan = planned(1.0, UNLIMITED, PASSES["none"], arguments)
    tflops = plan.compute / compute
    gigabits = UNLIMITED * plan.link / compute * (1 / arguments.share - 1)
    found: dict[str, list[float]] = {name: [] for name in PASSES}
    for _ in range(arguments.rounds):
        for name, passes in PASSES.items():
            found[name].append(seconds_per_step(gigabits, passes, arguments))
    figures: dict[str, Figures] = {}
    for name, passes in PASSES.items():
        plan, seconds = planned(tflops, gigabits, passes, arguments), statistics.median(found[name])
        figures[name] = {
            "seconds": seconds,
            "exposed_seconds": seconds - compute,
            "planned_seconds": plan.seconds,
            "planned_exposed_seconds": plan.exposed,
        }
    print(f"computation {compute:.3f} s a step, link {gigabits:.3f} Gb/s\n")
    show(COLUMNS, [{"passes": name, **of} for name, of in figures.items()])
    last = [*figures.values()][-1]
    met = last["exposed_seconds"] <= EXPOSED_BAR * last["seconds"]
    met = met and last["seconds"] <= PLAN_BAR * last["planned_seconds"]
    bars = f"at most {EXPOSED_BAR} of a step exposed, at most {PLAN_BAR}x the planned step"
    result = {"compute": compute, "gigabits": gigabits, "passes": figures}
    return ended("overlap", arguments, met=met, bar_text=f"bars with all passes: {bars}", **result)


if __name__ == "__main__":
    script(main)

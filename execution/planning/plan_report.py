"""`--plan`: what a run would need of memory, traffic and time, as text and as JSON."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import popdist

from popxl_gpt.config.schema import Config, Execution
from popxl_gpt.execution.block_graphs import stretches
from popxl_gpt.execution.planning.layouts import (
    fastest_layouts,
    layouts_text,
    layouts_values,
    scaling_text,
    scaling_values,
)
from popxl_gpt.execution.planning.machine import origin
from popxl_gpt.execution.planning.memory import Build
from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.run_plan import RunPlan, make_run_plan
from popxl_gpt.execution.planning.text import layout_name, layout_values, micro_batches, table
from popxl_gpt.execution.recomputation import stretches_text
from popxl_gpt.utils.files.output_folder import written_to
from popxl_gpt.utils.files.whole import write_whole
from popxl_gpt.utils.units import bytes_text, counted, duration, si

ASSUMPTIONS = (
    "Per replica and step, the mean of a run's. Every FLOP at the device's speed; rows come and "
    "go while the device computes, and messages as far as\nnothing needs them: each replica has a "
    "machine or a GPU of its own; exposed is what is waited for.\nPeak memory: of a device with "
    "memory of its own; a CPU uses remote rows where they lie. Remote memory: of the buffers "
    "that a phase reaches.\nA ring of n sends 2 (n-1)/n of an all-reduce's tensor, (n-1)/n of an "
    "all-gather's or a reduce-scatter's, padded.\nPhysical limit of a phase: the larger of FLOPs "
    "and remote bytes over their speeds."
)


def write_plan(found: RunPlan, folder: Path) -> None:
    """Write `plan.json`; OSError where that fails."""
    _write(plan_values(found), folder / "plan.json")


def _write(values: Any, path: Path) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


def plan_and_show(
    build: Build, config: Config, options: PlanOptions, validation: Build | None = None
) -> None:
    """Print a plan, and write it as JSON. In a run of several processes the first one does it."""
    if popdist.getInstanceIndex() != 0:
        return
    folder = (
        Path(options.plan_folder)
        if options.plan_folder
        else Path(config.logging.run_folder) / f"{config.name}-plan"
    )
    with written_to(folder, "--plan_folder"):
        folder.mkdir(parents=True, exist_ok=True)
    searches = fastest_layouts(build, config, options) if options.devices else []
    if len(searches) > 1:
        print(scaling_text(searches))
        with written_to(folder, "--plan_folder"):
            _write(scaling_values(searches), folder / "devices.json")
        print(f"\nwritten to {folder}")
        return
    if searches:
        print(layouts_text(searches[0]), end="\n\n")
        config = searches[0].shown[0].config
    found = make_run_plan(build, config, options, validation)
    print(plan_text(found))
    with written_to(folder, "--plan_folder"):
        write_plan(found, folder)
        if searches:
            _write(layouts_values(searches[0]), folder / "layouts.json")
    print(f"\nwritten to {folder}")


def plan_text(found: RunPlan) -> str:
    """The whole plan."""
    return "\n\n".join(
        [_head(found), _phases(found), _collectives(found), _totals(found), ASSUMPTIONS]
    )


def _head(found: RunPlan) -> str:
    execution, machine, replicas = found.config.execution, found.machine, found.program.replicas
    layout = layout_name(execution)
    speeds = (
        ("device", "device_tflops", si(machine.flops, "FLOP/s")),
        ("links", "link_gbps", si(machine.link, "B/s")),
        ("remote memory", "remote_gbps", si(machine.remote, "B/s")),
    )
    told = ", ".join(
        name + " " + text + origin(found.config, flag, found.measured)
        for name, flag, text in speeds
    )
    return (
        f"plan of {found.config.name}: {si(parameter_count(found.config.model))} parameters, "
        f"{found.config.model.precision}, {replicas} replica{'s' * (replicas > 1)} (dp x tp1 x "
        f"tp2 = {layout}), {micro_batches(found.config)} per step\n{told}"
    )


def _phases(found: RunPlan) -> str:
    heads = (
        "phase",
        "runs",
        "FLOP",
        "peak memory",
        "remote memory",
        "from remote",
        "to remote",
        "sent",
        "compute",
        "links",
        "exposed",
        "remote",
    )
    rows, steps = [(*heads, "bound")], found.program.steps
    for phase, time in zip(found.program.phases, found.times):
        rows.append(
            (
                phase.name,
                f"{phase.runs / steps:.4g}",
                si(phase.flops / steps),
                bytes_text(phase.peak_bytes),
                bytes_text(phase.remote_memory_bytes),
                bytes_text(phase.loaded_bytes / steps),
                bytes_text(phase.stored_bytes / steps),
                bytes_text(phase.sent_bytes / steps),
                duration(time.compute / steps),
                duration(time.link / steps),
                duration(time.exposed / steps),
                duration(time.remote / steps),
                time.bound if time.seconds else "-",
            )
        )
    phases = found.program.phases
    rows.append(
        (
            "step",
            "",
            si(sum(p.flops for p in phases) / steps),
            bytes_text(found.program.peak_bytes),
            bytes_text(found.program.remote_memory_bytes),
            bytes_text(sum(p.loaded_bytes for p in phases) / steps),
            bytes_text(sum(p.stored_bytes for p in phases) / steps),
            bytes_text(sum(p.sent_bytes for p in phases) / steps),
            duration(found.compute),
            duration(found.link),
            duration(found.exposed),
            duration(found.remote),
            found.bound,
        )
    )
    return table(rows)


def _collectives(found: RunPlan) -> str:
    rows, steps = (
        [("phase", "collective", "group", "calls", "brought", "sent")],
        found.program.steps,
    )
    for phase in found.program.phases:
        for c in phase.collectives:
            group = group_name(c.group_size, c.stride, found.config.execution)
            sizes = (bytes_text(c.brought_bytes / steps), bytes_text(c.sent_bytes / steps))
            rows.append(
                (
                    phase.name,
                    c.op.removeprefix("replicated_"),
                    group,
                    f"{c.calls / steps:.4g}",
                    *sizes,
                )
            )
    return table(rows, numbers_from=3) if len(rows) > 1 else "no collectives: each replica is alone"


def group_name(size: int, stride: int, execution: Execution) -> str:
    """A group by what it is for, with its size."""
    tp1, tp2, dp = execution.tensor_parallel_1, execution.tensor_parallel_2, execution.data_parallel
    known = (
        ("tp2", tp2, 1),
        ("tp1", tp1, tp2),
        ("dp", dp, tp1 * tp2),
        ("all", tp1 * tp2 * dp, 1),
        ("tp1 x tp2", tp1 * tp2, 1),
        ("dp x tp1", dp * tp1, tp2),
    )
    name = next((name for name, *group in known if group == [size, stride]), None)
    if name is None:
        name = f"stride {stride}" if stride else "no one stride"
    return f"{name} ({size})"


def _totals(found: RunPlan) -> str:
    program, config = found.program, found.config
    process, replicas_here = found.process, program.replicas // popdist.getNumInstances()
    slowest, longest = max(zip(found.times, program.phases), key=lambda pair: pair[0].seconds)
    in_it = duration(slowest.seconds / program.steps)
    has_budget = config.execution.activation_memory is not None
    lines = (
        ("device memory", f"{bytes_text(program.peak_bytes)} at peak on each replica"),
        (
            "remote memory",
            f"{bytes_text(program.remote_memory_bytes)} per replica, "
            f"{bytes_text(program.total_remote_memory_bytes)} in total",
        ),
        *((("activations", stretches_text(stretches(config))),) if has_budget else ()),
        (
            "process",
            f"{bytes_text(process.resident)} resident: {bytes_text(process.itself)} for itself, "
            f"{bytes_text(process.rows)} of rows and {bytes_text(process.tensors)} of tensors for "
            f"{replicas_here} replica{'s' * (replicas_here > 1)}, or in place of tensors "
            f"{bytes_text(process.saving)} for checkpoints",
        ),
        (
            "saving",
            f"{bytes_text(process.copy)} more at most, while a checkpoint is written beside "
            "training"
            if process.copy
            else "training waits while a checkpoint is written",
        ),
        (
            "step",
            (
                f"{duration(found.seconds)} for {si(config.tokens_per_step, 'tokens')}, bound by "
                f"{found.bound}"
            ),
        ),
        ("longest phase", f"{longest.name}, {in_it}, bound by {slowest.bound}"),
        ("throughput", si(found.tokens_per_second, "tokens/s")),
        (
            "of the limit",
            (
                f"{found.limit / found.seconds:.1%} of the physical limit, "
                f"{duration(found.limit)} per step"
            ),
        ),
        (
            "utilisation",
            f"{found.utilisation:.1%} of the devices' speed, recomputation not counted",
        ),
        (
            "whole run",
            f"{counted(config.training.steps, 'step')}, "
            f"{duration(found.seconds * config.training.steps)}",
        ),
    )
    return "\n".join(f"{name:<15}{text}" for name, text in [*lines, *_validation(found)])


def _validation(found: RunPlan) -> list[tuple[str, str]]:
    """What validation takes, where it is executed in a way of its own."""
    if found.validation is None:
        return []
    own, program = found.config.in_inference, found.validation
    text = (
        f"{bytes_text(program.peak_bytes)} at peak, on dp x tp1 x tp2 = "
        f"{layout_name(own.execution)}, {micro_batches(own)} per global batch"
    )
    return [("validation", text)]


def plan_values(found: RunPlan) -> "dict[str, Any]":
    """The plan as plain values, per replica unless a name says otherwise: `step` is of one step,
    `phases` of a run.
    """
    program = found.program
    steps = program.steps
    phases = []
    for phase, time in zip(program.phases, found.times):
        values = asdict(replace(phase, timeline=())) | {
            "flops": phase.flops,
            "product_flops": phase.product_flops,
        }
        del values["timeline"]
        values["remote_memory_bytes_total"] = phase.remote_memory_bytes * program.replicas
        values |= {
            "sent_bytes": phase.sent_bytes,
            "compute_seconds": time.compute,
            "link_seconds": time.link,
            "exposed_seconds": time.exposed,
        }
        values |= {
            "remote_seconds": time.remote,
            "seconds": time.seconds,
            "limit_seconds": time.limit,
        }
        phases.append(values | {"bound": time.bound})
    return {
        "config": found.config.name,
        "replicas": program.replicas,
        "steps": steps,
        "layout": layout_values(found.config.execution),
        "parameters": parameter_count(found.config.model),
        "machine": asdict(found.machine) | {"measured": list(found.measured)},
        "step": {
            "seconds": found.seconds,
            "limit_seconds": found.limit,
            "fraction_of_limit": found.limit / found.seconds,
            "bound": found.bound,
            "tokens": found.config.tokens_per_step,
            "tokens_per_second": found.tokens_per_second,
            "utilisation": found.utilisation,
            "flops": sum(phase.flops for phase in program.phases) // steps,
            "remote_bytes": sum(phase.remote_bytes for phase in program.phases) // steps,
            "sent_bytes": sum(phase.sent_bytes for phase in program.phases) // steps,
        },
        "memory": {
            "device_peak_bytes": program.peak_bytes,
            "remote_bytes_per_replica": program.remote_memory_bytes,
            "remote_bytes_total": program.total_remote_memory_bytes,
            "process": asdict(found.process) | {"resident": found.process.resident},
            "remote_buffers": program.buffers,
            **_validation_values(found),
        },
        "phases": phases,
    }


def _validation_values(found: RunPlan) -> dict[str, int]:
    if found.validation is None:
        return {}
    return {
        "validation_peak_bytes": found.validation.peak_bytes,
        "validation_remote_bytes_total": found.validation.total_remote_memory_bytes,
    }

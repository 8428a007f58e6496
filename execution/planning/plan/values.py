"""A plan as plain values, for JSON."""

from dataclasses import asdict
from typing import Any

from popxl_gpt.execution.planning.model_size import parameter_count
from popxl_gpt.execution.planning.plan.run_plan import RunPlan


def plan_values(found: RunPlan) -> "dict[str, Any]":
    """The plan as plain values, per replica unless a name says otherwise: `step` is of one step,
    `phases` of a run.
    """
    program, execution = found.program, found.config.execution
    steps = program.steps
    phases = []
    for phase, time in zip(program.phases, found.times):
        values = asdict(phase) | {"flops": phase.flops, "product_flops": phase.product_flops}
        values["remote_memory_bytes_total"] = phase.remote_memory_bytes * program.replicas
        values |= {
            "sent_bytes": phase.sent_bytes,
            "compute_seconds": time.compute,
            "link_seconds": time.link,
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
        "layout": {
            "data_parallel": execution.data_parallel,
            "tensor_parallel_1": execution.tensor_parallel_1,
            "tensor_parallel_2": execution.tensor_parallel_2,
        },
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
        },
        "phases": phases,
    }

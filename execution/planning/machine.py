"""The machine that a plan, a profile or a run's speed is set beside."""

from dataclasses import replace
from functools import cache
from typing import Any

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.utils.runtime import (
    data_type,
    gather,
    has_device,
    multiplies_bfloat16,
    multiply_ceiling,
    planner,
    runs_on_gpu,
)

SPEEDS = {
    "device_tflops": ("flops", 1e12),
    "link_gbps": ("link", 1e9),
    "remote_gbps": ("remote", 1e9),
}
"""The machine's speed that each flag gives, and its unit in FLOP/s or bytes/s."""


def speeds(config: Config, options: PlanOptions) -> tuple[Any, tuple[str, ...]]:
    """The machine that the options describe, and the flags of those speeds that were measured on
    this one.
    """
    tools = planner()
    given = {flag: getattr(options, flag) for flag in SPEEDS}
    known = {
        name: given[flag] * unit for flag, (name, unit) in SPEEDS.items() if given[flag] is not None
    }
    measured = tuple(flag for flag, value in given.items() if value is None)
    if not measured:
        return tools.Machine(**known), measured
    device = config.execution.device if has_device(config.execution.device) else "cpu"
    found = tools.measure(data_type(config.model.precision), device)
    return replace(found, **known), measured


def origin(config: Config, flag: str, measured: tuple[str, ...]) -> str:
    """What a report says behind the speed of a flag: nothing of one that was given."""
    execution = config.execution
    if flag not in measured:
        return ""
    if not has_device(execution.device):
        return " (this CPU's: no GPU here)"
    on_gpus = execution.replication_factor > 1 and execution.device != "cpu" and has_device("cuda")
    if flag == "link_gbps" and on_gpus:
        return " (a copy within one GPU: give --link_gbps)"
    return " (measured here)"


def run_ceiling(config: Config) -> float | None:
    """FLOP/s that the threads of all processes of a run can multiply at most, of which MFU (model
    FLOPs utilisation) is a share; None where that is not known. All processes must call it. It
    takes 0.05 s.
    """
    own = multiply_ceiling(config.model.precision, config.execution.device)
    found = gather(own)
    return sum(found) if all(found) else None


@cache
def may_narrow(device: str) -> bool:
    """Whether bfloat16 may be faster than float32: on a GPU, or where this CPU has instructions for
    it that multiply faster. Some CPUs' have half the rate of float32.
    """
    return runs_on_gpu(device) or (
        multiplies_bfloat16()
        and multiply_ceiling("bfloat16", device) > multiply_ceiling("float32", device)
    )

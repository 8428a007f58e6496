"""Programs of odd sizes, their plans, and what a run of them takes."""

import functools
from typing import Any

import numpy as np

from popxl_gpt.config.presets import preset
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.machine import speeds
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.run_plan import RunPlan, StepPlan, make_run_plan, plan_step
from popxl_gpt.execution.pretraining import training_program

SPEEDS = {"device_tflops": 1.0, "link_gbps": 1.0, "remote_gbps": 1.0}
ODD = {
    "hidden_size": 60,
    "heads": 6,
    "sequence_length": 11,
    "vocabulary_size": 97,
    "global_batch_size": 6,
}
"""With 2 x 2 replicas or 3 heads each, nothing is a power of two."""
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 3, 2), (2, 2, 2)]


def configuration(grid: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> Config:
    """A small model of odd sizes on dp x tp1 x tp2 replicas."""
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    return preset("tiny", **{**ODD, **dict(zip(names, grid)), **changes})


built = functools.lru_cache(maxsize=4)(training_program)
"""As `training_program`, for plans of one program for several machines."""


@functools.cache
def planned(config: Config, **options: Any) -> RunPlan:
    """The whole plan, made once for all tests of a process."""
    return make_run_plan(training_program, config, options_of(options))


def planned_work(config: Config, **options: Any) -> StepPlan:
    """Work, traffic and time alone: memory at its peak takes most of a plan's time."""
    return plan_step(built, config, *speeds(config, options_of(options)), with_peaks=False)


def options_of(options: "dict[str, Any]") -> PlanOptions:
    return PlanOptions(plan=True, **{**SPEEDS, **options})


def as_flags(grid: tuple[int, int, int], changes: "dict[str, Any]") -> "list[str]":
    names = ("data_parallel", "tensor_parallel_1", "tensor_parallel_2")
    values = {**ODD, **dict(zip(names, grid)), **changes}
    return [
        "--config",
        "tiny",
        *(word for name, value in values.items() for word in (f"--{name}", str(value))),
    ]


def step_arrays(config: Config) -> "tuple[np.ndarray, np.ndarray, list[float]]":
    """Words, labels and learning rates of one run."""
    iterations, model = config.execution.device_iterations, config.model
    shape = (config.training.global_batch_size * iterations, model.sequence_length)
    words = np.random.default_rng(0).integers(0, model.vocabulary_size, shape)
    return words, np.roll(words, -1, axis=1), [1e-3] * iterations

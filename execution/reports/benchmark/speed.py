"""Speed of the training program on synthetic data."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import popxl_addons as addons

from popxl_gpt.config.schema import Config
from popxl_gpt.data.in_memory import SyntheticDataset
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.execution.host import data_share, run_steps
from popxl_gpt.execution.planning.machine import run_ceiling
from popxl_gpt.execution.planning.model_size import flops_per_step
from popxl_gpt.execution.reports.benchmark.options import Options
from popxl_gpt.execution.reports.profile.report import StepProfiler
from popxl_gpt.utils.runtime import file_traffic

PROFILED_RUNS = 2
"""Runs with a profiler; it keeps the last."""


@dataclass(frozen=True)
class FileUse:
    """What this process moved between memory and what rows wait in, in the measured runs."""

    store: str
    """The place where rows wait: files or host memory."""
    memory_bytes: int
    file_bytes: int
    is_direct: bool
    """Whether it passes by the system's page cache."""
    read_bytes_per_step: float
    written_bytes_per_step: float
    seconds_reading: float
    """Seconds per step, beside the computation or not."""
    seconds_writing: float
    waiting: float
    """Share of the time in which the computation waited for rows."""


@dataclass(frozen=True)
class Speed:
    """The median of the measured runs."""

    config: str
    seconds_per_step: float
    tokens_per_second: float
    samples_per_second: float
    tflops_per_second: float
    """TFLOP/s of the model, recomputation not counted."""
    mfu: float | None
    """The model's FLOP/s over what the machine multiplies at most; None where that is not known."""
    loss: float
    """The loss of the last step."""
    files: FileUse | None = None
    """The use of files, where remote memory comes and goes."""


def measure(
    program: Callable[[Config], addons.TaskSession],
    config: Config,
    options: Options,
    profiler: StepProfiler | None = None,
) -> Speed:
    """Run the training program and take the time; then, with a profiler, run it again."""
    iterations, training = config.execution.device_iterations, config.training
    data = SyntheticDataset(
        config.model.sequence_length, config.model.vocabulary_size, training.seed
    )
    samples = training.global_batch_size * iterations
    session, times, loss, share = program(config), [], 0.0, data_share(config)
    loader = BatchLoader(
        data,
        samples,
        seed=training.seed,
        instance=share.index,
        instances=share.count,
        accumulation_steps=config.gradient_accumulation * iterations,
    )
    with session, loader:
        for number in range(options.unmeasured_runs + options.measured_runs):
            words, labels = loader.batch(number)
            if number == options.unmeasured_runs:
                before = file_traffic(session)
            begin = time.perf_counter()
            loss = run_steps(session, config, words, labels, [training.learning_rate] * iterations)[
                -1
            ].loss
            times.append((time.perf_counter() - begin) / iterations)
        files = file_use(
            before, file_traffic(session), times[options.unmeasured_runs :], iterations
        )
        if profiler is not None:
            for number in range(PROFILED_RUNS):
                with profiler.around(session, is_last=number + 1 == PROFILED_RUNS):
                    run_steps(session, config, words, labels, [training.learning_rate] * iterations)
    seconds = statistics.median(times[options.unmeasured_runs :])
    flops_per_second, ceiling = flops_per_step(config) / seconds, run_ceiling(config)
    return Speed(
        config=config.name,
        seconds_per_step=seconds,
        tokens_per_second=config.tokens_per_step / seconds,
        samples_per_second=training.global_batch_size / seconds,
        tflops_per_second=flops_per_second / 1e12,
        mfu=None if ceiling is None else flops_per_second / ceiling,
        loss=loss,
        files=files,
    )


def file_use(
    before: Any | None, after: Any | None, times: Sequence[float], iterations: int
) -> FileUse | None:
    """What was moved between two readings of a session's traffic, in runs whose steps took these
    times, in seconds.
    """
    if before is None or after is None:
        return None
    steps = len(times) * iterations
    return FileUse(
        store=after.store,
        memory_bytes=after.memory_bytes,
        file_bytes=after.file_bytes,
        is_direct=after.is_direct,
        read_bytes_per_step=(after.read_bytes - before.read_bytes) / steps,
        written_bytes_per_step=(after.written_bytes - before.written_bytes) / steps,
        seconds_reading=(after.read_seconds - before.read_seconds) / steps,
        seconds_writing=(after.write_seconds - before.write_seconds) / steps,
        waiting=(after.waited - before.waited) / (sum(times) * iterations),
    )

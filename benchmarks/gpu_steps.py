"""The workloads of `gpu.py`: the phased step, and plain PyTorch's."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import popxl
import torch
from popxl_engine.machine.device import device_named
from popxl_engine.machine.paging.paged_buffer import in_blocks, nbytes_of
from popxl_engine.planner.measuring import host_rate
from popxl_engine.residency import AUTO
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Figures
from benchmarks.phased import PhasedTrainer, random_batches
from benchmarks.plain_gpt import PlainTraining
from benchmarks.plain_llama import PlainLlama
from benchmarks.plain_steps import PlainSteps, trainer_of
from popxl_gpt.config.presets import override, preset
from popxl_gpt.config.schema import Config, Execution, Model, Training
from popxl_gpt.execution.planning.model_size import flops_per_token, parameter_count
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.utils.runtime import file_traffic, planner

ONE_LAYER = 1.1
"""Times what a program needs at least: the device's memory with one layer of it there."""


# What the machine does at most


def product_rate(device: torch.device, dtype: str, rows: int, model: Model) -> float:
    """FLOP/s of the feed-forward layer's first product, the best of some."""
    element, hidden = getattr(torch, dtype), model.hidden_size
    columns = (2 if model.has_gate else 1) * model.feed_forward
    lhs = torch.randn(rows, hidden, dtype=element, device=device)
    rhs, times = torch.randn(columns, hidden, dtype=element, device=device).t(), []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(5):
            torch.mm(lhs, rhs)
        synchronize(device)
        times.append((time.perf_counter() - begin) / 5)
    return 2 * rows * hidden * columns / min(times)


def ceilings(options: Figures, config: Config) -> Figures:
    """Both, and the card's name; the memory is free again."""
    device = torch.device(options["device"])
    rows = config.execution.micro_batch_size * config.model.sequence_length
    found = {
        "link": host_rate(device_named(options["device"])),
        "product": product_rate(device, config.model.precision, rows, config.model),
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "dtype": config.model.precision,
    }
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def size_of(config: Config, layers: int | None) -> Figures:
    """Parameters, tokens and FLOPs of a call, and a share: FLOPs over those with so many layers."""
    tokens = config.execution.device_iterations * config.tokens_per_step
    flops = flops_per_token(config.model)
    every = flops_per_token(replace(config.model, layers=layers)) if layers else flops
    return {
        "parameters": parameter_count(config.model),
        "tokens": tokens,
        "flops": tokens * flops,
        "flops_share": flops / every,
    }


# A recorded step


def busy(spans: Sequence[tuple[int, int]]) -> int:
    """Time that is in any of some spans (begin, end)."""
    total, reached = 0, -math.inf
    for begin, end in sorted(spans):
        total += max(0, int(end - max(begin, reached)))
        reached = max(reached, end)
    return total


def record(device: torch.device, step: Callable[[], object], timeline: str | None) -> Figures:
    """Share of a step in which the device computes nothing; on a processor its operators stand for
    kernels. Recording delays a host that the device waits for.
    """
    on_gpu = device.type == "cuda"
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as recorded:
        begin = time.perf_counter_ns()
        step()
        synchronize(device)
        took = time.perf_counter_ns() - begin
    if timeline is not None:
        recorded.export_chrome_trace(timeline)
    events = recorded.profiler.kineto_results.events()
    where = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernels = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == where
        and not event.is_user_annotation()
        and not event.name().startswith("Mem")  # copies, and memory that is set
    ]
    return {
        "idle": 1 - busy(kernels) / took,
        "recorded_seconds": took / 1e9,
        "timeline": Path(timeline).name if timeline is not None else None,
    }


# The phased step


def config_of(options: Figures) -> Config:
    """The application's configuration, without a limit on the device's memory."""
    if options["preset"]:
        at_once = 2 if options["small"] else 50
        return preset(options["preset"], device=options["device"], device_iterations=at_once)
    config = Config(
        name="gpu",
        model=Model(**options["model"], precision=options["dtype"]),
        training=Training(
            steps=1000,
            global_batch_size=options["batch"],
            learning_rate=1e-4,
            schedule="constant",
            stochastic_rounding=True,
            moment_precision="8bit",
            gradient_precision="bfloat16",
        ),
        execution=Execution(
            micro_batch_size=options["micro_batch"],
            head_serialisation=4,
            device=options["device"],
        ),
    )
    return override(config, **options["settings"])


def rows_of(ir: popxl.Ir) -> int:
    """Bytes of all rows."""
    return sum(in_blocks(nbytes_of(b)) * b.entries for b in ir.remote_buffers)


def plan_of(config: Config, options: Figures) -> Figures:
    """Bytes of the device that are needed at least and to hold all rows, the limit that follows
    from them, and page-locked bytes of the host.
    """
    ir = training_program(config)[0]
    needs = planner().device_needs(ir, options["device"])
    rows = rows_of(ir)
    wanted, device = options["memory"], torch.device(options["device"])
    if wanted == "one layer":
        limit = int(ONE_LAYER * needs.least)
    elif wanted and options["small"]:
        limit = (needs.least + needs.resident) // 2
    elif wanted:
        limit = override(config, device_memory=wanted).execution.device_memory
    elif device.type == "cuda" and torch.cuda.is_available():
        limit = int(AUTO * torch.cuda.mem_get_info(device)[0])
    else:
        limit = needs.resident
    return {
        "least": needs.least,
        "resident": needs.resident,
        "device": min(limit, needs.resident),
        "pinned": 0 if limit >= needs.resident else rows,
        "parameters": parameter_count(config.model),
    }


class GPUWorkload:
    """A run's configuration, and what it tells of itself."""

    def __init__(self, options: Figures):
        self.options, self.device = options, torch.device(options["device"])
        self.config = config_of(options)
        self.told = ceilings(options, self.config) | size_of(self.config, options["layers"])

    def finish(self) -> Figures:
        """Most bytes that were allocated on a GPU, and that torch took of it, and a recorded
        step.
        """
        found = {}
        if self.device.type == "cuda":
            found["device_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            found["device_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found | record(self.device, partial(self.step, 1), self.options["timeline"])


class PhasedWorkload(GPUWorkload):
    """The phased step with so much of the device's memory."""

    def __init__(self, options: Figures):
        super().__init__(options)
        plan = plan_of(self.config, options)
        if options["memory"]:
            self.config = override(self.config, device_memory=plan["device"])
        self.trainer = PhasedTrainer(self.config)
        synchronize(self.device)
        traffic = file_traffic(self.trainer.session)
        self.told |= {"plan": plan, "pinned_bytes": traffic.file_bytes if traffic else 0}

    def step(self, count: int) -> Figures:
        """Calls of the session; the loss of the last, and what steps moved and waited for."""
        figures = self.trainer.step(count * self.config.execution.device_iterations)
        synchronize(self.device)
        return {**self.told, **figures}


# Plain PyTorch


class PlainWorkload(GPUWorkload):
    """The step in plain PyTorch: compiled, fused attention and AdamW, each block's activations
    computed again; float32 weights. FSDP2 keeps all state on the host.
    """

    def __init__(self, options: Figures):
        super().__init__(options)
        training = PlainTraining(steps=1000, learning_rate=1e-4, weight_decay=0.1, max_norm=1.0)
        with self.device:  # drawn there
            gpt = PlainLlama(self.config.model)
        how = {"offloads": options["kind"] == "FSDP2", "compiled": not options["small"]}
        how |= {"device": options["device"], "dtype": getattr(torch, options["dtype"])}
        trainer = trainer_of(gpt, training, **how)
        batches = random_batches(options["batch"], self.config.model)
        self.plain = PlainSteps(trainer, batches, options["micro_batch"], options["device"])

    def step(self, count: int) -> Figures:
        """Optimizer steps; the loss of the last."""
        figures = self.plain.step(count)
        synchronize(self.device)  # the optimizer comes after the loss
        return {**self.told, **figures}

"""The workloads of `gpu.py`: the phased step, and plain PyTorch's."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import popxl
import popxl_addons as addons
import torch
from popxl_engine.kernels.linalg import matrix_product
from popxl_engine.machine.device import Pages, device_named
from popxl_engine.machine.machine import Machine
from popxl_engine.machine.paging import HostStore
from popxl_engine.machine.paging.paged_buffer import in_blocks, nbytes_of
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
from popxl_gpt.execution.variables import write
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.runtime import file_traffic, planner, session_device

LINK_BYTES = 2**28
"""The size of a transfer by which the link is measured."""
ONE_LAYER = 1.1
"""Times what a program needs at least: the device's memory with one layer of it there."""
MOVED = {
    "read_bytes": "to_device_bytes",
    "written_bytes": "from_device_bytes",
    "waited": "waited_seconds",
}
"""What is kept of what a session counts, and as what."""


# What the machine does at most


def link(device: str, nbytes: int) -> Figures:
    """Bytes/s to the device, from it, and both at once, by the copies that rows travel with."""
    place = device_named(device)
    store, memory = HostStore(2 * nbytes, place), place.memory(2 * nbytes).bytes
    ways: dict[str, Callable[[], None]] = {
        "to": lambda: store.read(0, memory[:nbytes]),
        "from": lambda: store.write(nbytes, memory[nbytes:]),
    }

    def seconds(names: Sequence[str]) -> float:
        jobs = [threading.Thread(target=ways[name]) for name in names]
        begin = time.perf_counter()
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        return time.perf_counter() - begin

    found: Figures = {}
    for name, names in {"to": ("to",), "from": ("from",), "both": ("to", "from")}.items():
        found[name] = len(names) * nbytes / min(seconds(names) for _ in range(5))
    return found


def product_rates(device: torch.device, dtype: str, rows: int, model: Model) -> Figures:
    """FLOP/s of the feed-forward layer's first product, and of the engine's logits, the best of
    some.
    """
    element, hidden = getattr(torch, dtype), model.hidden_size
    lhs = torch.randn(rows, hidden, dtype=element, device=device)

    def rate(multiply: Callable[..., torch.Tensor], columns: int) -> float:
        rhs, times = torch.randn(columns, hidden, dtype=element, device=device).t(), []
        for _ in range(10):
            begin = time.perf_counter()
            for _ in range(5):
                multiply(lhs, rhs)
            synchronize(device)
            times.append((time.perf_counter() - begin) / 5)
        return 2 * rows * hidden * columns / min(times)

    wide = 2 if model.has_gate else 1
    return {
        "up": rate(torch.mm, wide * model.feed_forward),
        "logits": rate(matrix_product, model.vocabulary_size),
    }


def ceilings(options: Figures, config: Config) -> Figures:
    """Both, and the card's name; the memory is free again."""
    device = torch.device(options["device"])
    rows = config.execution.micro_batch_size * config.model.sequence_length
    found = {
        "link": link(options["device"], 2**16 if options["small"] else LINK_BYTES),
        "products": product_rates(device, config.model.precision, rows, config.model),
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
    """Share of a step in which the device computes nothing, and seconds of its copies each way; on
    a processor its operators stand for kernels. Recording delays a host that the device waits for.
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
    kernels, copies = [], {"to": 0, "from": 0}
    for event in events:
        name = event.name()
        if event.device_type() != where or event.is_user_annotation():
            continue
        if name.startswith(("Memcpy HtoD", "Memcpy DtoH")):
            copies["to" if "HtoD" in name else "from"] += event.duration_ns()
        elif not name.startswith("Mem"):
            kernels.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return {
        "idle": 1 - busy(kernels) / took,
        "recorded_seconds": took / 1e9,
        "copying_seconds": {way: nanoseconds / 1e9 for way, nanoseconds in copies.items()},
        "timeline": Path(timeline).name if timeline is not None else None,
    }


def finished(device: torch.device, step: Callable[[], object], timeline: str | None) -> Figures:
    """Most bytes that were allocated on a GPU, and that torch took of it, and a recorded step."""
    found = {}
    if device.type == "cuda":
        found["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        found["device_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found | record(device, step, timeline)


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


def draw_weights(session: addons.TaskSession, config: Config, device: torch.device) -> None:
    """Fresh weights: matrices are drawn where rows are, and go to no array of the host."""
    machine, variables = session._engine.machine, session.state.weights.to_dict()
    rows, generator = machine.replicas[0].rows, torch.Generator(device).manual_seed(0)
    for name, parameter in model_table(config.model).items():
        variable = variables[name]
        if len(parameter.shape) == 1:
            write(session, {variable: parameter.initial(name, config.training.seed)})
            continue
        location = variable.location_info
        buffer = rows[location.buffer]
        with torch.no_grad(), machine.turn():
            drawn = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            drawn.normal_(std=config.model.initial_std, generator=generator)
            buffer.store(location.offset, drawn)


class PhasedWorkload:
    """The phased step with so much of the device's memory."""

    def __init__(self, options: Figures):
        self.options, self.device = options, torch.device(options["device"])
        self.start_up: dict[str, float] = {}
        self.config = config_of(options)
        with self.timed("ceilings"):
            self.told = ceilings(options, self.config)
        with self.timed("planning"):
            self.plan = plan_of(self.config, options)
        if options["memory"]:
            self.config = override(self.config, device_memory=self.plan["device"])
        with self.timed("program"):
            ir, streams, state = training_program(self.config)
        with self.timed("session"), self.timed_parts():
            device = session_device(options["device"])
            session = addons.TaskSession(streams.inputs, streams.outputs, state, 1, ir, device)
        with self.timed("drawing"):
            draw_weights(session, self.config, self.device)
            synchronize(self.device)
        self.trainer = PhasedTrainer(self.config, session=session)
        self.told |= size_of(self.config, options["layers"])
        self.told |= {"start_up": self.start_up, "plan": self.plan}
        traffic = file_traffic(self.trainer.session)
        self.told |= {"pinned_bytes": 0 if traffic is None else traffic.file_bytes}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to those with a name."""
        begin = time.perf_counter()
        yield
        self.start_up[name] = self.start_up.get(name, 0.0) + time.perf_counter() - begin

    @contextlib.contextmanager
    def timed_parts(self) -> Iterator[None]:
        """Inside the block, time how long it takes to touch pages of the host, to lock them, and to
        fill rows of moments and gradients.
        """
        parts = {"touching": (Pages, "__init__"), "page-locking": (Pages, "lock")}
        parts["filling"] = (Machine, "take_over")
        with contextlib.ExitStack() as stack:
            for name, (owner, method) in parts.items():
                timed = self.timed(name)(getattr(owner, method))
                stack.enter_context(mock.patch.object(owner, method, timed))
            yield

    def step(self, count: int) -> Figures:
        """Calls of the session; the loss of the last, and what each moved and waited for."""
        steps = self.config.execution.device_iterations
        figures = self.trainer.step(count * steps)
        synchronize(self.device)
        moved = {told: steps * figures.pop(name) for name, told in MOVED.items() if name in figures}
        return {**self.told, **figures, **moved}

    def finish(self) -> Figures:
        """Device memory, and a recorded step."""
        return finished(self.device, partial(self.step, 1), self.options["timeline"])


# Plain PyTorch


class PlainWorkload:
    """The step in plain PyTorch: compiled, fused attention and AdamW, each block's activations
    computed again; float32 weights. FSDP2 keeps all state on the host.
    """

    def __init__(self, options: Figures):
        self.options, self.device = options, torch.device(options["device"])
        self.config = config_of(options)
        self.told = ceilings(options, self.config) | size_of(self.config, options["layers"])
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

    def finish(self) -> Figures:
        """Device memory, and a recorded step."""
        return finished(self.device, partial(self.step, 1), self.options["timeline"])

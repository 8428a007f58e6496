"""One training step of GPT-3 2.7B's shapes on one GPU: all state there, half of it, one layer of
it; and plain PyTorch.

    python benchmarks/gpu.py                        # within 8 minutes on one H200
    python benchmarks/gpu.py --device cpu --layers 2 --hidden_size 64 --heads 4 \
        --sequence_length 32 --batch 4

First the machine's ceilings: the link to the GPU one way, the other, and both, and matrix products
at the model's shapes. Then the variants, alternating, one process each. With recomputation
everywhere: a step that computes its forward pass twice does 4/3 of the model's FLOPs, which its MFU
does not count.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]  # nothing need be installed

from benchmarks.harness import (  # noqa: E402
    Figures,
    Measurement,
    Variant,
    Workload,
    add_run_counts,
    machine,
    main_or_worker,
    measure,
    print_json,
    run_counts,
    table,
)
from popxl_gpt.utils.units import bytes_text  # noqa: E402

BARS = {"one layer / resident": 0.95, "resident / plain": 1.0, "MFU": 0.45}
LARGE = 2**28
"""Bytes of a transfer by which the link is measured."""


# The machine's ceilings


def link(device: str, nbytes: int) -> Figures:
    """Bytes/s to the device, from it, and both at once, by the copies that rows travel with."""
    from popxl_engine.machine.device import device_named
    from popxl_engine.machine.paging import HostStore

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


def product_rates(device: str, dtype: str, rows: int, hidden: int, vocabulary: int) -> Figures:
    """FLOP/s of the feed-forward layer's first product, and of logits by torch and by the engine,
    the best of some.
    """
    import torch
    from popxl_engine.kernels.linalg import matrix_product

    element = getattr(torch, dtype)
    lhs = torch.randn(rows, hidden, dtype=element, device=device)
    up = torch.randn(hidden, 4 * hidden, dtype=element, device=device)
    words = torch.randn(vocabulary, hidden, dtype=element, device=device).t()

    def rate(
        multiply: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]", rhs: "torch.Tensor"
    ) -> float:
        times = []
        for _ in range(10):
            begin = time.perf_counter()
            for _ in range(5):
                multiply(lhs, rhs)
            if lhs.is_cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / 5)
        return 2 * rows * hidden * rhs.shape[1] / min(times)

    return {
        "up": rate(torch.mm, up),
        "logits": rate(torch.mm, words),
        "our logits": rate(matrix_product, words),
    }


def give_memory_back() -> None:
    """Leave the GPU's memory to the variants."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The variants


class PlainWorkload:
    """The step in plain PyTorch: compiled, fused attention and AdamW, each block's activations
    computed again.
    """

    def __init__(self, options: Figures):
        import torch

        from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining

        self.options, self.device = options, torch.device(options["device"])
        self.random = np.random.default_rng(0)
        model = PlainModel(**options["model"], dropout=0.0, attention="fused", recomputation=True)
        training = PlainTraining(steps=1000, learning_rate=1e-4, weight_decay=0.1, max_norm=1.0)
        dtype = getattr(torch, options["dtype"])
        gpt = PlainGPT(model).to(self.device)
        self.trainer = PlainTrainer(gpt, training, dtype=dtype, compiled=options["compiled"])

    def step(self, count: int) -> Figures:
        """Optimizer steps; the loss of the last."""
        import torch

        for _ in range(count):
            tokens = torch.from_numpy(tokens_of(self.options, self.random)).to(self.device)
            parts = tokens.split(self.options["micro_batch"])
            loss = self.trainer.step([(part[:, :-1], part[:, 1:]) for part in parts])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer comes after the loss
        return {"loss": loss}

    def finish(self) -> Figures:
        """Device memory."""
        return device_peak(self.device)


class PhasedWorkload:
    """The phased step with so much of the device's memory."""

    def __init__(self, options: Figures):
        import torch

        from benchmarks.phased import PhasedTrainer
        from popxl_gpt.utils.runtime import file_traffic

        self.device, self.traffic = torch.device(options["device"]), file_traffic
        self.random = np.random.default_rng(0)
        self.trainer = PhasedTrainer(config_of(options), self.batches(options))

    def batches(self, options: Figures) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Random tokens."""
        while True:
            tokens = tokens_of(options, self.random)
            yield tokens[:, :-1], tokens[:, 1:]

    def step(self, count: int) -> Figures:
        """Optimizer steps; the loss of the last, and what was moved and waited for."""
        before, begin = self.traffic(self.trainer.session), time.perf_counter()
        figures = self.trainer.step(count)
        after, seconds = self.traffic(self.trainer.session), time.perf_counter() - begin
        if after is not None:
            figures["read_bytes"] = (after.read_bytes - before.read_bytes) / count
            figures["waiting"] = (after.waited - before.waited) / seconds
        return figures

    def finish(self) -> Figures:
        """Device memory."""
        return device_peak(self.device)


def tokens_of(options: Figures, random: np.random.Generator) -> np.ndarray:
    """One step's tokens, int64 [batch, sequence + 1]."""
    model = options["model"]
    return random.integers(
        0, model["vocabulary_size"], (options["batch"], model["sequence_length"] + 1)
    )


def device_peak(device: "object") -> Figures:
    """Most bytes that were allocated on a GPU."""
    import torch

    is_gpu = getattr(device, "type", "") == "cuda"
    return {"device_peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else 0}


def config_of(options: Figures) -> "object":
    """The application's configuration of a variant."""
    from popxl_gpt.config import Config, Execution, Model, Training

    return Config(
        name="gpu",
        model=Model(**options["model"], dropout=0.0, precision=options["dtype"]),
        training=Training(
            steps=1000,
            global_batch_size=options["batch"],
            learning_rate=1e-4,
            schedule="constant",
            stochastic_rounding=options["dtype"] != "float32",
        ),
        execution=Execution(
            micro_batch_size=options["micro_batch"],
            device=options["device"],
            device_memory=options.get("device_memory"),
            device_iterations=options["iterations"],
        ),
    )


def build(options: Figures) -> Workload:
    """One variant's workload."""
    return PlainWorkload(options) if options["kind"] == "plain" else PhasedWorkload(options)


def options_of(arguments: argparse.Namespace) -> Figures:
    """What all variants have in common."""
    names = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
    return {
        "model": {name: getattr(arguments, name) for name in names},
        "device": arguments.device,
        "dtype": arguments.dtype,
        "batch": arguments.batch,
        "micro_batch": arguments.micro_batch,
        "iterations": arguments.device_iterations,
    }


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """Plain PyTorch, then ours from all state on the device down to one layer's."""
    from popxl_gpt.execution.pretraining import training_program
    from popxl_gpt.utils.runtime import planner

    options = options_of(arguments)
    needs = planner().device_needs(training_program(config_of(options))[0], arguments.device)
    slack = 1 + arguments.slack
    limits = {
        "resident": int(slack * needs.resident),
        "half resident": int(slack * (needs.least + needs.resident) / 2),
        "one layer resident": int(slack * needs.least),
    }
    plain = {**options, "kind": "plain", "compiled": arguments.device != "cpu"}
    phased = [
        Variant(name=name, options={**options, "kind": "phased", "device_memory": limit})
        for name, limit in limits.items()
    ]
    return [Variant(name="plain", options=plain), *phased]


def flops_of(arguments: argparse.Namespace) -> float:
    """The model's FLOPs in a step, recomputation not counted."""
    from popxl_gpt.execution.model_size import flops_per_step

    return flops_per_step(config_of(options_of(arguments)))


def rows_of(
    measurements: Sequence[Measurement],
    variants: Sequence[Variant],
    tokens: int,
    flops: float,
    peak: float,
) -> tuple[list[list[str]], Figures]:
    """Rows for people and figures for programs."""
    rows, figures = [], {}
    for variant, m in zip(variants, measurements):
        limit, rate = variant.options.get("device_memory"), flops / m.median
        waiting = statistics.median(step.get("waiting", 0.0) for step in m.steps[-len(m.seconds) :])
        moved = statistics.median(
            step.get("read_bytes", 0.0) for step in m.steps[-len(m.seconds) :]
        )
        rows.append(
            [
                m.name,
                f"{tokens / m.median:.0f}",
                f"{m.median:.3f}",
                f"{100 * m.spread:.0f} %",
                f"{rate / 1e12:.3g}",
            ]
            + [
                f"{rate / peak:.2f}",
                bytes_text(limit) if limit else "",
                bytes_text(moved),
                f"{100 * waiting:.1f} %",
            ]
            + [f"{m.steps[-1]['loss']:.4f}"]
        )
        figures[m.name] = {
            **m.figures(),
            **m.finish,
            "tokens_per_s": tokens / m.median,
            "flops_per_s": rate,
        }
        figures[m.name] |= {
            "mfu": rate / peak,
            "device_memory": limit,
            "read_bytes": moved,
            "waiting": waiting,
        }
        figures[m.name] |= {"loss": m.steps[-1]["loss"]}
    return rows, figures


def main() -> int:
    """Measure and print; exit code 2 where there is no such device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    sizes = {
        "layers": 8,
        "hidden_size": 2560,
        "heads": 32,
        "sequence_length": 2048,
        "vocabulary_size": 50257,
    }
    for name, default in {**sizes, "batch": 128, "micro_batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    add_run_counts(parser, rounds=2)
    parser.add_argument(
        "--slack",
        type=float,
        default=0.1,
        help="device memory beyond what the program needs, a share",
    )
    parser.add_argument("--link_bytes", type=int, default=LARGE)
    arguments = parser.parse_args()

    from popxl_gpt.config import UserError
    from popxl_gpt.utils.runtime import session_device

    try:
        session_device(arguments.device)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    bandwidth = link(arguments.device, arguments.link_bytes)
    rows = arguments.micro_batch * arguments.sequence_length
    products = product_rates(
        arguments.device, arguments.dtype, rows, arguments.hidden_size, arguments.vocabulary_size
    )
    give_memory_back()
    peak = products["up"]
    print(
        "link to the device "
        + ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in bandwidth.items())
    )
    rates = ", ".join(f"{name} {rate / 1e12:.2f} TFLOP/s" for name, rate in products.items())
    print(f"matrix products {rates} ({rows} rows, {arguments.dtype})\n", flush=True)
    tokens, flops = arguments.batch * arguments.sequence_length, flops_of(arguments)
    variants = variants_of(arguments)
    measured = measure(Path(__file__), variants, **run_counts(arguments))
    lines, figures = rows_of(measured, variants, tokens, flops, peak)
    headers = [
        "variant",
        "tokens/s",
        "s/step",
        "spread",
        "TFLOP/s",
        "MFU",
        "device memory",
        "read a step",
    ]
    print(table([*headers, "waiting", "loss"], lines))
    speed = {name: found["tokens_per_s"] for name, found in figures.items()}
    reached = {
        "one layer / resident": speed["one layer resident"] / speed["resident"],
        "resident / plain": speed["resident"] / speed["plain"],
        "MFU": figures["resident"]["mfu"],
    }
    print()
    for name, bar in BARS.items():
        print(f"bar: {name} at least {bar}: {reached[name]:.2f}")
    result = {
        "benchmark": "gpu",
        "machine": machine(),
        "tokens_per_step": tokens,
        "link": bandwidth,
    }
    print_json(
        {
            **result,
            "products": products,
            "variants": figures,
            "reached": reached,
            "settings": vars(arguments),
        }
    )
    return 0


if __name__ == "__main__":
    main_or_worker(build, main)

"""Training steps of programs in float16 beside the same in float32, as users of PopXL write them.

    python benchmarks/float16.py
    python benchmarks/float16.py --check

A BERT-style encoder (layer norms after each half, GELU) and a T5-style one (RMS norms before it in
float32, a gated ReLU), with dropout, one loss over the vocabulary, and AdamW with stochastic
rounding, whose first moment is float16 and whose second is float32 as `AdamOptimizerStep` makes
them. On CPUs float16 is a format to store: numbers are upcast, computed in float32 and rounded
once. Both types run in processes of their own, step by step in turn, on one thread.

B batch, S sequence, H hidden size, D size of a head, V vocabulary.
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import popxl  # noqa: E402
import popxl_addons as addons  # noqa: E402
from popxl import ops  # noqa: E402
from popxl_addons.layers import Embedding, LayerNorm, Linear  # noqa: E402
from popxl_addons.optimizers import AdamOptimizerStep  # noqa: E402

from benchmarks.harness import Figures, Variant, machine, main_or_worker, measure, print_json, table  # noqa: E402

BAR = 1.5
"""What a step in float16 may take, as a multiple of one in float32."""
HEADS, DROPOUT, IGNORED = 4, 0.1, -1
SIZES = {"batch": 2, "sequence": 128, "hidden": 128, "layers": 2, "vocabulary": 30522}
"""Those of the smallest BERT that is pretrained."""


class RMSNorm(addons.Module):
    """In float32, as T5 has it, then rounded and scaled."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[..., H] -> [..., H]."""
        gain = self.add_variable_input("weight", lambda: np.ones(x.shape[-1]), x.dtype)
        wide = ops.cast(x, popxl.float32)
        return (
            ops.cast(wide / ops.sqrt(ops.mean(wide * wide, axis=-1, keepdims=True) + 1e-6), x.dtype)
            * gain
        )


class Attention(addons.Module):
    def __init__(self, sizes: Figures):
        super().__init__()
        self.sizes = sizes
        self.qkv, self.output = Linear(3 * sizes["hidden"]), Linear(sizes["hidden"])

    def build(self, x: popxl.Tensor, mask: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H], [B, 1, 1, S] -> [B*S, H]."""
        b, s, h = (self.sizes[name] for name in ("batch", "sequence", "hidden"))
        query, key, value = (
            t.reshape((b, s, HEADS, h // HEADS)).transpose((0, 2, 1, 3))  # [B, HEADS, S, D]
            for t in ops.split(self.qkv(x), 3, axis=1)
        )
        scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(h // HEADS)) + mask
        mixed = ops.dropout(ops.softmax(scores, axis=-1), seed, p=DROPOUT) @ value
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((b * s, h)))


class FeedForward(addons.Module):
    def __init__(self, hidden: int, gated: bool):
        super().__init__()
        self.up, self.down = Linear(4 * hidden), Linear(hidden)
        self.gate = Linear(4 * hidden) if gated else None

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        if self.gate is None:
            return self.down(ops.gelu(self.up(x)))
        return self.down(ops.relu(self.gate(x)) * self.up(x))


class Block(addons.Module):
    def __init__(self, sizes: Figures, style: str):
        super().__init__()
        self.norms_first = style == "T5"
        self.attention, self.feed_forward = (
            Attention(sizes),
            FeedForward(sizes["hidden"], self.norms_first),
        )
        norm = RMSNorm if self.norms_first else LayerNorm
        self.attention_norm, self.feed_forward_norm = norm(), norm()

    def build(self, x: popxl.Tensor, mask: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        """[B*S, H] -> [B*S, H]."""
        seeds = ops.split_random_seed(seed, 3)
        halves: list[tuple[addons.Module, Callable[[popxl.Tensor], popxl.Tensor], popxl.Tensor]] = [
            (self.attention_norm, lambda t: self.attention(t, mask, seeds[0]), seeds[1]),
            (self.feed_forward_norm, self.feed_forward, seeds[2]),
        ]
        for norm, half, dropped in halves:
            y = ops.dropout(half(norm(x) if self.norms_first else x), dropped, p=DROPOUT)
            x = x + y if self.norms_first else norm(x + y)
        return x


class Encoder(addons.Module):
    def __init__(self, sizes: Figures, style: str, dtype: popxl.dtype):
        super().__init__()
        self.sizes = sizes
        self.words = Embedding(dtype, sizes["vocabulary"], sizes["hidden"])
        self.blocks = addons.Module.from_list([Block(sizes, style) for _ in range(sizes["layers"])])
        self.head = Linear(sizes["vocabulary"])

    def build(
        self, ids: popxl.Tensor, labels: popxl.Tensor, mask: popxl.Tensor, seed: popxl.Tensor
    ) -> popxl.Tensor:
        """ids, labels [B*S], labels -1 where nothing is asked -> mean loss []."""
        x = self.words(ids)
        for block in self.blocks:
            seed, own = ops.split_random_seed(seed)
            x = block(x, mask, own)
        return addons.cross_entropy(self.head(x), labels, ignore_index=IGNORED)


class Training:
    """A program and its inputs."""

    def __init__(self, options: Figures):
        np.random.seed(0)
        self.sizes, self.dtype = options["sizes"], getattr(popxl, options["dtype"])
        self.rng = np.random.default_rng(0)
        self.ir = popxl.Ir()
        self.ir._pb_ir.getSessionOptions().enableStochasticRounding = True
        with self.ir.main_graph, popxl.in_sequence():
            self._build(options["style"])
        self.session = popxl.Session(self.ir, "cpu")
        self.session.__enter__()  # the process ends with the benchmark

    def _build(self, style: str) -> None:
        rows = self.sizes["batch"] * self.sizes["sequence"]
        specs = {
            "ids": ((rows,), popxl.int32),
            "labels": ((rows,), popxl.int32),
            "mask": ((self.sizes["batch"], 1, 1, self.sizes["sequence"]), self.dtype),
            "seed": ((2,), popxl.uint32),
        }
        self.streams = {name: popxl.h2d_stream(*spec, name) for name, spec in specs.items()}
        loaded = [ops.host_load(stream) for stream in self.streams.values()]
        facts, graph = Encoder(self.sizes, style, self.dtype).create_graph(
            *(t.spec for t in loaded)
        )
        variables = facts.init()
        call = graph.bind(variables).call_with_info(*loaded)
        self.loss = addons.host_store(call.outputs[0])
        weights = graph.args.to_dict()
        grad = addons.autodiff(
            graph, grads_provided=graph.graph.outputs[:1], grads_required=weights.values()
        )
        one = popxl.constant(1.0, self.dtype)
        for name, gradient in zip(
            weights, grad.call(one, args=grad.grad_graph_info.inputs_dict(call)), strict=True
        ):
            adam = AdamOptimizerStep(cache=True)
            state, update = adam.create_graph(variables[name], gradient, lr=1e-4)
            update.bind(state.init()).call(variables[name], gradient)

    def step(self, count: int) -> Figures:
        """Do `count` steps; the last one's loss."""
        for _ in range(count):
            loss = self.session.run(
                {self.streams[name]: array for name, array in self._batch().items()}
            )[self.loss]
        return {"loss": float(loss)}

    def _batch(self) -> dict[str, Any]:
        batch, sequence = self.sizes["batch"], self.sizes["sequence"]
        words = self.rng.integers(0, self.sizes["vocabulary"], batch * sequence)
        mask = np.where(np.arange(sequence) < sequence * 7 // 8, 0.0, -1000.0)
        return {
            "ids": words.astype(np.int32),
            "labels": np.where(self.rng.random(words.shape) < 0.15, words, IGNORED).astype(
                np.int32
            ),
            "mask": np.broadcast_to(mask, (batch, 1, 1, sequence)).astype(self.dtype.as_numpy()),
            "seed": self.rng.integers(0, 2**32, 2).astype(np.uint32),
        }

    def finish(self) -> Figures:
        """Nothing more."""
        return {}


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each program")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    arguments = parser.parse_args()

    sizes = {name: getattr(arguments, name) for name in SIZES}
    rows, found = [], {}
    for style in ("BERT", "T5"):
        variants = [
            Variant(name=dtype, options={"style": style, "dtype": dtype, "sizes": sizes},
                    environment={"OMP_NUM_THREADS": "1"})
            for dtype in ("float32", "float16")
        ]  # fmt: skip
        wide, narrow = measure(
            Path(__file__), variants, rounds=arguments.rounds, warmup=arguments.warmup
        )
        ratio = narrow.cpu_median / wide.cpu_median
        found[style] = {
            "ratio": ratio,
            **{m.name: {**m.figures(), **m.steps[-1]} for m in (wide, narrow)},
        }
        rows += [
            [
                f"{style} style",
                m.name,
                f"{m.cpu_median:.3f}",
                f"{m.spread:.0%}",
                f"{m.steps[-1]['loss']:.3f}",
                shown,
            ]
            for m, shown in ((wide, ""), (narrow, f"{ratio:.2f}"))
        ]
    print(table(["program", "type", "cpu s/step", "spread", "loss", "ratio"], rows))
    met = all(figures["ratio"] <= BAR for figures in found.values())
    print(f"\nbar: at most {BAR}x float32: {'met' if met else 'missed'}")
    print_json(
        {
            "benchmark": "float16",
            "machine": machine(),
            "sizes": sizes,
            "programs": found,
            "met": met,
        }
    )
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    main_or_worker(Training, main)

"""tokens/s and peak memory of one GPT-2 training step, phased against plain PyTorch, alternating in
one run.

    python benchmarks/train_step.py                 # GPT-2 small, 4 micro-batches of 1 x 256
    python benchmarks/train_step.py --dtypes bfloat16 --rounds 9
    python benchmarks/train_step.py --wide --more   # every baseline there is
    python benchmarks/train_step.py --wide --offloading --dtypes bfloat16 \
        --variants FSDP2 "FSDP2, compiled" DeepSpeed "phased, wide, recomputing"
    python benchmarks/train_step.py --shape gpt2-1024 --dtypes bfloat16 \
        --activation_memory 600MiB --head_serialisation 4
    python benchmarks/train_step.py --shape gpt2-1024 --wide --dropout 0.1 \
        --variants phased "phased, wide"

The baselines are plain PyTorch at its best: fused AdamW with the clip inside, weights cast once per
step under autocast, eager and compiled, each also with an allocator that keeps freed memory; with
`--wide` several micro-batches at a time, with `--more` Hugging Face's GPT-2 and activation
checkpointing, with `--offloading` FSDP2 and DeepSpeed (`pip install deepspeed`), which keep state
on the host as we do. The table's ratios are to the fastest of them, by seconds and by processor
time. One bar holds the phased step to PyTorch as it comes, eager or compiled; another holds the
phased step that recomputes to those that offload. On a busy machine, OMP_NUM_THREADS=1 and
processor time still tell something. The last column is the share of what this CPU multiplies at
most (`ceilings.py`).
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    KEEP_FREED_MEMORY,
    Figures,
    Measurement,
    Variant,
    Workload,
    ceiling_share,
    gib,
    machine,
    main_or_worker,
    measure,
    multiply_ceiling,
    percent,
    print_json,
    table,
)

SPEED_BAR = 1.0
"""Tokens/s of the phased step over the baseline's, at least."""
MEMORY_BAR = 1.2
"""Peak memory of the phased step over the baseline's, at most."""
OFFLOADING_BAR = 2.0
"""Tokens/s of the phased step that recomputes over those of the fastest that offloads, at least."""

PLAIN = ("eager", "compiled")
"""PyTorch as it comes."""
RECOMPUTING = ("phased, recomputing", "phased, wide, recomputing")
PEERS = ("FSDP2", "DeepSpeed")
"""Training loops that offload."""

GPT2 = {
    "layers": 12,
    "hidden_size": 768,
    "heads": 12,
    "sequence_length": 256,
    "vocabulary_size": 50257,
}
SMALL = {"layers": 6, "hidden_size": 384, "heads": 6, "sequence_length": 256, "vocabulary_size": 65}
ONE_BY_FOUR = {"micro_batch_size": 1, "accumulation": 4, "width": 4}
FOUR_BY_FOUR = {"micro_batch_size": 4, "accumulation": 4, "width": 4}
ONE_BY_SIXTEEN = {"micro_batch_size": 1, "accumulation": 16, "width": 4}
SHAPES = {
    "gpt2": {**GPT2, **ONE_BY_FOUR},
    "gpt2-16": {**GPT2, **ONE_BY_SIXTEEN},
    "gpt2-1024": {**GPT2, "sequence_length": 1024, **ONE_BY_FOUR},
    "gpt2-1024-16": {**GPT2, "sequence_length": 1024, **ONE_BY_SIXTEEN},
    "small": {**SMALL, **FOUR_BY_FOUR},
    "small-50257": {**SMALL, "vocabulary_size": 50257, **FOUR_BY_FOUR},
}
"""The model and the batch by name. `width`: micro-batches that run as one with `--wide`, the
baselines' and ours.
"""


class PlainWorkload:
    """The step in plain PyTorch, of our own model or Hugging Face's."""

    def __init__(self, options: Figures):
        import torch

        from benchmarks.plain_gpt import PlainGPT, PlainModel, PlainTrainer, PlainTraining

        torch.manual_seed(0)
        self.batches = Batches(options)
        model = PlainModel(**options["model"], dropout=options["dropout"], **options["forms"])
        if options.get("hugging_face"):
            from benchmarks.hugging_face_gpt import HuggingFaceGPT as PlainGPT  # noqa: N814
        training = PlainTraining(steps=1000, learning_rate=1e-4, weight_decay=0.1, max_norm=1.0)
        dtype, compiled = getattr(torch, options["dtype"]), options["compiled"]
        if peer := options.get("offloading"):
            from benchmarks import offloading

            offloading.start_alone()
            make = offloading.TRAINERS[peer]
            kept = {"dtype": dtype, "compiled": compiled, "accumulation": options["accumulation"]}
            self.trainer = make(PlainGPT(model), training, **kept)
        else:
            self.trainer = PlainTrainer(PlainGPT(model), training, dtype=dtype, compiled=compiled)
        self.tensor = torch.from_numpy

    def step(self, count: int) -> Figures:
        """Optimizer steps; the loss of the last."""
        for _ in range(count):
            micro_batches = [
                (self.tensor(ids), self.tensor(labels)) for ids, labels in self.batches.next()
            ]
            loss = self.trainer.step(micro_batches)
        return {"loss": loss}

    def finish(self) -> Figures:
        """Nothing to add."""
        return {}


class Batches:
    """The same random tokens for every variant; `next` gives one step's micro-batches (ids,
    labels), each [B, S].
    """

    def __init__(self, options: Figures):
        self.random = np.random.default_rng(0)
        self.vocabulary, self.sequence = (
            options["model"]["vocabulary_size"],
            options["model"]["sequence_length"],
        )
        self.micro_batch, self.accumulation = options["micro_batch_size"], options["accumulation"]

    def next(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """One step's tokens."""
        shape = (self.accumulation, self.micro_batch, self.sequence + 1)
        return [
            (rows[:, :-1], rows[:, 1:]) for rows in self.random.integers(0, self.vocabulary, shape)
        ]


def build(options: Figures) -> Workload:
    """One variant's workload."""
    if options["kind"] == "plain":
        return PlainWorkload(options)
    from benchmarks.phased import PhasedSteps

    return PhasedSteps(options, Batches(options))


def offloading_peers(wanted: Sequence[str] | None) -> tuple[list[str], list[str] | None]:
    """The peers that are here, and the variants wanted without those of a peer that is not; says
    what is left out.
    """
    probe = subprocess.run(
        [sys.executable, "-c", "import deepspeed"], capture_output=True, text=True
    )
    if probe.returncode == 0:
        return list(PEERS), wanted
    error = probe.stderr.strip().splitlines()[-1]
    print(
        f"--offloading: goes on without DeepSpeed ({error}). Try: pip install deepspeed",
        file=sys.stderr,
    )
    return ["FSDP2"], wanted and [name for name in wanted if not name.startswith("DeepSpeed")]


def variants_of(
    arguments: argparse.Namespace, dtype: str, peers: Iterable[str] = ()
) -> list[Variant]:
    """The baselines, `peers` that offload among them, then ours."""
    model = {
        name: getattr(arguments, name)
        for name in ("layers", "hidden_size", "heads", "sequence_length")
    }
    options = {
        "model": {**model, "vocabulary_size": arguments.vocabulary_size},
        "micro_batch_size": arguments.micro_batch_size,
        "accumulation": arguments.accumulation,
        "dropout": arguments.dropout,
        "dtype": dtype,
    }
    # docs/performance.md says which forms win: fused attention loses in bfloat16 and with dropout,
    # the tanh GELU when compiled.
    attention = "products" if dtype == "bfloat16" or arguments.dropout else "fused"
    eager = {**options, "kind": "plain", "compiled": False, "forms": {"attention": attention}}
    compiled = {
        **options,
        "kind": "plain",
        "compiled": True,
        "forms": {"attention": attention, "gelu": "sigmoid"},
    }
    phased = {**options, "kind": "phased", "widening": 1}
    offered = [
        Variant(name="eager", options=eager),
        Variant(name="eager, memory kept", options=eager, environment=KEEP_FREED_MEMORY),
        Variant(name="compiled", options=compiled),
        Variant(name="compiled, memory kept", options=compiled, environment=KEEP_FREED_MEMORY),
        Variant(name="phased", options={**phased, "recomputation": False}),
        Variant(name="phased, recomputing", options={**phased, "recomputation": True}),
    ]
    larger = {}
    if arguments.wide:
        micro_batch, rest = (
            arguments.micro_batch_size * arguments.width,
            arguments.accumulation // arguments.width,
        )
        larger = {"micro_batch_size": micro_batch, "accumulation": rest}
        for name, plain in (("eager", eager), ("compiled", compiled)):
            wide = Variant(
                name=f"{name}, kept, wide",
                options={**plain, **larger},
                environment=KEEP_FREED_MEMORY,
            )
            offered.insert(-2, wide)
        widened = {**phased, "widening": arguments.width}
        offered += [
            Variant(name="phased, wide", options={**widened, "recomputation": False}),
            Variant(name="phased, wide, recomputing", options={**widened, "recomputation": True}),
        ]
    if arguments.activation_memory is not None:
        settings = {
            "activation_memory": arguments.activation_memory,
            "head_serialisation": arguments.head_serialisation,
        }
        within = {**phased, "recomputation": True, "settings": settings}
        offered.append(Variant(name="phased, within memory", options=within))
    if arguments.more:
        hugging_face = {**compiled, "hugging_face": True}
        recomputing = {**compiled, "forms": {**compiled["forms"], "recomputation": True}}
        offered[4:4] = [
            Variant(
                name="Hugging Face, kept",
                options={**hugging_face, "compiled": False},
                environment=KEEP_FREED_MEMORY,
            ),
            Variant(
                name="Hugging Face, compiled, kept",
                options=hugging_face,
                environment=KEEP_FREED_MEMORY,
            ),
            Variant(
                name="compiled, kept, recomputing",
                options=recomputing,
                environment=KEEP_FREED_MEMORY,
            ),
        ]
    for peer in peers:
        forms = {peer: eager, f"{peer}, compiled": compiled}
        forms[f"{peer}, Hugging Face, compiled"] = {**compiled, "hugging_face": True}
        offered[4:4] = [
            Variant(
                name=name,
                options={**form, **larger, "offloading": peer},
                environment=KEEP_FREED_MEMORY,
            )
            for name, form in forms.items()
        ]
    names = [variant.name for variant in offered]
    if unknown := [name for name in arguments.variants or () if name not in names]:
        flags = (
            ""
            if arguments.wide and arguments.more and peers
            else " (--wide, --more and --offloading have others)"
        )
        print(
            f"--variants: got {', '.join(unknown)}; expected some of: {'; '.join(names)}{flags}.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return [
        variant
        for variant in offered
        if not arguments.variants or variant.name in arguments.variants
    ]


def compare(measurements: Sequence[Measurement], tokens: int) -> tuple[list[list[str]], Figures]:
    """Rows for people and figures for programs: each variant against the fastest baseline."""
    baselines = [m for m in measurements if not m.name.startswith("phased")] or measurements
    best = min(baselines, key=lambda m: m.median)
    least = min(m.cpu_median for m in baselines)
    rows, figures = [], {}
    for m in measurements:
        speed, memory = best.median / m.median, m.peak_bytes / best.peak_bytes
        loss = m.steps[-1]["loss"]
        rows.append(
            [
                m.name,
                f"{tokens / m.median:.0f}",
                f"{m.median:.3f}",
                f"{100 * m.spread:.0f} %",
                f"{speed:.2f}x",
            ]
            + [
                f"{m.cpu_median:.3f}",
                f"{least / m.cpu_median:.2f}x",
                gib(m.peak_bytes),
                f"{memory:.2f}x",
                f"{loss:.4f}",
            ]
        )
        figures[m.name] = {**m.figures(), "tokens_per_s": tokens / m.median, "speed_ratio": speed}
        figures[m.name] |= {"cpu_ratio": least / m.cpu_median, "memory_ratio": memory, "loss": loss}
    return rows, {"variants": figures, "fastest_baseline": best.name}


def verdict(figures: Figures) -> Figures | None:
    """Whether the phased step, at its faster width, is within its bars; None when it, or every
    baseline, is missing.

    It is held to the faster of PyTorch's variants as they come, where they were measured.
    """
    variants = figures["variants"]
    found = [variants[name] for name in ("phased", "phased, wide") if name in variants]
    if not found or figures["fastest_baseline"].startswith("phased"):
        return None
    phased = max(found, key=lambda variant: variant["speed_ratio"])
    plain = [variants[name] for name in PLAIN if name in variants] or [
        variants[figures["fastest_baseline"]]
    ]
    baseline = max(plain, key=lambda variant: variant["speed_ratio"])
    speed = phased["speed_ratio"] / baseline["speed_ratio"]
    memory = phased["memory_ratio"] / baseline["memory_ratio"]
    return {
        "speed_ratio": speed,
        "memory_ratio": memory,
        "met": speed >= SPEED_BAR and memory <= MEMORY_BAR,
    }


def offloading_verdict(figures: Figures) -> Figures | None:
    """Whether the phased step that recomputes, at its faster width, is within its bar; None without
    it or a peer.

    `cpu_ratio` compares processor time with the least of the peers', `memory_ratio` our peak to the
    fastest peer's.
    """
    variants = figures["variants"]
    ours = [variants[name] for name in RECOMPUTING if name in variants]
    peers = [variants[name] for name in variants if name.startswith(PEERS)]
    if not ours or not peers:
        return None
    best, fastest = (min(found, key=lambda variant: variant["seconds"]) for found in (ours, peers))
    speed = fastest["seconds"] / best["seconds"]
    cpu = min(peer["cpu_seconds"] for peer in peers) / best["cpu_seconds"]
    memory = best["peak_bytes"] / fastest["peak_bytes"]
    return {
        "speed_ratio": speed,
        "cpu_ratio": cpu,
        "memory_ratio": memory,
        "met": speed >= OFFLOADING_BAR,
    }


def step_flops(arguments: argparse.Namespace) -> float:
    """Of a step's products without what is recomputed, attention as if not causal."""
    from popxl_gpt.config.schema import Model  # not at the top: baselines do without
    from popxl_gpt.execution.planning.model_size import flops_per_token

    names = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
    model = Model(**{name: getattr(arguments, name) for name in names})
    return tokens_per_step(arguments) * flops_per_token(model)


def tokens_per_step(arguments: argparse.Namespace) -> int:
    """Tokens of a step."""
    return arguments.sequence_length * arguments.micro_batch_size * arguments.accumulation


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Flags for the model, the batch, and how often it is measured."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each variant")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--variants", nargs="+", help="only these, by the names in the table")
    parser.add_argument(
        "--wide",
        action="store_true",
        help="also with --width micro-batches at a time, the baselines and ours",
    )
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        default="gpt2",
        help="model and batch; what follows changes parts",
    )
    for name in SHAPES["gpt2"]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--activation_memory",
        help="also a phased step whose decoder blocks keep activations within it, such as 600MiB",
    )
    parser.add_argument(
        "--head_serialisation", type=int, default=1, help="pieces of that step's head"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of `make_parser`, and what the shape's name gives for those left out."""
    arguments = parser.parse_args()
    for name, value in SHAPES[arguments.shape].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.wide and arguments.accumulation % arguments.width:
        parser.error(
            f"--width: got {arguments.width}; expected a divisor of --accumulation "
            f"{arguments.accumulation}."
        )
    return arguments


def main() -> int:
    """Measure and print; exit code 0, with `--check` 1 when the bar is missed, 2 when nothing can
    be measured.
    """
    parser = make_parser(__doc__)
    parser.add_argument(
        "--more", action="store_true", help="also Hugging Face's GPT-2, and recomputing baselines"
    )
    parser.add_argument(
        "--offloading",
        action="store_true",
        help=f"also {' and '.join(PEERS)}, which offload, and the bar for them",
    )
    arguments = parse(parser)
    tokens, flops = tokens_per_step(arguments), step_flops(arguments)
    result: Figures = {
        "benchmark": "train_step",
        "machine": machine(),
        "tokens_per_step": tokens,
        "dtypes": {},
    }
    peers: Sequence[str] = ()
    if arguments.offloading:
        peers, arguments.variants = offloading_peers(arguments.variants)
    if arguments.variants == []:
        return 2  # what was wanted is not here
    result["settings"] = {name: getattr(arguments, name) for name in (*SHAPES["gpt2"], "dropout")}
    for dtype in arguments.dtypes:
        variants = variants_of(arguments, dtype, peers)
        measured = measure(
            Path(__file__), variants, rounds=arguments.rounds, warmup=arguments.warmup
        )
        rows, figures = compare(measured, tokens)
        headers = [
            "variant",
            "tokens/s",
            "s/step",
            "spread",
            "speed",
            "cpu s/step",
            "by cpu",
            "peak memory",
            "memory",
        ]
        headers += ["loss", "of ceiling"]
        shares = {m.name: ceiling_share(flops, m.median, dtype) for m in measured}
        rows = [[*row, percent(share)] for row, share in zip(rows, shares.values())]
        ceiling = multiply_ceiling(dtype)
        told = f", ceiling {ceiling / 1e9:.0f} GFLOP/s" if ceiling else ""
        print(
            f"\n{dtype}, {tokens} tokens a step, ratios to the fastest baseline "
            f"({figures['fastest_baseline']}){told}\n"
        )
        print(table(headers, rows), flush=True)
        figures["ceiling"] = {"flops": ceiling, "shares": shares}
        figures["bar"] = verdict(figures)
        if figures["bar"] is not None:
            met = "met" if figures["bar"]["met"] else "missed"
            speed, memory = figures["bar"]["speed_ratio"], figures["bar"]["memory_ratio"]
            print(
                f"\nbar: phased at least {SPEED_BAR}x the speed of PyTorch as it comes "
                f"({' or '.join(PLAIN)}) at most {MEMORY_BAR}x its memory: {met} ({speed:.2f}x, "
                f"{memory:.2f}x)"
            )
        figures["offloading_bar"] = offloading_verdict(figures)
        if (found := figures["offloading_bar"]) is not None:
            print(
                f"\nbar: phased and recomputing at least {OFFLOADING_BAR}x the speed of the "
                f"fastest that offloads: {'met' if found['met'] else 'missed'} "
                f"({found['speed_ratio']:.2f}x, {found['cpu_ratio']:.2f}x by processor time, "
                f"{found['memory_ratio']:.2f}x the memory)"
            )
        result["dtypes"][dtype] = figures
    print_json(result)
    bars = [
        figures["offloading_bar" if arguments.offloading else "bar"]
        for figures in result["dtypes"].values()
    ]
    return 1 if arguments.check and not all(bar and bar["met"] for bar in bars) else 0


if __name__ == "__main__":
    main_or_worker(build, main)

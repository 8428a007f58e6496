"""tokens/s and peak memory of one GPT-2 training step, phased against plain PyTorch, alternating in
one run.

    python benchmarks/train_step.py                 # GPT-2 small, 4 micro-batches of 1 x 256
    python benchmarks/train_step.py --dtypes bfloat16 --rounds 9
    python benchmarks/train_step.py --wide --offloading --dtypes bfloat16 \
        --variants FSDP2 "FSDP2, compiled" "FSDP2, compiled, fused" "phased, wide, recomputing"
    python benchmarks/train_step.py --shape gpt2-1024 --wide --dropout 0.1 \
        --variants phased "phased, wide"

The baselines are plain PyTorch at its best: fused AdamW with the clip inside, weights cast once per
step under autocast, eager and compiled, each also with an allocator that keeps freed memory; with
`--wide` several micro-batches at a time, with `--offloading` FSDP2, which keeps state on the host
as we do. In bfloat16 those kinds run with fused attention, too. Our weights are rounded at random
there, with `--wide` also kept in float32, as the baselines' are. The table's ratios are to the
fastest baseline, by seconds and by processor time. One bar holds the phased step to PyTorch as it
comes, eager or compiled; another holds the phased step that recomputes to the one that offloads. On
a busy machine, OMP_NUM_THREADS=1 and processor time still tell something. The last column is the
share of what this CPU multiplies at most (`ceilings.py`).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    CHECK,
    KEEP_FREED_MEMORY,
    Arguments,
    BenchmarkError,
    Columns,
    Figures,
    Flags,
    Measurement,
    Variant,
    Workload,
    ceiling_share,
    ended,
    flag,
    gib,
    main_or_worker,
    make_parser,
    measure,
    multiply_ceiling,
    outcome,
    percent,
    show,
)
from benchmarks.phased import PhasedSteps  # noqa: E402
from popxl_gpt.config.schema import Model  # noqa: E402
from popxl_gpt.execution.planning.model_size import flops_per_token  # noqa: E402


class Bar(NamedTuple):
    """What the phased step is held to, over what it is compared with."""

    least_speed: float
    most_memory: float = math.inf


PEER = "FSDP2"
"""PyTorch's way to offload."""
BARS = {
    "bar": (("phased", "phased, wide"), ("eager", "compiled"), Bar(1.0, 1.2)),
    "offloading_bar": (
        ("phased, recomputing", "phased, wide, recomputing"),
        (PEER, f"{PEER}, compiled", f"{PEER}, fused", f"{PEER}, compiled, fused"),
        Bar(2.0),
    ),
}
"""Ours, what they are compared with, and how: with PyTorch as it comes, and with what offloads."""

SIZES = ("layers", "hidden_size", "heads", "sequence_length", "vocabulary_size")
GPT2 = dict(zip(SIZES, (12, 768, 12, 256, 50257)))
SMALL = dict(zip(SIZES, (6, 384, 6, 256, 65)))
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


def build(options: Figures) -> Workload:
    """One variant's workload."""
    if options["kind"] == "phased":
        return PhasedSteps(options)
    from benchmarks.plain_steps import plain_steps  # not at the top: loads torch

    return plain_steps(options)


def offered(arguments: Arguments, dtype: str) -> list[Variant]:
    """The baselines, then ours."""
    given = vars(arguments)
    common = {name: given[name] for name in ("micro_batch_size", "accumulation", "dropout")}
    common |= {"model": {name: given[name] for name in SIZES}, "dtype": dtype}
    wide = {
        "micro_batch_size": arguments.micro_batch_size * arguments.width,
        "accumulation": arguments.accumulation // arguments.width,
    }
    # docs/architecture.md says which forms win: fused attention loses with dropout, the tanh GELU
    # when compiled. In bfloat16 those that may be the fastest have either attention.
    attention = "products" if dtype == "bfloat16" or arguments.dropout else "fused"
    eager = {**common, "kind": "plain", "compiled": False, "forms": {"attention": attention}}
    compiled = {**eager, "compiled": True, "forms": {"attention": attention, "gelu": "sigmoid"}}
    keeping = {"eager, memory kept": eager, "compiled, memory kept": compiled}
    if arguments.offloading:
        sharded = {**(wide if arguments.wide else {}), "offloading": PEER}
        keeping |= {PEER: {**eager, **sharded}, f"{PEER}, compiled": {**compiled, **sharded}}
    if arguments.wide:
        keeping |= {"eager, kept, wide": {**eager, **wide}}
        keeping |= {"compiled, kept, wide": {**compiled, **wide}}
    if dtype == "bfloat16" and not arguments.dropout:
        widest = "kept, wide" if arguments.wide else "memory kept"
        keeping |= {
            f"{name}, fused": {**of, "forms": {**of["forms"], "attention": "fused"}}
            for name, of in keeping.items()
            if name.endswith(widest) or name.startswith(PEER)
        }
    phased = {**common, "kind": "phased", "widening": 1, "master_weights": False}
    widths = {"": 1} | ({", wide": arguments.width} if arguments.wide else {})
    ours = {
        f"phased{width}{how}": {**phased, "widening": widening, "recomputation": bool(how)}
        for width, widening in widths.items()
        for how in ("", ", recomputing")
    }
    if arguments.wide and dtype == "bfloat16":
        ours["phased, wide, master weights"] = {**ours["phased, wide"], "master_weights": True}
    plain = {"eager": eager, "compiled": compiled}
    return [
        Variant(name=name, options=of, environment=KEEP_FREED_MEMORY if name in keeping else {})
        for name, of in (plain | keeping | ours).items()
    ]


def variants_of(arguments: Arguments, dtype: str) -> list[Variant]:
    """The variants that are asked for, or all.

    Raises:
        BenchmarkError: there is none of such a name.
    """
    found = {variant.name: variant for variant in offered(arguments, dtype)}
    if unknown := [name for name in arguments.variants or () if name not in found]:
        raise BenchmarkError(
            f"--variants: got {', '.join(unknown)}; expected some of: {'; '.join(found)} "
            "(--wide and --offloading have others)."
        )
    return [found[name] for name in found if name in (arguments.variants or found)]


def compare(measurements: Sequence[Measurement], tokens: int) -> Figures:
    """Each variant against the fastest baseline."""
    baselines = [m for m in measurements if not m.name.startswith("phased")] or measurements
    best = min(baselines, key=lambda m: m.median)
    least = min(m.cpu_median for m in baselines)
    figures = {}
    for m in measurements:
        ratios = {"speed_ratio": best.median / m.median, "cpu_ratio": least / m.cpu_median}
        ratios |= {"memory_ratio": m.peak_bytes / best.peak_bytes, "loss": m.steps[-1]["loss"]}
        figures[m.name] = {**m.figures(), "tokens_per_s": tokens / m.median, **ratios}
    return {"variants": figures, "fastest_baseline": best.name}


COLUMNS: Columns = {
    "variant": "{variant}".format_map,
    "tokens/s": "{tokens_per_s:.0f}".format_map,
    "s/step": "{seconds:.3f}".format_map,
    "spread": lambda figures: f"{100 * figures['spread']:.0f} %",
    "speed": "{speed_ratio:.2f}x".format_map,
    "cpu s/step": "{cpu_seconds:.3f}".format_map,
    "by cpu": "{cpu_ratio:.2f}x".format_map,
    "peak memory": lambda figures: gib(figures["peak_bytes"]),
    "memory": "{memory_ratio:.2f}x".format_map,
    "loss": "{loss:.4f}".format_map,
    "of ceiling": lambda figures: percent(figures["share"]),
}


def verdict(
    variants: Mapping[str, Figures], ours: Sequence[str], peers: Sequence[str], bar: Bar
) -> Figures | None:
    """Whether the fastest of ours is within a bar, beside the fastest of its peers; None without
    one of either.

    `cpu_ratio` compares processor time with the least of the peers', `memory_ratio` our peak to the
    fastest peer's.
    """
    own, others = ([variants[n] for n in names if n in variants] for names in (ours, peers))
    if not own or not others:
        return None
    best, fastest = (min(found, key=lambda variant: variant["seconds"]) for found in (own, others))
    speed = fastest["seconds"] / best["seconds"]
    cpu = min(peer["cpu_seconds"] for peer in others) / best["cpu_seconds"]
    memory = best["peak_bytes"] / fastest["peak_bytes"]
    met = speed >= bar.least_speed and memory <= bar.most_memory
    return {"speed_ratio": speed, "cpu_ratio": cpu, "memory_ratio": memory, "met": met}


def step_flops(arguments: Arguments) -> float:
    """The FLOPs of a step's products without what is recomputed, attention as if not causal."""
    model = Model(**{name: getattr(arguments, name) for name in SIZES})
    return tokens_per_step(arguments) * flops_per_token(model)


def tokens_per_step(arguments: Arguments) -> int:
    """Tokens of a step."""
    return arguments.sequence_length * arguments.micro_batch_size * arguments.accumulation


DTYPES = ["float32", "bfloat16"]
FLAGS: Flags = {
    "--dtypes": {"nargs": "+", "default": DTYPES, "choices": DTYPES},
    "--rounds": flag(5, "measured steps of each variant"),
    "--warmup": flag(2, "steps before them"),
    "--variants": {"nargs": "+", "help": "only these, by the names in the table"},
    "--wide": {
        "action": "store_true",
        "help": "also with --width micro-batches at a time, the baselines and ours",
    },
    "--shape": flag("gpt2", "model and batch; what follows changes parts", choices=SHAPES),
    **{f"--{name}": {"type": int} for name in SHAPES["gpt2"]},
    "--dropout": flag(0.0),
    **CHECK,
}
"""For the model, the batch, and how often it is measured."""
OFFLOADING: Flags = {
    "--offloading": {
        "action": "store_true",
        "help": f"also {PEER}, which offloads, and the bar for it",
    },
}


def parse(description: str | None, flags: Flags) -> Arguments:
    """Flags beside `FLAGS`, and what the shape's name gives for those left out."""
    parser = make_parser(description, FLAGS | flags)
    parser.set_defaults(**SHAPES[parser.parse_args().shape])
    arguments = parser.parse_args()
    if arguments.wide and arguments.accumulation % arguments.width:
        parser.error(
            f"--width: got {arguments.width}; expected a divisor of --accumulation "
            f"{arguments.accumulation}."
        )
    return arguments


def show_bars(figures: Figures) -> None:
    """Print what came of the bars."""
    of = {name: bar for name, (_, _, bar) in BARS.items()}
    if (bar := figures["bar"]) is not None:
        print(
            f"\nbar: phased at least {of['bar'].least_speed}x the speed of PyTorch as it comes "
            f"(eager or compiled) at most {of['bar'].most_memory}x its memory: "
            f"{outcome(bar['met'])} ({bar['speed_ratio']:.2f}x, {bar['memory_ratio']:.2f}x)"
        )
    if (bar := figures["offloading_bar"]) is not None:
        print(
            f"\nbar: phased and recomputing at least {of['offloading_bar'].least_speed}x the speed "
            f"of the fastest that offloads: {outcome(bar['met'])} "
            f"({bar['speed_ratio']:.2f}x, {bar['cpu_ratio']:.2f}x by processor time, "
            f"{bar['memory_ratio']:.2f}x the memory)"
        )


def main() -> int:
    """Measure and print; exit code 0, with `--check` 1 when the bar is missed."""
    arguments = parse(__doc__, OFFLOADING)
    tokens, flops = tokens_per_step(arguments), step_flops(arguments)
    found = {}
    for dtype in arguments.dtypes:
        variants = variants_of(arguments, dtype)
        measured = measure(
            Path(__file__), variants, rounds=arguments.rounds, warmup=arguments.warmup
        )
        figures = found[dtype] = compare(measured, tokens)
        ceiling = multiply_ceiling(dtype)
        shares = {m.name: ceiling_share(flops, m.median, dtype) for m in measured}
        figures["ceiling"] = {"flops": ceiling, "shares": shares}
        told = f", ceiling {ceiling / 1e9:.0f} GFLOP/s" if ceiling else ""
        print(
            f"\n{dtype}, {tokens} tokens a step, ratios to the fastest baseline "
            f"({figures['fastest_baseline']}){told}\n"
        )
        rows = figures["variants"].items()
        show(COLUMNS, [{"variant": name, "share": shares[name], **of} for name, of in rows])
        figures |= {name: verdict(figures["variants"], *of) for name, of in BARS.items()}
        show_bars(figures)
    which = "offloading_bar" if arguments.offloading else "bar"
    met = all(of[which] and of[which]["met"] for of in found.values())
    settings = {name: getattr(arguments, name) for name in (*SHAPES["gpt2"], "dropout")}
    result = {"tokens_per_step": tokens, "settings": settings, "dtypes": found}
    return ended("train_step", arguments, met=met, **result)


if __name__ == "__main__":
    main_or_worker(build, main)

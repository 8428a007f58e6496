"""Where the time of a GPT-2 small step goes: products, with their share of what this CPU multiplies
at most, and what is no product, by family.

    python benchmarks/step_sections.py --check       # 4 x 256 and 4 x 1024 tokens
    python benchmarks/step_sections.py --shapes gpt2 --dtype float32 --rounds 9

The steps are those of `train_step.py`, recorded as with `--profile`. Products are the program's
matrix products, with what they add to their results (bias, accumulation); attention is one kernel
and a family of its own, which counts as no product. FLOPs of the whole step are the model's, as in
a run's MFU, attention as if not causal; of products and attention those that the profile has, of
attention the half that is not masked. The ceiling (`ceilings.py`) is measured before every step,
and a figure is the median over steps. Bars: of the ceiling the whole step, and products alone; of
the time what is no product.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from popxl.profile import Profile, Span  # noqa: E402

from benchmarks import train_step  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    CHECK,
    BenchmarkError,
    Figures,
    Flags,
    Variant,
    ended,
    flag,
    main_or_worker,
    make_parser,
    measure,
    outcome,
    percent,
    table,
)
from benchmarks.phased import PhasedSteps  # noqa: E402
from popxl_gpt.utils.runtime import multiply_ceiling, profile  # noqa: E402

STEP_BAR, PRODUCTS_BAR, REST_BAR = 0.60, 0.75, 0.15
SHAPES = {"gpt2": 4, "gpt2-1024": 1}
"""Shapes of `train_step.py`, each with the micro-batches that run as one: about 1024 rows."""
UNMASKED = 0.5
"""Share of attention's scores that a causal kernel works out."""
PRODUCTS, ATTENTION, RUNTIME, OTHER = "products", "attention", "runtime", "other"
OPS = {
    PRODUCTS: "matmul gemm gemm_bias accumulate_gemm_ accumulate_gemm_sumsq_",
    ATTENTION: "attention attention_no_probs attention_grad attention_grad_packed",
    "norm": "layer_norm group_norm group_norm_grad rms_norm rms_norm_grad",
    "activation": "gelu gelu_grad geluerf geluerf_grad relu2 relu2_grad swiglu swiglu_grad "
    "geglu geglu_grad",
    "bias and residual": "add accumulate_column_sum_ sum_to",
    "embedding": "gather gather_grad accumulate_gather_grad_ scatter_add_rows_",
    "loss": "logsumexp_and_pick logsumexp_and_pick_grad cross_entropy_and_grad softcap softcap_grad"
    " mean negate sub",
    "optimizer": "adamw_ adamw_where_ sumsquare where accumulate_mean_ isfinite logical_not maximum"
    " div sqrt scale mul add_",
    "copies": "transpose reshape copy cast init identity split concat broadcast_to"
    " copy_var_update_",
}
"""What a step of GPT-2 is made of, by family; the engine's own ops without `fused_`."""
FAMILY = {op: family for family, ops in OPS.items() for op in ops.split()}
LANES = {"load": "copies", "store": "copies", "collectives": "collectives", "host I/O": RUNTIME}
"""Families of what is no kernel."""
FAMILIES = (*OPS, "collectives", RUNTIME, OTHER)


def family_of(span: Span) -> str:
    """What a span's time is for."""
    return LANES.get(span.lane) or FAMILY.get(span.name.removeprefix("fused_"), OTHER)


def split(profile: Profile) -> Figures:
    """Seconds and FLOPs of a run's families. The runtime has what is in no span."""
    if profile.left_out:
        raise BenchmarkError(
            f"profile: got {profile.left_out} spans left out; expected all. Measure fewer steps."
        )
    seconds, flops = dict.fromkeys(FAMILIES, 0.0), dict.fromkeys(FAMILIES, 0)
    for span in profile.spans:
        if span.lane == "compute" or span.lane in LANES:
            family = family_of(span)
            seconds[family] += (span.end - span.begin) / 1e9
            flops[family] += span.work.flops
    seconds[RUNTIME] += profile.seconds - sum(seconds.values())
    return {"seconds": profile.seconds, "family_seconds": seconds, "family_flops": flops}


class RecordedSteps(PhasedSteps):
    """The phased step of `train_step.py`, recorded, and the ceiling before each."""

    def step(self, count: int) -> Figures:
        """Where the time of the last one went."""
        for _ in range(count):
            ceiling = multiply_ceiling(self.config.model.precision, "cpu")
            if not ceiling:
                raise BenchmarkError("ceiling: got no compiled kernels; expected a C++ compiler.")
            with profile(self.session) as profiles:
                super().step(1)
        return {**split(profiles[-1]), "ceiling": ceiling}


def summarise(steps: Sequence[Figures], model_flops: float) -> Figures:
    """Medians over steps of the families' shares of the time, and of the ceiling where they
    multiply.
    """

    def median_of(family: str) -> float:
        return statistics.median(s["family_seconds"][family] / s["seconds"] for s in steps)

    def reached(family: str, done: float = 1.0) -> float | None:
        rates = [
            done * s["family_flops"][family] / s["family_seconds"][family] / s["ceiling"]
            for s in steps
            if s["family_seconds"][family]
        ]
        return statistics.median(rates) if rates else None

    time = {family: median_of(family) for family in FAMILIES}
    return {
        "seconds": statistics.median(s["seconds"] for s in steps),
        "ceiling": statistics.median(s["ceiling"] for s in steps),
        "of_ceiling": statistics.median(model_flops / s["seconds"] / s["ceiling"] for s in steps),
        "products_of_ceiling": reached(PRODUCTS),
        "attention_of_ceiling": reached(ATTENTION, UNMASKED),
        "no_product": 1 - time[PRODUCTS],
        "time": time,
    }


def verdict(found: Figures) -> bool:
    """Whether a shape is within its bars."""
    return (
        found["of_ceiling"] >= STEP_BAR
        and found["products_of_ceiling"] >= PRODUCTS_BAR
        and found["no_product"] <= REST_BAR
    )


def measured(arguments: argparse.Namespace, shape: str) -> Figures:
    """One shape, in a process of its own."""
    sizes = train_step.SHAPES[shape]
    options = {
        "model": {name: sizes[name] for name in train_step.SIZES},
        **{name: sizes[name] for name in ("micro_batch_size", "accumulation")},
        "dropout": 0.0,
        "dtype": arguments.dtype,
        "widening": SHAPES[shape],
        "master_weights": False,
        "recomputation": False,
    }
    variant = Variant(name=shape, options=options)
    (of,) = measure(Path(__file__), [variant], rounds=arguments.rounds, warmup=arguments.warmup)
    flops = train_step.step_flops(argparse.Namespace(**sizes))
    return summarise(of.steps[arguments.warmup :], flops)


def show(shape: str, found: Figures) -> None:
    """Print a shape's table, the longest family first after products."""
    of_ceiling = {PRODUCTS: "products_of_ceiling", ATTENTION: "attention_of_ceiling"}
    shown = [family for family in FAMILIES if found["time"][family]]
    rows = [
        [family, f"{1e3 * found['time'][family] * found['seconds']:.1f}"]
        + [f"{found['time'][family]:.1%}"]
        + [percent(found[of_ceiling[family]]) if family in of_ceiling else ""]
        for family in sorted(shown, key=lambda name: (name != PRODUCTS, -found["time"][name]))
    ]
    whole = [f"{1e3 * found['seconds']:.1f}", "100%", percent(found["of_ceiling"])]
    print(f"\n{shape}, ceiling {found['ceiling'] / 1e9:.0f} GFLOP/s\n")
    print(table(["family", "ms", "of step", "of ceiling"], [*rows, ["step", *whole]]))
    print(
        f"bars: step at least {STEP_BAR:.0%} of the ceiling, products {PRODUCTS_BAR:.0%}, what is "
        f"no product at most {REST_BAR:.0%} of the time ({found['no_product']:.1%}): "
        f"{outcome(verdict(found))}",
        flush=True,
    )


FLAGS: Flags = {
    "--shapes": {"nargs": "+", "choices": SHAPES, "default": list(SHAPES)},
    "--dtype": flag("bfloat16", choices=("float32", "bfloat16")),
    "--rounds": flag(5, "measured steps of each shape"),
    "--warmup": flag(2, "steps before them"),
    **CHECK,
}


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when a bar is missed."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    shapes = {}
    for shape in arguments.shapes:
        shapes[shape] = measured(arguments, shape)
        show(shape, shapes[shape])
    met = all(verdict(found) for found in shapes.values())
    return ended("step_sections", arguments, met=met, dtype=arguments.dtype, shapes=shapes)


if __name__ == "__main__":
    main_or_worker(RecordedSteps, main)

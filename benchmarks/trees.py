"""The phased step of this checkout beside that of another one, alternating in one run.

    git worktree add --detach /tmp/before HEAD~1
    python benchmarks/trees.py /tmp/before
    python benchmarks/trees.py /tmp/before --shape small --wide --dropout 0.1 --rounds 10

The flags are those of `train_step.py`. Each variant of the phased step is measured in both
checkouts. A ratio of speeds above 1 means that this one is faster: the median, over the rounds, of
the other's time over ours. So much noise as both steps of a round have drops out.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import train_step  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    Figures,
    Measurement,
    Variant,
    ceiling_share,
    ended,
    gib,
    main_or_worker,
    measure,
    outcome,
    percent,
    require_file,
    table,
)

LEAST_SPEED = 0.95
"""The speed of each variant, over that of the other checkout, at least."""
MEAN_SPEED = 0.98
"""The geometric mean of all, at least."""
MOST_MEMORY = 1.02
"""Peak memory over that of the other checkout, at most."""
HERE, THERE = "here", "there"


def in_both(variants: Sequence[Variant], tree: Path) -> list[Variant]:
    """Each variant twice, of this checkout and of the other."""
    return [
        replace(variant, name=f"{variant.name}, {name}", tree=of)
        for variant in variants
        for name, of in ((THERE, tree), (HERE, variant.tree))
    ]


def ratios(measurements: Sequence[Measurement]) -> dict[str, Figures]:
    """Speed, speed by processor time and memory of each variant here, over the same there."""
    found = {m.name: m for m in measurements}
    result = {}
    for name, here in found.items():
        variant = name.removesuffix(f", {HERE}")
        if variant != name:
            there = found[f"{variant}, {THERE}"]
            result[variant] = {
                "speed": statistics.median(b / a for a, b in zip(here.seconds, there.seconds)),
                "cpu": statistics.median(
                    b / a for a, b in zip(here.cpu_seconds, there.cpu_seconds)
                ),
                "memory": here.peak_bytes / there.peak_bytes,
                "seconds": here.median,
                "peak_bytes": here.peak_bytes,
                "losses": [of.steps[-1]["loss"] for of in (there, here)],
            }
    return result


def verdict(found: Sequence[Figures]) -> Figures:
    """Whether speed and memory are within their bars."""
    speeds, memory = [each["speed"] for each in found], max(each["memory"] for each in found)
    mean, least = statistics.geometric_mean(speeds), min(speeds)
    met = mean >= MEAN_SPEED and least >= LEAST_SPEED and memory <= MOST_MEMORY
    return {"mean_speed": mean, "least_speed": least, "most_memory": memory, "met": met}


def main() -> int:
    """Measure and print; exit code 0, with `--check` 1 when the bar is missed."""
    tree_flag = {"tree": {"type": Path, "help": "the other checkout"}}
    arguments = train_step.parse(__doc__, tree_flag)
    arguments.offloading, tree = False, arguments.tree.resolve()
    script = tree / "benchmarks" / "train_step.py"
    require_file(script, "a checkout with benchmarks/train_step.py", "Name another folder.")
    result: dict[str, dict[str, Figures]] = {}
    for dtype in arguments.dtypes:
        variants = train_step.variants_of(arguments, dtype)
        ours = [variant for variant in variants if variant.options["kind"] == "phased"]
        measured = measure(
            Path(train_step.__file__),
            in_both(ours, tree),
            rounds=arguments.rounds,
            warmup=arguments.warmup,
        )
        result[dtype] = ratios(measured)
        for of in result[dtype].values():
            flops = train_step.step_flops(arguments)
            of["ceiling_share"] = ceiling_share(flops, of["seconds"], dtype)
        rows = [
            [name, f"{of['seconds']:.3f}", percent(of["ceiling_share"]), gib(of["peak_bytes"])]
            + [f"{of[ratio]:.3f}x" for ratio in ("speed", "cpu", "memory")]
            + [f"{loss:.6f}" for loss in of["losses"]]
            for name, of in result[dtype].items()
        ]
        headers = ["variant", "s/step", "of ceiling", "peak memory", "speed", "by cpu", "memory"]
        print(f"\n{arguments.shape}, {dtype}, dropout {arguments.dropout:g}, over {tree}\n")
        print(table([*headers, "loss there", "loss here"], rows), flush=True)
    bar = verdict([of for variants in result.values() for of in variants.values()])
    print(
        f"\nbar: speed at least {LEAST_SPEED}x, {MEAN_SPEED}x in the geometric mean, memory at "
        f"most {MOST_MEMORY}x: {outcome(bar['met'])} ({bar['least_speed']:.3f}x, "
        f"{bar['mean_speed']:.3f}x, {bar['most_memory']:.3f}x)"
    )
    return ended("trees", arguments, met=bar["met"], dtypes=result, bar=bar)


if __name__ == "__main__":
    main_or_worker(train_step.build, main)

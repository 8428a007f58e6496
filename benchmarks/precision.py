"""Loss curves of every precision over the same steps on a text of characters.

    python benchmarks/precision.py     # ../shared/data/tinyshakespeare.txt, 300 steps, three seeds
    python benchmarks/precision.py --text FILE --steps 50 --seeds 1 --picture curves.png
    python benchmarks/precision.py --steps 2000 --modes 'gradients in bfloat16'
    python benchmarks/precision.py --hidden_size 64 --modes 'bfloat16, products in 8 bits'

Model, batches and schedule are those of `shakespeare.py`; each mode begins with the same weights
and sees the same batches. Validation loss is over the whole held-out tenth, by a forward program of
the mode's own precision. The picture shows the training loss, a running mean, less that of float32.
Steps stand beside what this CPU multiplies at most in the mode's type (`ceilings.py`).
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    Figures,
    Flags,
    ceiling_share,
    ended,
    flag,
    make_parser,
    percent,
    require_file,
    script,
    table,
)
from benchmarks.phased import PhasedRun  # noqa: E402
from benchmarks.shakespeare import BATCH, MODEL, TEXT, Characters, config_of  # noqa: E402
from popxl_gpt.config.presets import override  # noqa: E402
from popxl_gpt.execution.planning.model_size import flops_per_step  # noqa: E402
from popxl_gpt.execution.reports.running_mean import RunningMean  # noqa: E402

REFERENCE = "float32"
REPLICATED = {"data_parallel": 4, "micro_batch_size": BATCH // 4}
MODES: "dict[str, dict[str, Any]]" = {
    REFERENCE: {},
    "bfloat16, master weights": {"precision": "bfloat16"},
    "bfloat16, stochastic rounding": {"precision": "bfloat16", "stochastic_rounding": True},
    "bfloat16, neither": {"precision": "bfloat16", "master_weights": False},
    "float16, master weights, scaled": {"precision": "float16", "loss_scaling": "auto"},
    "moments in bfloat16": {"moment_precision": "bfloat16", "stochastic_rounding": True},
    "moments in 8 bits": {"moment_precision": "8bit", "stochastic_rounding": True},
    "bfloat16, products in 8 bits": {"precision": "bfloat16", "products": "fp8"},
    "gradients in bfloat16": {"gradient_precision": "bfloat16", "stochastic_rounding": True},
    "4 replicas": REPLICATED,
    "4 replicas, sums of bfloat16": {**REPLICATED, "reduce_precision": "bfloat16"},
}
"""Settings of each mode."""


def trained(
    text: Characters, settings: "dict[str, Any]", steps: int, seed: int, width: int
) -> Figures:
    """Losses of all steps, their time, and the loss of the validation text after them."""
    config = config_of("phased", text.vocabulary_size, steps, seed)
    run = PhasedRun(override(config, **{"hidden_size": width, **settings}), text)
    losses, times = [], [time.perf_counter()]
    for _ in range(steps):
        losses.append(run.step(1)["loss"])
        times.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in zip(times, times[1:]))
    share = ceiling_share(flops_per_step(run.config), seconds, run.config.model.precision)
    figures = {"seed": seed, "losses": losses, "step_seconds": seconds, "ceiling_share": share}
    return figures | run.finish()


def draw(runs: "dict[str, list[Figures]]", path: Path) -> None:
    """The modes' mean curves less that of float32, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not at the top: `--help` is fast
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    curves = {}
    for name, seeds in runs.items():
        mean = RunningMean()
        losses = np.mean([run["losses"] for run in seeds], axis=0)
        curves[name] = np.array([mean.add(loss) for loss in losses])
        axes.plot(1 + np.arange(len(losses)), curves[name] - curves[REFERENCE], label=name)
    axes.set(xlabel="optimizer steps", ylabel="training loss less that of float32 (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def summarise(runs: "list[Figures]", reference: "list[Figures]") -> Figures:
    """One mode over all seeds, beside float32 with the same seeds."""
    last = [float(np.mean(run["losses"][-25:])) for run in runs]
    behind = [
        run["validation_loss"] - other["validation_loss"] for run, other in zip(runs, reference)
    ]
    return {
        "training_loss": statistics.fmean(last),
        "validation_loss": statistics.fmean(run["validation_loss"] for run in runs),
        "behind_float32": statistics.fmean(behind),
        "behind_float32_by_seed": behind,
        "step_seconds": statistics.median(run["step_seconds"] for run in runs),
        "ceiling_share": max(
            (run["ceiling_share"] for run in runs if run["ceiling_share"]), default=None
        ),
        "runs": runs,
    }


FLAGS: Flags = {
    **TEXT,
    "--steps": flag(300, "optimizer steps"),
    "--hidden_size": flag(MODEL["hidden_size"], "width of the model"),
    "--seeds": flag(3, "how many; the seeds are 0, 1, ..."),
    "--modes": {"nargs": "+", "default": list(MODES), "choices": MODES, "help": "beside float32"},
    "--picture": {"type": Path, "help": "PNG file for the curves; default: none"},
}


def main() -> int:
    """Train in every mode, draw, print; exit code 2 when the text is missing."""
    arguments = make_parser(__doc__, FLAGS).parse_args()
    require_file(arguments.text, "a text to train on", "Give one with --text FILE.")
    text = Characters.read(arguments.text)
    runs: dict[str, list[Figures]] = {name: [] for name in (REFERENCE, *arguments.modes)}
    for seed in range(arguments.seeds):
        for name in runs:
            runs[name].append(
                trained(text, MODES[name], arguments.steps, seed, arguments.hidden_size)
            )
            loss = runs[name][-1]["validation_loss"]
            print(f"seed {seed}: {name} ends at validation loss {loss:.4f}", flush=True)
    if arguments.picture:
        draw(runs, arguments.picture)
    figures = {name: summarise(found, runs[REFERENCE]) for name, found in runs.items()}
    rows = [
        [name, f"{f['training_loss']:.4f}", f"{f['validation_loss']:.4f}"]
        + [f"{f['behind_float32']:+.4f}", f"{1e3 * f['step_seconds']:.2f}"]
        + [percent(f["ceiling_share"])]
        for name, f in figures.items()
    ]
    headers = ["mode", "training, last 25 steps", "validation", "validation less float32's"]
    print()
    print(table([*headers, "ms/step", "of ceiling"], rows))
    counts = {"steps": arguments.steps, "seeds": arguments.seeds}
    return ended("precision", arguments, met=True, modes=figures, **counts)


if __name__ == "__main__":
    script(main)

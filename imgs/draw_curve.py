"""Draws `docs/imgs/curve.png`: a run's training and validation loss over its tokens.

    python imgs/draw_curve.py runs/curve

The run's folder is given.
"""

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PICTURE = Path(__file__).resolve().parent.parent / "docs/imgs/curve.png"


def draw(folder: Path) -> None:
    """The loss of each step, and of each validation, in nats a token."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if line["validation_loss"] is not None]
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    every = [line["tokens"] / 1000 for line in lines], [line["loss"] for line in lines]
    axes.plot(*every, color="tab:blue", linewidth=0.6, alpha=0.5, label="training, each step")
    tokens = [line["tokens"] / 1000 for line in validated]
    axes.errorbar(
        tokens,
        [line["validation_loss"] for line in validated],
        yerr=[line["validation_standard_error"] for line in validated],
        color="tab:orange",
        marker="o",
        capsize=3,
        label="validation, with its standard error",
    )
    for count, line in zip(tokens, validated):
        text = f"{line['validation_bits_per_byte']:.2f}"
        axes.annotate(text, (count, line["validation_loss"] + 0.25), ha="center", fontsize=8)
    axes.set(
        xlabel="thousands of tokens", ylabel="loss (nats a token); bits per byte above", ylim=(3, 8)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))

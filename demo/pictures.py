"""The picture of a run's losses."""

from pathlib import Path
from typing import Any

import numpy as np

from utils.files import save_picture

SMOOTHING = 0.95
"""Share of the running mean in each step of the smooth training curve."""


def draw_losses(metrics: "list[dict[str, Any]]", path: Path, title: str) -> None:
    """Write training and validation loss against steps to a PNG file."""
    # slow to import, and needed once, at the end
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trained = [line for line in metrics if line["loss"] is not None]
    steps = np.array([line["step"] for line in trained])
    losses = np.array([line["loss"] for line in trained])
    steps, losses = (values[np.isfinite(losses)] for values in (steps, losses))
    validations = [(line["step"], line.get("validation_loss")) for line in metrics]
    validated = [
        (step, loss) for step, loss in validations if loss is not None and np.isfinite(loss)
    ]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses), color="tab:blue", label="training (smoothed)")
    if validated:
        axes.plot(
            *zip(*validated), color="tab:orange", marker="o", markersize=3, label="validation"
        )
    axes.set(xlabel="optimizer steps", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # a name may hold what begins a formula
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential running mean, corrected for its start."""
    result, mean, weight = np.empty(len(values)), 0.0, 0.0
    for index, value in enumerate(values):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        result[index] = mean / weight
    return result

"""The picture of `time_to_loss.py`: bits per byte over seconds and over tokens."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

from benchmarks.harness import Figures

matplotlib.use("Agg")  # before pyplot: files only, no window
from matplotlib import pyplot  # noqa: E402

COLOURS = {"ours": "tab:blue", "nanogpt": "tab:orange", "modern": "tab:green"}
STYLES = ("-", "--", "-.", ":")


def draw(path: Path, results: Mapping[str, Mapping[float, Figures]]) -> None:
    """Draw every run: a colour for each recipe, a style for each number of minutes."""
    lengths = sorted({minutes for by_minutes in results.values() for minutes in by_minutes})
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for kind, by_minutes in results.items():
        for minutes, figures in sorted(by_minutes.items()):
            style = STYLES[lengths.index(minutes) % len(STYLES)]
            for number, curve in enumerate(figures["curves"]):
                points = [point for point in curve if point["bits_per_byte"] is not None]
                label = f"{kind}, {minutes:g} min" if number == 0 else None
                for panel, axis in zip(panels, ("seconds", "tokens")):
                    panel.plot(
                        [point[axis] for point in points],
                        [point["bits_per_byte"] for point in points],
                        color=COLOURS[kind],
                        linestyle=style,
                        linewidth=1,
                        label=label,
                    )
    for panel, axis in zip(panels, ("seconds, start-up included", "tokens")):
        panel.set(xlabel=axis, xscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bits per byte of held-out text")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

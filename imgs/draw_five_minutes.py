"""Draws `docs/imgs/five_minutes.png`: the bits per byte of each entry of the five-minute board.

python imgs/draw_five_minutes.py
"""

import json

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from write_tables import FIVE_MINUTES, ROOT

PICTURE = ROOT / "docs/imgs/five_minutes.png"


def draw() -> None:
    """A bar for each result, the fewest bits on top, and a point for each of its runs."""
    results = [json.loads(line) for line in FIVE_MINUTES.read_text().splitlines()]
    results.sort(key=lambda result: result["bits_per_byte"], reverse=True)
    figure = Figure(figsize=(8, 0.8 + 0.5 * len(results)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    machines = [result["machine"] for result in results]
    names = [
        f"{result['entry']}\n{machine['processor']}, {machine['vector']}"
        for result, machine in zip(results, machines)
    ]
    bits = [result["bits_per_byte"] for result in results]
    bars = axes.barh(names, bits, color="tab:blue", alpha=0.6)
    axes.bar_label(bars, fmt="%.3f", padding=6)
    for row, result in enumerate(results):
        runs = result["all_bits_per_byte"]
        axes.plot(runs, [row] * len(runs), "o", color="black", markersize=3)
    axes.set(
        xlabel="bits per byte of held-out text, after five minutes on two cores: fewer is better",
        xlim=(0, 1.1 * max(bits)),
    )
    figure.savefig(PICTURE)


if __name__ == "__main__":
    draw()

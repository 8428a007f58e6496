"""Draws `docs/imgs/five-minutes.png`: the bits a byte of each entry of the five-minute benchmark.

python imgs/draw_five_minutes.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "five_minutes.jsonl"


def draw(results: "list[dict[str, Any]]", path: Path) -> None:
    """Draw a bar a result, the fewest bits on top, and a mark a run."""
    ranked = sorted(results, key=lambda result: float(result["bits_per_byte"]), reverse=True)
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.5 * len(ranked)), layout="constrained")
    names = [f"{result['entry']} ({result['machine']['vector']})" for result in ranked]
    scores = [result["bits_per_byte"] for result in ranked]
    bars = axes.barh(range(len(ranked)), scores, height=0.6, color="#9ecae1")
    axes.bar_label(bars, [f"{score:.3f}" for score in scores], padding=6)
    for row, result in enumerate(ranked):
        runs = result["all_bits_per_byte"]
        axes.plot(runs, [row] * len(runs), "|", color="black", markersize=12)
    axes.set_yticks(range(len(ranked)), names)
    axes.set_xlim(0, 1.12 * max(scores))
    axes.set_xlabel("bits a byte of held-out text, after five minutes on two cores: less is better")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Draw the picture of the docs."""
    results = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    draw(results, ROOT / "docs" / "imgs" / "five-minutes.png")


if __name__ == "__main__":
    main()

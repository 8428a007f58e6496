"""Draws `docs/imgs/phases.png` from the training program: what each phase of a step loads and
stores, how often it runs.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import popxl  # noqa: E402

from popxl_gpt.config.presets import preset  # noqa: E402
from popxl_gpt.execution.graphs import TrainingStep  # noqa: E402
from popxl_gpt.execution.planning.schedule import contents, step_program  # noqa: E402

LOAD, STORE, INK, BOX = "#2b6cb0", "#c05621", "#1a202c", "#edf2f7"
LANES = (
    "host streams",
    "weights",
    "x: activations",
    "kept words and seeds",
    "dx: their gradients",
    "gradients of weights",
    "optimizer state",
)
HOST, WEIGHTS, X, KEPT, DX, GRADIENTS, STATE = LANES

HELD = X, DX, WEIGHTS, GRADIENTS, STATE

Moves = dict[tuple[str, str], bool]
"""(lane, "load" or "store") that a phase makes."""


def lanes_of(step: TrainingStep) -> dict[Any, str]:
    """The lane of each remote buffer of the step, but those that keep words and seeds for the
    backward pass.
    """
    lanes = dict(zip(("x", "dx", "weights", "gradients", "optimizer state"), HELD))
    return {buffer: lanes[what] for buffer, what in contents(step).items()}


def transfers(graph: popxl.Graph, lanes: dict[Any, str]) -> set[tuple[str, str]]:
    """(lane, direction) of every transfer in a graph and in what it calls."""
    found: set[tuple[str, str]] = set()
    for op in graph.ops:
        kind = op.definition.name
        if kind in ("host_load", "host_store"):
            found.add((HOST, kind.removeprefix("host_")))
        elif kind in ("remote_load", "remote_store"):
            found.add(
                (lanes.get(op.arguments["remote_buffer"], KEPT), kind.removeprefix("remote_"))
            )
        for called, _ in op.called():
            found |= transfers(called, lanes)
    return found


def phases(ir: popxl.Ir, step: TrainingStep) -> list[tuple[str, int, set[tuple[str, str]]]]:
    """(name, times, transfers) of each phase, in order."""
    lanes = lanes_of(step)
    return [
        (
            graph.name.split("_subgraph(")[0],
            op.arguments.get("repeat_count", 1),
            transfers(graph, lanes),
        )
        for op in ir.main_graph.ops
        for graph, _ in op.called()
    ]


def description(found: list[tuple[str, int, set[tuple[str, str]]]]) -> str:
    """What a picture of these phases shows, as JSON; it stands in the file beside the pixels, which
    depend on fonts.
    """
    return json.dumps([[name, times, sorted(moves)] for name, times, moves in found])


def drawn_from(file: Path) -> str:
    """The description of what a picture shows."""
    from PIL import Image

    with Image.open(file) as image:
        return str(image.info["Description"])


def draw(found: list[tuple[str, int, set[tuple[str, str]]]], layers: int, file: Path) -> None:
    """One column per phase, one line per kind of memory; arrows down are loads, arrows up are
    stores.
    """
    figure, axes = plt.subplots(figsize=(12.5, 5.2), dpi=110)
    top = len(LANES)
    for i, lane in enumerate(LANES):
        y = top - i
        axes.axhline(y, color="#cbd5e0", linewidth=1, zorder=0)
        axes.text(-0.55, y, lane, ha="right", va="center", fontsize=10, color=INK)
    for x, (name, times, moves) in enumerate(found):
        words = (
            name.removesuffix("_phase")
            .replace("fwd", "forward")
            .replace("bwd", "backward")
            .replace("optim", "update")
        )
        label = words.replace("_", "\n") if "_" in words else f"{words}\nforward\n+ backward"
        label += "\n+ update" if name == "embedding_bwd_phase" else ""
        repeats = "\nx layers" if times == layers and name.startswith("decoder") else ""
        axes.text(
            x, -0.1, label + repeats, ha="center", va="center", fontsize=9.5, color=INK,
            bbox={"boxstyle": "round,pad=0.5", "facecolor": BOX, "edgecolor": INK, "linewidth": 1},
        )  # fmt: skip
        for lane, direction in moves:
            y = top - LANES.index(lane)
            shift, color = (-0.12, LOAD) if direction == "load" else (0.12, STORE)
            ends = (
                ((x + shift, 0.42), (x + shift, y))
                if direction == "store"
                else ((x + shift, y), (x + shift, 0.42))
            )
            arrow = {
                "arrowstyle": "-|>",
                "color": color,
                "linewidth": 1.3,
                "shrinkA": 0,
                "shrinkB": 0,
                "alpha": 0.85,
            }
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)
            axes.plot([x + shift], [y], "o", color=color, markersize=6)
        if x:
            axes.annotate(
                "",
                xy=(x - 0.38, -0.1),
                xytext=(x - 0.62, -0.1),
                arrowprops={"arrowstyle": "-|>", "color": INK},
            )
    axes.text(
        len(found) - 0.5, top + 0.62, "load", color=LOAD, ha="right", fontsize=11, weight="bold"
    )
    axes.text(
        len(found) - 0.45, top + 0.62, "store", color=STORE, ha="left", fontsize=11, weight="bold"
    )
    axes.text(
        -0.5,
        top + 0.62,
        "One optimizer step: every phase runs over all micro-batches of the global batch",
        fontsize=11.5,
        color=INK,
    )
    axes.set_xlim(-0.6, len(found) - 0.1)
    axes.set_ylim(-0.85, top + 0.9)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(file, metadata={"Software": None, "Description": description(found)})
    plt.close(figure)


def main(file: Path = ROOT / "docs" / "imgs" / "phases.png") -> None:
    """Draw the picture of the smallest preset, which has the phases of all."""
    config = preset("tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)
    ir, step = step_program(config)
    draw(phases(ir, step), config.model.layers, file)


if __name__ == "__main__":
    main()

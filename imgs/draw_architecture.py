"""Draws `docs/imgs/architecture.png`: one small program at each stage of the compiler, as the
compiler itself shows it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
INK, BOX, ACCENT = "#1a202c", "#edf2f7", "#2b6cb0"
FIRST, FUSING = "drop_casts", "fuse_gemm_bias"
"""The first pass, which finds nothing to do here, and one that does."""
OUR_LINES = 2
"""Lines of the program that its panel shows."""
PROGRAM = """\
def layer(x: popxl.Tensor, w: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
    return ops.gelu(x @ w + b)

import numpy as np, popxl
from popxl import ops
from popxl.extensions import to_text

ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    inputs = popxl.h2d_stream((2, 4), popxl.float32, name="inputs")
    results = popxl.d2h_stream((2, 3), popxl.float32, name="results")
    w = popxl.variable(np.ones((4, 3), np.float32), name="w")
    b = popxl.variable(np.ones(3, np.float32), name="b")
    graph = ir.create_graph(layer, popxl.TensorSpec((2, 4), popxl.float32), w, b)
    ops.host_store(results, *ops.call(graph, ops.host_load(inputs), w, b))
print(to_text(ir))
with popxl.Session(ir, "cpu") as session:
    print("result", session.run({inputs: np.ones((2, 4), np.float32)})[results].tolist())
"""


@dataclass(frozen=True)
class Panel:
    """One stage: what it is called, where its code is, and the program there."""

    title: str
    folder: str
    text: str


def run(**environment: str) -> "dict[str, str]":
    """What the program and the compiler print, and the source that is generated."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        # Annotations are read when a graph is made: imports may follow the function.
        file.write_text("from __future__ import annotations\n" + PROGRAM, encoding="utf-8")
        paths = {"POPXL_CACHE_DIR": folder, "PYTHONPATH": str(ROOT / "runtime")}
        done = subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, "POPXL_NATIVE": "0", **paths, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        (source,) = [path for path in Path(folder).glob("*.py") if path != file]
        compiled = source.read_text(encoding="utf-8")
        return {"printed": done.stdout, "compiler": done.stderr, "source": compiled}


def graph_of(printed: str) -> str:
    """The called graph, without attributes that are not given."""
    graph = printed[printed.index("graph 'layer") :].split("\n\n")[0]
    return re.sub(r", \w+=None", "", graph).replace(") -> (", ")\n  -> (")


def block_of(compiler: str) -> str:
    """The instructions of the called graph as the compiler prints them after a pass."""
    block = compiler[compiler.index("block layer") :].split("\n}")[0] + "\n}"
    block = re.sub(r", \w+=None", "", block)
    return re.sub(r"  # .*/(\w+\.py):\d+", "", block)


def body_of(source: str) -> str:
    """The lines of the called graph, without numbers of kernels and frees of memory."""
    body = source[source.index("# /layer") :].split("# main")[0]
    lines = [line.strip() for line in body.splitlines()[1:] if "del " not in line]
    text = "\n".join(line for line in lines if line)
    text = re.sub(r"\b(k_\w+?)_\d+g\(", r"\1(", text).replace(", None", "")
    return re.sub(r"  # (\w+), .*/(\w+\.py):\d+", r"  # \1, \2", text)


def panels() -> "list[Panel]":
    """The stages, from the program to its result."""
    before, after = run(POPXL_PRINT_AFTER=FIRST), run(POPXL_PRINT_AFTER=FUSING)
    program = "\n".join(PROGRAM.splitlines()[:OUR_LINES])
    return [
        Panel("ops: your program calls them", "popxl/ops", program),
        Panel("graph: one op a line", "popxl", graph_of(after["printed"])),
        Panel(
            "instructions, before passes change them",
            "popxl_engine/lowering, popxl_engine/ir",
            block_of(before["compiler"]),
        ),
        Panel(
            f"passes: here {FUSING} has fused two of them",
            "popxl_engine/analysis, popxl_engine/passes",
            block_of(after["compiler"]),
        ),
        Panel(
            "source: generated Python, calls inlined",
            "popxl_engine/codegen",
            body_of(after["source"]),
        ),
        Panel(
            "run: kernels, memory, replicas",
            "popxl_engine/kernels, popxl_engine/machine",
            after["printed"].splitlines()[-1],
        ),
    ]


def description(found: "list[Panel]") -> str:
    """What a picture of these panels shows, as JSON; it stands in the file beside the pixels."""
    return json.dumps([asdict(panel) for panel in found])


def draw(found: "list[Panel]", file: Path) -> None:
    """A panel under the other, an arrow between two."""
    heights = [len(panel.text.splitlines()) * 0.17 + 0.62 for panel in found]
    gap = 0.3
    total = sum(heights) + gap * (len(found) - 1)
    figure, axes = plt.subplots(figsize=(11, total + 0.2), dpi=110)
    y = total
    for panel, height in zip(found, heights):
        box = plt.Rectangle((0, y - height), 10, height, facecolor=BOX, edgecolor=INK)
        axes.add_patch(box)
        axes.text(0.12, y - 0.24, panel.title, color=ACCENT, weight="bold", va="center")
        axes.text(9.88, y - 0.24, panel.folder, color=INK, ha="right", va="center", fontsize=9)
        axes.text(
            0.12, y - 0.44, panel.text, family="monospace", fontsize=9.5, color=INK, va="top",
            parse_math=False, linespacing=1.25,
        )  # fmt: skip
        y -= height
        if panel is not found[-1]:
            arrow = {"arrowstyle": "-|>", "color": INK}
            axes.annotate("", xy=(5, y - gap), xytext=(5, y), arrowprops=arrow)
        y -= gap
    axes.set_xlim(-0.05, 10.05)
    axes.set_ylim(-0.05, total + 0.05)
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    figure.savefig(file, metadata={"Software": None, "Description": description(found)})
    plt.close(figure)


def main(file: Path = ROOT / "docs" / "imgs" / "architecture.png") -> None:
    """Draw the picture."""
    draw(panels(), file)


if __name__ == "__main__":
    main()

"""What it takes to build a program, to differentiate it, to recompute in its gradient and to
compile it, by its size.

    python benchmarks/building.py
    python benchmarks/building.py --check

Four shapes of programs grow: graphs in graphs, each of two inputs, one of them by reference, and
each calling the next one twice, 2 to 32 deep (a run of the deepest would do 2^32 calls, and nothing
here runs); one graph with up to 100,000 ops; one graph that is called up to 16,000 times; and a
module of up to 640 layers that share no graph. All times are processor time, the least of some
rounds. A shape grows linearly if its cost for each op
of the largest program is at most 1.2 times that of the second largest: growth is read from
neighbours, as what a program costs at all weighs on the smallest.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.harness import Figures, machine, print_json, table  # noqa: E402

SIZES = {
    "nested": (2, 8, 32, 64),
    "flat": (1_000, 10_000, 100_000),
    "calls": (1_000, 4_000, 16_000),
    "modules": (40, 160, 640),
}
"""Depths, ops, calls and layers."""
UNITS = {"nested": "depth", "flat": "ops", "calls": "calls", "modules": "layers"}
PARTS = ("build", "autodiff", "recompute", "compile")
STEEPEST = 1.2
"""How much longer an op of the largest program may take than one of the second largest."""
BARS = {"compile, µs per call": 100.0}
Shape = tuple[Callable[[], object], Callable[[object], object]]
"""What builds a program, and what gives the graph of it, or of another, to differentiate."""


def nested(depth: int) -> Shape:
    """Graphs in graphs: each calls the next one twice, and the innermost one writes to what all
    hand down.
    """
    import popxl
    from popxl import ops

    def build() -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x, total = (popxl.variable(np.ones(4, np.float32)) for _ in range(2))

            def innermost(t: popxl.Tensor, total: popxl.TensorByRef) -> popxl.Tensor:
                ops.add_(total, t)
                return t + t

            graph = ir.create_graph(innermost, x, total)
            for _ in range(depth):

                def twice(
                    t: popxl.Tensor, total: popxl.TensorByRef, inner: popxl.Graph = graph
                ) -> popxl.Tensor:
                    (once,) = ops.call(inner, t, total)
                    return ops.call(inner, once, total)[0]

                graph = ir.create_graph(twice, x, total)
            _store(*ops.call(graph, x, total))
        return ir

    def differentiated(_: object) -> object:  # what is differentiated writes nothing in place
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(4, np.float32))
            graph = ir.create_graph(lambda t, u: t + u, x, x)
            for _ in range(depth):

                def twice(
                    t: popxl.Tensor, u: popxl.Tensor, inner: popxl.Graph = graph
                ) -> popxl.Tensor:
                    (once,) = ops.call(inner, t, u)
                    return ops.call(inner, once, u)[0]

                graph = ir.create_graph(twice, x, x)
            return graph

    return build, differentiated


def flat(count: int) -> Shape:
    """One graph with many ops, called once."""
    import popxl
    from popxl import ops

    def chain(t: popxl.Tensor, u: popxl.Tensor) -> popxl.Tensor:
        for _ in range(count):
            t = ops.mul(t, u)
        return t

    def build() -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(4, np.float32))
            _store(*ops.call(ir.create_graph(chain, x, x), x, x))
        return ir

    return build, lambda ir: ir.graphs[1]  # type: ignore[attr-defined]


def calls(count: int) -> Shape:
    """A graph of four ops that another one calls many times."""
    import popxl
    from popxl import ops

    def called(t: popxl.Tensor, weight: popxl.Tensor) -> popxl.Tensor:
        for _ in range(4):
            t = ops.mul(t, weight)
        return t

    def build() -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(4, np.float32))
            graph = ir.create_graph(called, x, x)

            def caller(t: popxl.Tensor, weight: popxl.Tensor) -> popxl.Tensor:
                for _ in range(count):
                    (t,) = ops.call(graph, t, weight)
                return t

            _store(*ops.call(ir.create_graph(caller, x, x), x, x))
        return ir

    return build, lambda ir: ir.graphs[2]  # type: ignore[attr-defined]


def modules(count: int) -> Shape:
    """A module of layers that share no graph."""
    import popxl
    import popxl_addons as addons

    class Layers(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = addons.Module.from_list([addons.layers.Linear(4) for _ in range(count)])

        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def build() -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones((2, 4), np.float32))
            factories, graph = Layers().create_graph(x)
            _store(*graph.bind(factories.init()).call(x))
        return ir

    return build, lambda ir: ir.graphs[1]  # type: ignore[attr-defined]


def _store(t: object) -> None:
    import popxl
    from popxl import ops

    ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)  # type: ignore[attr-defined]


SHAPES = {"nested": nested, "flat": flat, "calls": calls, "modules": modules}


def measured(shape: str, size: int, rounds: int) -> Figures:
    """Seconds of each part, the fastest of some rounds; and how many ops all graphs of the program
    have.
    """
    import popxl
    import popxl_addons as addons

    best = dict.fromkeys(PARTS, float("inf"))
    ops = 0

    def timed(part: str, what: Callable[..., object], *operands: object) -> object:
        gc.collect()
        begin = time.process_time()
        result = what(*operands)
        best[part] = min(best[part], time.process_time() - begin)
        return result

    for _ in range(rounds):
        build, differentiated = SHAPES[shape](size)
        graph = addons.GraphWithNamedArgs(differentiated(timed("build", build)))
        timed("recompute", addons.recompute_graph, timed("autodiff", addons.autodiff, graph))
        ir = build()
        ops = sum(len(graph.ops) for graph in ir.graphs)  # type: ignore[attr-defined]
        timed("compile", popxl.Session, ir, "cpu")
    return {"size": size, "ops": ops, **best}


def steepness(figures: Sequence[Figures], part: str) -> float:
    """How much longer an op of the largest program takes than one of the second largest, in one
    part.
    """
    before, last = figures[-2:]
    each = [found[part] / found["ops"] for found in (before, last)]
    return each[1] / each[0] if each[0] else 1.0


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when something is not linear or misses
    its bar.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each program")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    arguments = parser.parse_args()

    for shape in SHAPES:  # what the first of its kind costs once
        measured(shape, 2, 1)
    found = {
        shape: [measured(shape, size, arguments.rounds) for size in sizes]
        for shape, sizes in SIZES.items()
    }
    growth = {
        shape: {part: steepness(figures, part) for part in PARTS}
        for shape, figures in found.items()
    }
    for shape, figures in found.items():
        rows = []
        for of in figures:
            each = [f"{1e6 * of[part] / of['ops']:.1f}" for part in PARTS]
            rows.append(
                [f"{of['size']:,}", f"{of['ops']:,}", *(f"{of[part]:.3f}" for part in PARTS), *each]
            )
        print(
            table(
                [
                    f"{shape}, {UNITS[shape]}",
                    "ops",
                    *(f"{p}, s" for p in PARTS),
                    *(f"{p}, µs/op" for p in PARTS),
                ],
                rows,
            )
        )
        steps = ", ".join(f"{part} {growth[shape][part]:.2f}x" for part in PARTS)
        print(f"an op of the largest over one of the second largest: {steps}", end="\n\n")

    per_call = max(1e6 * of["compile"] / of["size"] for of in found["calls"])
    bars = {"compile, µs per call": per_call}
    met = all(bars[name] <= bar for name, bar in BARS.items())
    linear_all = all(value <= STEEPEST for parts in growth.values() for value in parts.values())
    print(
        f"compile: {per_call:.0f} µs per call, bar {BARS['compile, µs per call']:.0f}: "
        f"{'met' if met else 'missed'}"
    )
    print(f"growth: {'linear' if linear_all else 'not linear'}")
    print_json(
        {
            "benchmark": "building",
            "machine": machine(),
            "found": found,
            "growth": growth,
            "per_call": bars,
            "bars": BARS,
            "linear": linear_all,
            "met": met and linear_all,
        }
    )
    return 1 if arguments.check and not (met and linear_all) else 0


if __name__ == "__main__":
    sys.exit(main())

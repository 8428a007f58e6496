"""What it takes to build a program, to differentiate it and to make its session, by its size.

    python benchmarks/building.py
    python benchmarks/building.py --check

Four shapes of programs grow: graphs in graphs, each of two inputs, one of them by reference, and
each calling the next one twice, 2 to 32 deep (a run of the deepest would do 2^32 calls, and nothing
here runs); one graph with up to 100,000 ops; one graph that is called up to 16,000 times; and a
module of up to 640 layers with weights of their own, whose gradients are accumulated. All times are
processor time. A shape grows linearly if its cost
for each op of the largest program is at most three times that of the second largest: growth is read
from neighbours, as what a program costs at all weighs on the smallest.
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
    "nested": (2, 4, 8, 16, 32),
    "flat": (1_000, 10_000, 100_000),
    "calls": (1_000, 4_000, 16_000),
    "modules": (40, 160, 640),
}
"""Depths, ops, calls and layers."""
UNITS = {"nested": "depth", "flat": "ops", "calls": "calls", "modules": "layers"}
PARTS = ("build", "autodiff", "session")
STEEPEST = 3.0
"""How much dearer an op of the largest program may be than one of the second largest."""
BARS = {"session, µs per call": 100.0}


def nested(depth: int) -> tuple[Callable[[], object], Callable[[object], object]]:
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

    def differentiate(_: object) -> object:  # what is differentiated writes nothing in place
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
            return popxl.transforms.autodiff(graph)

    return build, differentiate


def flat(count: int) -> tuple[Callable[[], object], Callable[[object], object]]:
    """One graph with many ops, called once."""
    import popxl
    from popxl import ops

    def chain(t: popxl.Tensor, u: popxl.Tensor) -> popxl.Tensor:
        for _ in range(count):
            t = ops.add(t, u)
        return t

    def build() -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones(4, np.float32))
            _store(*ops.call(ir.create_graph(chain, x, x), x, x))
        return ir

    return build, _differentiated(1)


def calls(count: int) -> tuple[Callable[[], object], Callable[[object], object]]:
    """A graph of four ops that another one calls many times."""
    import popxl
    from popxl import ops

    def called(t: popxl.Tensor, weight: popxl.Tensor) -> popxl.Tensor:
        for _ in range(4):
            t = ops.add(t, weight)
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

    return build, _differentiated(2)


def modules(count: int) -> tuple[Callable[[], object], Callable[[object], object]]:
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

    def differentiate(_: object) -> object:
        with popxl.Ir().main_graph:
            _, graph = Layers().create_graph(popxl.TensorSpec((2, 4), popxl.float32))
            return addons.autodiff_with_accumulation(graph, graph.args.tensors)

    return build, differentiate


def _store(t: object) -> None:
    import popxl
    from popxl import ops

    ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)  # type: ignore[attr-defined]


def _differentiated(last: int) -> Callable[[object], object]:
    """Autodiff of the graph that was made last."""
    import popxl

    return lambda ir: popxl.transforms.autodiff(ir.graphs[last])  # type: ignore[attr-defined]


SHAPES = {"nested": nested, "flat": flat, "calls": calls, "modules": modules}


def measured(shape: str, size: int, rounds: int) -> Figures:
    """Seconds of each part, the fastest of some rounds; and how many ops all graphs of the program
    have.
    """
    import popxl

    best = dict.fromkeys(PARTS, float("inf"))
    ops = 0
    for _ in range(rounds):
        build, differentiate = SHAPES[shape](size)
        gc.collect()
        times = [time.process_time()]
        program = build()
        times.append(time.process_time())
        differentiate(program)
        times.append(time.process_time())
        ir = build()
        ops = sum(len(graph.ops) for graph in ir.graphs)  # type: ignore[attr-defined]
        begin = time.process_time()
        popxl.Session(ir, "cpu")  # type: ignore[arg-type]
        seconds = (times[1] - times[0], times[2] - times[1], time.process_time() - begin)
        best = {part: min(best[part], second) for part, second in zip(PARTS, seconds)}
    return {"size": size, "ops": ops, **best}


def steepness(figures: Sequence[Figures], part: str) -> float:
    """How much dearer an op of the largest program is than one of the second largest, in one
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
        linear = [part for part in PARTS if growth[shape][part] <= STEEPEST]
        print(f"linear: {', '.join(linear) or 'nothing'}", end="\n\n")

    per_call = max(1e6 * of["session"] / of["size"] for of in found["calls"])
    bars = {"session, µs per call": per_call}
    met = all(bars[name] <= bar for name, bar in BARS.items())
    linear_all = all(value <= STEEPEST for parts in growth.values() for value in parts.values())
    print(
        f"session: {per_call:.0f} µs per call, bar {BARS['session, µs per call']:.0f}: "
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

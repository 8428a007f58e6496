"""Small differentiable programs, each built twice from one list of numbers: with popxl's ops, and
with torch.

Values have the shapes of `SHAPES`, which broadcast against each other. A program is a list of
steps; a step is (kind, i, j). Steps of kinds "call", "conditional" and "repeat" run one of the
program's functions, which are lists of steps themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import popxl
import torch
from helpers.interpreted import run_graph
from popxl import ops
from popxl.transforms.autodiff import ExpectedConnectionType, GradGraphInfo

SHAPES = ((2, 3), (3,), (1, 3), ())
PLAIN = (
    "add",
    "sub",
    "mul",
    "square",
    "tanh",
    "detach",
    "constant",
    "total",
    "rows",
    "mix",
    "turn",
    "stack",
)
CALLS = ("call", "conditional", "repeat")

Step = tuple[str, int, int]
Steps = Sequence[Step]


@dataclass(frozen=True)
class Program:
    """The main list of steps, and the functions it may call. A function may call those after it."""

    steps: Steps
    functions: Sequence[Steps] = ()


class Popxl:
    """The steps as popxl ops; functions are graphs."""

    def __init__(self, ir: popxl.Ir):
        self.ir = ir
        self.graphs: dict[int, popxl.Graph] = {}

    tanh, detach, mul, add, sub = (
        staticmethod(f) for f in (ops.tanh, ops.detach, ops.mul, ops.add, ops.sub)
    )

    def total(self, t: Any) -> Any:
        return ops.sum(t)

    def reshape(self, t: Any, shape: Any) -> Any:
        return ops.reshape(t, shape)

    def turned(self, t: Any) -> Any:
        return ops.transpose(t)

    def matmul(self, a: Any, b: Any) -> Any:
        return ops.matmul(a, b)

    def halves(self, t: Any) -> Any:
        return ops.split(t, 2, axis=0)

    def stack(self, a: Any, b: Any) -> Any:
        return ops.concat([a, b], axis=0)

    def constant(self, value: float) -> Any:
        return popxl.constant(value, popxl.float64)

    def graph(self, program: Program, number: int) -> popxl.Graph:
        if number not in self.graphs:
            self.graphs[number] = self.ir.create_graph(
                lambda x, w: function(self, program, number, x, w), spec((2, 3)), spec((3,))
            )
        return self.graphs[number]

    def call(self, program: Program, number: int, x: Any, w: Any) -> Any:
        x, w, *_ = ops.call(self.graph(program, number), x, w)
        return x, w

    def conditional(self, program: Program, flag: Any, number: int, x: Any, w: Any) -> Any:
        other = self.ir.create_graph(lambda x, w: (ops.mul(x, w), w), spec((2, 3)), spec((3,)))
        return ops.conditional(flag, self.graph(program, number), other, [x, w], [x, w])

    def repeat(self, program: Program, number: int, count: int, x: Any, w: Any) -> Any:
        return ops.repeat(self.graph(program, number), count, x, w)


class Torch:
    """The same steps in torch; functions are functions."""

    tanh, mul, add, sub, matmul, reshape = (
        staticmethod(f)
        for f in (torch.tanh, torch.mul, torch.add, torch.sub, torch.matmul, torch.reshape)
    )

    def detach(self, t: Any) -> Any:
        return t.detach()

    def total(self, t: Any) -> Any:
        return t.sum()

    def turned(self, t: Any) -> Any:
        return t.T

    def halves(self, t: Any) -> Any:
        return t.split(1, dim=0)

    def stack(self, a: Any, b: Any) -> Any:
        return torch.cat([a, b])

    def constant(self, value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64)

    def call(self, program: Program, number: int, x: Any, w: Any) -> Any:
        return function(self, program, number, x, w)

    def conditional(self, program: Program, flag: Any, number: int, x: Any, w: Any) -> Any:
        return function(self, program, number, x, w) if flag else (x * w, w.clone())

    def repeat(self, program: Program, number: int, count: int, x: Any, w: Any) -> Any:
        for _ in range(count):
            x, w = function(self, program, number, x, w)
        return x.clone(), w.clone()


def spec(shape: Sequence[int]) -> popxl.TensorSpec:
    return popxl.TensorSpec(shape, popxl.float64)


def function(backend: Any, program: Program, number: int, x: Any, w: Any) -> tuple[Any, Any]:
    """Run one function: (2, 3) and (3,) in, (2, 3) and (3,) out, of moderate size."""
    flag = None
    pool = run(
        backend,
        Program(program.functions[number], program.functions),
        [x, w],
        flag,
        first=number + 1,
    )
    last = {tuple(t.shape): t for t in pool}
    return backend.tanh(last[2, 3]), backend.tanh(last[3,])


def run(
    backend: Any, program: Program, inputs: Sequence[Any], flag: Any, first: int = 0
) -> list[Any]:
    """Run steps on a growing pool of values; returns the pool. ``first`` is the first function that
    may be called.
    """
    pool = list(inputs)

    def pick(i: int, shape: Any = None) -> Any:
        fitting = [t for t in pool if shape is None or tuple(t.shape) == shape]
        return fitting[-1 - i % len(fitting)]

    for kind, i, j in program.steps:
        a = pick(i)
        if kind in ("add", "sub", "mul"):
            pool.append(getattr(backend, kind)(a, pick(j)))
        elif kind == "square":
            pool.append(backend.mul(a, a))
        elif kind in ("tanh", "detach", "total"):
            pool.append(getattr(backend, kind)(a))
        elif kind == "constant":
            pool.append(backend.mul(a, backend.constant(0.5 + i % 3)))
        elif kind == "rows":
            pool.extend(backend.halves(pick(i, (2, 3))))
        elif kind == "mix":
            x = pick(j, (2, 3))
            pool.append(backend.matmul(backend.matmul(pick(i, (2, 3)), backend.turned(x)), x))
        elif kind == "turn":
            pool.append(backend.turned(backend.reshape(pick(i, (2, 3)), (3, 2))))
        elif kind == "stack":
            w = backend.reshape(pick(i, (3,)), (1, 3))
            pool.append(backend.stack(w, backend.reshape(pick(j, (3,)), (1, 3))))
        elif len(program.functions) > first:
            number = first + i % (len(program.functions) - first)
            x, w = pick(i, (2, 3)), pick(j, (3,))
            if kind == "call":
                pool.extend(backend.call(program, number, x, w))
            elif kind == "repeat":
                pool.extend(backend.repeat(program, number, j % 4, x, w))
            elif flag is not None:
                pool.extend(backend.conditional(program, flag, number, x, w))
    return pool


def sample_inputs(seed: int = 0) -> list[torch.Tensor]:
    """A (2, 3) and a (3,) tensor of float64 between -1 and 1."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.uniform(-1, 1, shape)) for shape in SHAPES[:2]]


def gradients(
    ir: popxl.Ir,
    graph: popxl.Graph,
    info: GradGraphInfo,
    values: Sequence[torch.Tensor],
    provided: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Run a graph and its gradient graph as a program does: connected by ``inputs_dict`` in a graph
    that calls both.
    """
    count = len(graph.inputs)

    def caller(*tensors: popxl.Tensor) -> Any:
        forward = ops.call_with_info(graph, *tensors[:count])
        return ops.call(info.graph, *tensors[count:], inputs_dict=info.inputs_dict(forward))

    grads = [
        c.fwd_tensor.spec
        for c in info.expected_inputs
        if c.connection_type is ExpectedConnectionType.FwdGrad
    ]
    with ir.main_graph:
        outer = ir.create_graph(caller, *[t.spec for t in graph.inputs], *grads)
    return run_graph(outer, [*values, *provided])

"""Samples of calls of graphs: `call`, `repeat` and `conditional`."""

import numpy as np
import popxl
from popxl import ops
from popxl.errors import GraphError

from .sample import Operand, Refusal, Sample


def graph_of(fn, *tensors):
    """A graph of a function for operands of these specs."""
    return popxl.get_ir().create_graph(fn, *(t.spec for t in tensors))


def square_and_add(t, u):
    return ops.add(ops.mul(t, t), u)


def scaled(t, factor):
    return ops.mul(ops.tanh(t), factor), factor


def call_once(a, b):
    return ops.call(graph_of(square_and_add, a, b), a, b)


def call_twice(a, b):
    graph = graph_of(square_and_add, a, b)
    (inner,) = ops.call(graph, a, b)
    return ops.call(graph, inner, a)


def repeat(count):
    def build(t, factor):
        return ops.repeat(graph_of(scaled, t, factor), count, t, factor)

    return build


def repeated(count):
    def oracle(t, factor):
        for _ in range(count):
            t = np.tanh(t) * factor
        return [t, factor]

    return oracle


def choose(condition, t):
    then_branch, else_branch = (
        graph_of(lambda t: ops.exp(t), t),
        graph_of(lambda t: ops.negate(t), t),
    )
    return ops.conditional(condition, then_branch, else_branch, then_inputs=[t], else_inputs=[t])


def mismatched_branches(condition, t):
    then_branch, else_branch = graph_of(lambda t: t + t, t), graph_of(lambda t: (t, t + t), t)
    return ops.conditional(condition, then_branch, else_branch, then_inputs=[t], else_inputs=[t])


FACTOR = Operand((4,), low=0.5, high=1.5)

SAMPLES = [
    Sample("call", operands=((3, 4), (4,)), build=call_once, oracle=lambda a, b: a * a + b),
    Sample(
        "call",
        operands=((3, 4), (3, 4)),
        build=call_twice,
        oracle=lambda a, b: (a * a + b) ** 2 + a,
    ),
    *(
        Sample("repeat", operands=((4,), FACTOR), build=repeat(n), oracle=repeated(n))
        for n in (0, 1, 3)
    ),
    *(
        Sample(
            "conditional",
            operands=(np.array(taken), (3,)),
            build=choose,
            oracle=lambda c, t: np.exp(t) if c else -t,
        )
        for taken in (True, False)
    ),
]

REFUSALS = [
    Refusal(
        "call",
        operands=((3,), (4,)),
        build=lambda a, b: ops.call(graph_of(square_and_add, a, a), a, b),
        error=GraphError,
        says="expected the same shape and dtype",
    ),
    Refusal(
        "call",
        operands=((3,),),
        build=lambda a: ops.call(graph_of(square_and_add, a, a), a),
        error=ValueError,
        says="input",
    ),
    Refusal("repeat", operands=((4,), (4,)), build=repeat(-1), error=ValueError, says="-1"),
    Refusal(
        "conditional",
        operands=(np.array(True), (3,)),
        build=mismatched_branches,
        error=ValueError,
        says="outputs",
    ),
]

"""One op of a graph, and what is known about it. `opdef` declares ops and adds them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from popxl.op_definition import (
    EFFECTS,
    OPS,
    Cost,
    OpDefinition,
    as_specs,
    call_arguments,
)
from popxl.program import Op, Tensor, flatten, place_of

__all__ = [
    "EFFECTS",
    "OPS",
    "Cost",
    "Op",
    "OpDefinition",
    "as_specs",
    "call_arguments",
    "flatten",
    "map_tensors",
    "op_cost",
    "place_of",
    "plain",
]

PLAIN = frozenset({bool, int, float, str, type(None)})
PLAIN_FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.bool_, bool),
    ((int, np.integer), int),
    ((float, np.floating), float),
    (str, str.__str__),  # of a member of an Enum, str() is its name
)
"""What numpy's scalars and subclasses of Python's types become."""


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in it (also inside lists and tuples) replaced by
    ``fn(tensor)``.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return tuple(map_tensors(v, fn) for v in value)
    return value


def plain(value: Any) -> Any:
    """``value`` with numpy's scalars, members of enumerations and the like, also inside lists and
    tuples, as Python's own numbers and strings: rules, kernels and generated source know no others.
    """
    kind = type(value)
    if kind in PLAIN or isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if isinstance(value, np.ndarray):
        return plain(value[()]) if value.ndim == 0 else value
    return next((make(value) for of, make in PLAIN_FORMS if isinstance(value, of)), value)


def op_cost(op: Op) -> Cost:
    """The op's cost, with bytes filled in: operands read plus results written, on one replica."""
    rule = op.definition.cost
    y: Any = op._outputs[0] if len(op._outputs) == 1 else tuple(op._outputs)
    args, kwargs = call_arguments(op.definition, op.arguments)
    cost = rule(y, *args, **kwargs) if rule else Cost()
    if cost.bytes is not None:
        return cost
    moved = sum(t.nelms * t.dtype.itemsize for t in (*op.inputs, *op._outputs))
    return Cost(cost.flops, moved, cost.parts)

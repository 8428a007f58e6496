"""One op of a graph, and what is known about it. `opdef` declares ops and adds them."""

from collections.abc import Callable
from typing import Any

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
]


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor in it (also inside lists and tuples) replaced by
    ``fn(tensor)``.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return tuple(map_tensors(v, fn) for v in value)
    return value


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

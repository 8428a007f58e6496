"""How a gradient passes back through one op: by the rule that the op declares, or, for calls, by
gradient graphs.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Protocol

from popxl import ops
from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.op_records import place_of
from popxl.opdef import Op, OpDefinition, call_arguments, map_tensors, result_form
from popxl.tensor import Tensor
from popxl.transforms.grad_info import GradGraphInfo

GradientPairs = Iterable[tuple[Tensor, Tensor | None]]
"""(forward operand, its gradient through this op in the gradient graph)."""


class GradientContext(Protocol):
    """What a rule may ask of the gradient graph that is being built, which is the current graph."""

    active: set[Tensor]
    """Forward tensors whose gradients are of interest."""

    def value(self, t: Tensor) -> Tensor:
        """A forward tensor's value in the gradient graph."""

    def gradient(self, t: Tensor) -> Tensor | None:
        """The gradient of one of the op's results; None if none reaches it."""

    def gradient_or_zeros(self, t: Tensor) -> Tensor:
        """The same as `gradient`, zeros where none reaches it."""

    def zeros(self, t: Tensor) -> Tensor:
        """Zeros of the tensor's spec."""

    def has_transfers(self, graph: Graph) -> bool:
        """Whether a forward graph, or one that it calls, loads or stores."""

    def called_info(self, graph: Graph) -> GradGraphInfo:
        """The gradient of a called graph."""

    def block(self, tensors: Iterable[Tensor], reason: str) -> None:
        """Note that the gradients of these forward tensors cannot be produced."""

    def why_missing(self, t: Tensor) -> str:
        """Why a called graph's gradient graph lacks the gradient of its tensor ``t``."""


def added(sum_: Tensor, gradient: Tensor) -> Tensor:
    """The sum of two gradients of one tensor, where the first is: uses on several devices give one
    on each.
    """
    here, there = place_of(sum_), place_of(gradient)
    if here.ipu is not None and there.ipu is not None and here.ipu != there.ipu:
        gradient = ops.ipu_copy(gradient, here.ipu, there.ipu)
    if here.tile_set and there.tile_set and here.tile_set != there.tile_set:
        gradient = ops.io_tile_copy(gradient)
    result: Tensor = ops.add(sum_, gradient)
    return result


GradientRule = Callable[[GradientContext, Op], GradientPairs]


def rule_for(op: Op) -> GradientRule | str:
    """The op's gradient rule; where there is none, the second half of an error message that says
    so.
    """
    definition = op.definition
    declared = definition.base if definition.alias and definition.base else definition
    if declared.vjp is not None:
        return declared_rule
    absent = "has none yet" if declared.differentiable else "is declared not differentiable"
    return (
        f"expected a gradient rule for every op on the way, but op '{declared.name}' {absent} "
        f"({op!r}, built at {op.where}). Declare {declared.name}.vjp in {declared.file}, or "
        "detach its operand."
    )


def declared_rule(context: GradientContext, op: Op) -> GradientPairs:
    """Apply the rule that the op declares."""
    definition = op.definition
    form = result_form(definition)
    arguments = {
        name: map_tensors(argument, context.value) for name, argument in op.arguments.items()
    }
    args, kwargs = call_arguments(definition, arguments)
    y = form([context.value(t) for t in op.outputs])
    has_gradient = [
        (t.dtype.is_floating_point or t in context.active)
        and not (definition.residuals and t is not op.outputs[-1])
        for t in op.outputs
    ]
    dys: list[Any] = [
        context.gradient_or_zeros(t) if has else None for t, has in zip(op.outputs, has_gradient)
    ]
    assert definition.vjp is not None
    result = definition.vjp(form(dys), y, *args, **kwargs)
    entries = (result,) if result is None or isinstance(result, Tensor) else tuple(result)
    parameters = tensor_parameters(definition)
    if len(entries) != len(parameters):
        raise GraphError(
            f"autodiff: got {len(entries)} gradients from the rule of op '{definition.name}' "
            f"({definition.file}); expected one, or None, for each of {', '.join(parameters)}."
        )
    for parameter, entry in zip(parameters, entries):
        yield from _pairs(op.arguments[parameter], entry)


@cache
def tensor_parameters(definition: OpDefinition) -> tuple[str, ...]:
    """Parameters that may hold tensors, going by their annotations: the rule returns one entry for
    each.
    """
    return tuple(
        n
        for n, p in definition.signature.parameters.items()
        if re.search(r"\bTensor\b", str(p.annotation))
    )


def _pairs(operand: Any, entry: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    if entry is None:
        return
    if isinstance(operand, Tensor):
        yield operand, entry
    else:
        for inner, inner_entry in zip(operand, entry):
            yield from _pairs(inner, inner_entry)

"""Ops whose gradient differs from PopXL's: the same op, and with it the same kernel and cost, under
another rule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from popxl import Tensor
from popxl.opdef import OpFunction, emit

Rule = Callable[[Tensor], Tensor]


def with_gradient(op: OpFunction[..., Tensor], arguments: dict[str, Any], rule: Rule) -> Tensor:
    """Add a one-result op of one tensor to the current graph, with the gradient ``rule(dy) ->
    dx``.
    """

    def vjp(dy: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rule(dy)

    definition = dataclasses.replace(op.definition, vjp=vjp, differentiable=True)
    return emit(definition, arguments).outputs[0]

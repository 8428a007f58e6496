"""Ops whose gradient differs from PopXL's: the same op, and with it the same kernel and cost, under
another rule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from popxl import Tensor
from popxl.opdef import OpFunction, emit

Rule = Callable[..., Tensor | tuple[Tensor | None, ...]]


def with_gradient(op: OpFunction[..., Tensor], arguments: dict[str, Any], rule: Rule) -> Tensor:
    """Add a one-result op to the current graph, with the gradient ``rule(dy, y, *arguments)``: one
    for each tensor, or None where it has none.
    """
    definition = dataclasses.replace(op.definition, vjp=rule, differentiable=True)
    return emit(definition, arguments).outputs[0]

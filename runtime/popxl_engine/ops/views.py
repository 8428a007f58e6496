"""Copies between a view that memory cannot give and what it views, which keep both equal."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from popxl.op_records import Cost, OpDefinition, call_arguments
from popxl.tensor import TensorSpec

from popxl_engine.ir import Value, filled, values_in
from popxl_engine.ops.definition import check, fused_op


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """An op that only moves elements, with its arguments."""

    definition: OpDefinition
    arguments: Mapping[str, Any]

    def __call__(self, rule: Any, operands: Sequence[Any]) -> Any:
        """The op's kernel, or its rule for the host, on these in place of its operands."""
        following = iter(operands)
        args, kwargs = self._call_arguments(lambda v: next(following))
        return rule(*args, **kwargs)

    @cached_property
    def with_shapes(self) -> tuple[list[Any], dict[str, Any]]:
        """What the op is called with, shapes in place of operands."""
        return self._call_arguments(lambda v: v.spec.shape)

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its operands."""
        return tuple(v.spec.shape for v in values_in(self.arguments.values()))

    def _call_arguments(self, of: Callable[[Value], Any]) -> tuple[list[Any], dict[str, Any]]:
        return call_arguments(
            self.definition, {name: filled(a, of) for name, a in self.arguments.items()}
        )


def moving_cost(y: TensorSpec, *_: Any, **__: Any) -> Cost:
    """No arithmetic."""
    return Cost()


@fused_op(
    cost=moving_cost,
    writes=("t",),
    host=lambda t, parts, view: view(view.definition.host, parts),
)
def refresh_view_(t: TensorSpec, parts: tuple[TensorSpec, ...], view: Rearrangement) -> TensorSpec:
    """Copy the elements that a view shows to it.

    Shapes: t [...], each of parts as in the view -> t.
    """
    fits = tuple(part.shape for part in parts) == view.shapes
    fits = fits and all(part.dtype is t.dtype for part in parts)
    check(fits, "refresh_view_", "the parts of the view, of its dtype", t=t, parts=parts)
    return t


def _write_back_on_host(t: np.ndarray, y: np.ndarray, view: Rearrangement, index: int) -> Any:
    """The place that each element comes from is seen in a view of the elements' numbers."""
    ends = np.cumsum([math.prod(shape) for shape in view.shapes])
    numbers = np.split(np.arange(ends[-1]), ends[:-1])
    shown = view(view.definition.host, [n.reshape(s) for n, s in zip(numbers, view.shapes)])
    result, of_part = np.array(t, order="C"), shown - numbers[index][0]
    is_here = (of_part >= 0) & (of_part < result.size)
    result.reshape(-1)[of_part[is_here]] = np.asarray(y)[is_here]
    return result


@fused_op(cost=moving_cost, writes=("t",), host=_write_back_on_host)
def write_back_(t: TensorSpec, y: TensorSpec, view: Rearrangement, index: int) -> TensorSpec:
    """Copy the elements of a view to the part of this index.

    Shapes: t [...], as the part in the view, y as the view -> t.
    """
    fits = t.shape == view.shapes[index] and t.dtype is y.dtype
    check(fits, "write_back_", f"part {index} of the view, of its dtype", t=t, y=y)
    return t

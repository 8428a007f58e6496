"""Ops that combine what shares an index, and gathers and scatters that go group by group."""

from typing import Any, Literal

from popxl import dtypes
from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.arithmetic import div
from popxl.ops.broadcasting import broadcast_to, positions_along
from popxl.ops.casting import cast
from popxl.ops.checks import (
    check_indices,
    check_numeric,
    check_real,
    check_same_dtype,
    normalise_axis,
)
from popxl.ops.comparison import equal, greater
from popxl.ops.indexing import gather, gather_cost, gather_grad_cost, scalar, take_along_axis, where
from popxl.ops.shape import reshape
from popxl.tensor import Tensor, TensorSpec

ScatterReductionType = Literal["sum", "max", "min", "none"]
REDUCTIONS = ("sum", "max", "min", "none")

Gradients = tuple[Tensor, None, Tensor | None]


# Scatter with a reduction


@op(name="scatter_reduce")
def _scatter_reduce(
    data: Tensor,
    indices: Tensor,
    initial_values: Tensor | None,
    reduction: ScatterReductionType,
    axis: int,
    axis_size: int,
) -> TensorSpec:
    """Combine elements that share an index; `scatter_reduce` documents it. Indices broadcast to
    data's shape.
    """
    (check_real if reduction in ("max", "min") else check_numeric)("scatter_reduce", data=data)
    check_indices("scatter_reduce", "indices", indices)
    return TensorSpec((*data.shape[:axis], axis_size, *data.shape[axis + 1 :]), data.dtype)


@_scatter_reduce.vjp
def scatter_reduce_vjp(
    dy: Tensor,
    y: Tensor,
    data: Tensor,
    indices: Tensor,
    initial_values: Tensor | None,
    reduction: str,
    *at: int,
) -> Gradients:
    """Each slot's gradient goes to what made its value; largest (smallest) ones that are equal
    share it evenly.
    """
    every = broadcast_to(indices, data.shape) if indices.shape != data.shape else indices
    zero = scalar(0, dy.dtype)

    def of_slots(t: Tensor) -> Tensor:
        """What is in the slot of ``t`` for each element of data."""
        return take_along_axis(t, every, at[0])

    if reduction == "sum":
        return of_slots(dy), None, None if initial_values is None else dy
    if reduction == "none":
        places = positions_along(data.shape, at[0])
        nobody = broadcast_to(scalar(-1, dtypes.int32), y.shape)
        last = _scatter_reduce(places, every, nobody, "max", *at)
        kept = where(equal(of_slots(last), places), of_slots(dy), zero)
        return (
            kept,
            None,
            None if initial_values is None else where(greater(last, nobody), zero, dy),
        )
    chosen = equal(data, of_slots(y))
    first = None if initial_values is None else equal(initial_values, y)
    count = _scatter_reduce(
        cast(chosen, dy.dtype), every, None if first is None else cast(first, dy.dtype), "sum", *at
    )
    share = div(dy, where(count, count, scalar(1, dy.dtype)))
    given = where(chosen, of_slots(share), zero)
    return given, None, None if first is None else where(first, share, zero)


@_scatter_reduce.cost
def scatter_reduce_cost(
    y: Tensor,
    data: Tensor,
    indices: Tensor,
    initial_values: Tensor | None,
    reduction: str,
    *at: int,
) -> Cost:
    """One operation per element of data, or none where elements only move."""
    return Cost(flops=0 if reduction == "none" else data.nelms)


def scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    enable_index_broadcast: int = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Combine what shares an index: slot k along an axis is the reduction of all data whose index
    is k.

    Shapes: data [a.., n, b..], numbers; indices, integers in [0, size): [n] for slices, or data's
        shape for elements; initial_values [a.., size, b..] -> [a.., size, b..], data's dtype.
    Args:
        reduction: "sum", "max", "min", or "none": the last one along the axis stays. 16-bit types
            add in float32.
        initial_values: takes part in every slot's reduction; under "none" it stays where no index
            says k. Without it slots that no index names are 0.
        axis: the axis of data that the indices are for.
        axis_size: size; default: that of initial_values.
        enable_index_broadcast: also take indices of data's rank that broadcast to its shape.
        available_memory_proportion: without effect here.
    Raises:
        ValueError: neither initial_values nor axis_size, or another reduction.
        ShapeError: indices or initial values that do not fit data, or an axis that it lacks.
        DTypeError: initial values of another dtype; from sessions, indices that are no integers, or
            data that the reduction does not take.
        IndexError: from runs, for an index outside [0, size).
    """
    return _reduced(
        "scatter_reduce",
        data,
        indices,
        reduction,
        initial_values,
        axis,
        axis_size,
        1,
        enable_index_broadcast,
    )


def grouped_scatter_reduce(
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None = None,
    axis: int = 0,
    axis_size: int | None = None,
    group_size: int = 1,
    enable_index_broadcast: bool = True,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """`scatter_reduce` in each group by itself: for several groups, axis 0 of all tensors counts
    the groups.

    Shapes: data [group_size, a.., n, b..]; indices [group_size, n] for slices, or data's shape for
        elements; initial_values [group_size, a.., size, b..] -> [group_size, a.., size, b..],
        data's dtype.
    Args:
        axis: the axis of data, its groups counted in, that the indices are for.
        group_size: number of groups; 1: there is no axis for them.
    Raises: as `scatter_reduce`, and:
        ShapeError: data or indices whose first axis is not the groups', or the groups' axis as
            axis.
    """
    return _reduced(
        "grouped_scatter_reduce",
        data,
        indices,
        reduction,
        initial_values,
        axis,
        axis_size,
        group_size,
        enable_index_broadcast,
    )


def _reduced(
    name: str,
    data: Tensor,
    indices: Tensor,
    reduction: ScatterReductionType,
    initial_values: Tensor | None,
    axis: int,
    axis_size: int | None,
    group_size: int,
    broadcast: int,
) -> Tensor:
    """Check the arguments of either public form and add the op."""
    for parameter, t in (("data", data), ("indices", indices)):
        _check_tensor(name, parameter, t)
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{name}: got reduction {reduction!r}; expected one of "
            f"{', '.join(map(repr, REDUCTIONS))}."
        )
    axis = normalise_axis(name, data, axis)
    _check_groups(name, "data", data, indices, axis, group_size)
    size = _size(name, data, initial_values, axis, axis_size)
    every = _per_element(name, data, indices, axis, int(group_size) > 1, bool(broadcast))
    return _scatter_reduce(data, every, initial_values, reduction, axis, size)


def _check_tensor(name: str, parameter: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(
            f"{name}: got {parameter} = {type(t).__name__}; expected a popxl.Tensor. Make a "
            "constant with popxl.constant(...) first."
        )


def _check_groups(
    name: str, parameter: str, t: Tensor, indices: Tensor, axis: int, group_size: int
) -> None:
    """ShapeError unless there is one group, or both tensors have the groups as their first axis."""
    if group_size == 1:
        return
    if (
        group_size < 1
        or t.shape[:1] != (group_size,)
        or indices.shape[:1] != (group_size,)
        or axis == 0
    ):
        raise ShapeError(
            f"{name}: got {parameter} {t.spec}, indices {indices.spec}, axis {axis} and "
            f"group_size {group_size}; expected a group_size of at least 1, the groups as first "
            f"axis of {parameter} and indices, and another axis than theirs. Axes are counted "
            "with the groups'."
        )


def _size(
    name: str, data: Tensor, initial_values: Tensor | None, axis: int, axis_size: int | None
) -> int:
    """Slots along the axis."""
    if initial_values is None:
        if axis_size is None:
            raise ValueError(
                f"{name}: got neither initial_values nor axis_size; expected one of them, which "
                "decides the result's shape."
            )
        if axis_size < 1:
            raise ShapeError(f"{name}: got axis_size {axis_size}; expected at least 1.")
        return int(axis_size)
    _check_tensor(name, "initial_values", initial_values)
    check_same_dtype(name, data=data, initial_values=initial_values)
    size = initial_values.shape[axis] if initial_values.rank == data.rank else None
    wanted = None if size is None else (*data.shape[:axis], size, *data.shape[axis + 1 :])
    if initial_values.shape != wanted or axis_size not in (None, size):
        raise ShapeError(
            f"{name}: got initial_values {initial_values.spec} and axis_size {axis_size} for data "
            f"{data.spec}; expected data's shape but for axis {axis}, where it is axis_size if "
            "that is given."
        )
    assert size is not None
    return size


def _per_element(
    name: str, data: Tensor, indices: Tensor, axis: int, grouped: bool, broadcast: bool
) -> Tensor:
    """The indices with data's rank, on every axis of data's size or 1."""
    per_slice = (*data.shape[:grouped], data.shape[axis])
    if indices.shape == per_slice and indices.shape != data.shape:
        shape = [n if a == axis or (grouped and a == 0) else 1 for a, n in enumerate(data.shape)]
        return reshape(indices, tuple(shape))
    ones = {1} if broadcast else set()
    if indices.rank != data.rank or any(
        i not in {n, *ones} for i, n in zip(indices.shape, data.shape)
    ):
        raise ShapeError(
            f"{name}: got indices {indices.spec} for data {data.spec} on axis {axis}; expected "
            f"shape {list(per_slice)}, one for each slice, or {list(data.shape)}, one for each "
            f"element{', with 1 where they repeat' if broadcast else ''}."
        )
    return indices


# Gather by groups


@op(name="groupedgather")
def _groupedgather(t: Tensor, indices: Tensor, axis: int, zero_OOR: bool) -> TensorSpec:
    """Gather in each group by itself; `groupedgather` documents it."""
    check_indices("groupedgather", "indices", indices)
    return TensorSpec((*t.shape[:axis], *indices.shape[1:], *t.shape[axis + 1 :]), t.dtype)


@op
def groupedgather_grad(
    dy: Tensor, indices: Tensor, shape: tuple[int, ...], axis: int, zero_OOR: bool
) -> TensorSpec:
    """`gather_grad` in each group by itself: groupedgather's gradient. Not in PopXL's API."""
    return TensorSpec(shape, dy.dtype)


@_groupedgather.vjp
def groupedgather_vjp(
    dy: Tensor, y: Tensor, t: Tensor, indices: Tensor, axis: int, zero_OOR: bool
) -> tuple[Tensor, None]:
    """Add the gradient's slices where they came from."""
    return groupedgather_grad(dy, indices, t.shape, axis, zero_OOR), None


@groupedgather_grad.vjp
def groupedgather_grad_vjp(
    d: Tensor,
    y: Tensor,
    dy: Tensor,
    indices: Tensor,
    shape: tuple[int, ...],
    axis: int,
    zero_OOR: bool,
) -> tuple[Tensor, None]:
    """Gather."""
    return _groupedgather(d, indices, axis, zero_OOR), None


_groupedgather.cost(gather_cost)
groupedgather_grad.cost(gather_grad_cost)


def groupedgather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    group_size: int | None = 1,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """`gather` in each group by itself: for several groups, axis 0 of t and of the indices counts
    the groups.

    Shapes: t [group_size, a.., n, b..], any dtype; indices [group_size, i..], integers ->
        [group_size, a.., i.., b..], t's dtype.
    Args:
        axis: the axis of t, its groups counted in, to take slices of.
        group_size: number of groups; 1 or None: there is no axis for them.
        zero_OOR: as for `gather`.
    Raises: as `gather`, and:
        ShapeError: t or indices whose first axis is not the groups', or the groups' axis as axis.
    """
    if group_size in (1, None):
        return gather(t, indices, axis, available_memory_proportion, zero_OOR)
    for parameter, given in (("t", t), ("indices", indices)):
        _check_tensor("groupedgather", parameter, given)
    axis = normalise_axis("groupedgather", t, axis)
    _check_groups("groupedgather", "t", t, indices, axis, int(group_size or 1))
    return _groupedgather(t, indices, axis, zero_OOR)

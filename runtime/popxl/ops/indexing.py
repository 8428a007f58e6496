"""Ops that read or write elements at positions which are computed: gather, scatter, dynamic slices,
choices.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from popxl import dtypes
from popxl.errors import GraphError, ShapeError
from popxl.opdef import Cost, inplace, op
from popxl.ops.arithmetic import mul, sub
from popxl.ops.broadcasting import positions_along, sum_to
from popxl.ops.checks import (
    broadcast_shape,
    check_computes_in_one_dtype,
    check_indices,
    check_real,
    check_same_dtype,
    normalise_axis,
    refuse_to_execute,
)
from popxl.ops.comparison import equal
from popxl.ops.creation import zeros
from popxl.ops.shape import concat, moves_data, reshape
from popxl.tensor import Constant, Tensor, TensorSpec, make_constant

Proportion = float | None


def scalar(value: float, dtype: dtypes.dtype) -> Constant:
    """A constant of shape []."""
    return make_constant(np.full((), value, dtype.as_numpy()), dtype, None)


# Whole slices by index


def _gather_on_host(
    t: np.ndarray,
    indices: np.ndarray,
    axis: int,
    available_memory_proportion: Proportion,
    zero_OOR: bool,
) -> np.ndarray:
    indices, size = indices.astype(np.int64), t.shape[axis]
    axis %= t.ndim
    if not size:
        return np.zeros((*t.shape[:axis], *indices.shape, *t.shape[axis + 1 :]), t.dtype)
    taken = np.take(t, indices.clip(0, size - 1), axis)
    if not zero_OOR:
        return np.asarray(taken)
    is_inside = (indices >= 0) & (indices < size)
    mask = is_inside.reshape((1,) * axis + is_inside.shape + (1,) * (t.ndim - axis - 1))
    return np.where(mask, taken, np.zeros((), t.dtype))


@op(host=_gather_on_host)
def gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> TensorSpec:
    """Take slices of t along an axis, as numpy.take does.

    Shapes: t [a.., n, b..], any dtype; indices [i..], integers -> [a.., i.., b..], t's dtype.
    Args:
        available_memory_proportion: without effect here.
        zero_OOR: indices outside [0, n) give zeros and get no gradient. Without it PopXL leaves
            open what they give; here they stand for the nearest index inside, 0 or n - 1.
    Raises:
        ShapeError: for an axis that t lacks, or that has no slices.
        DTypeError: from sessions, for indices that are no integers.
    """
    check_indices("gather", "indices", indices)
    axis = normalise_axis("gather", t, axis)
    if not t.shape[axis] and indices.nelms and not zero_OOR:
        raise ShapeError(
            f"gather: got axis {axis} of t {t.spec}, which has no slices; expected one at least. "
            "Pass zero_OOR=True for zeros."
        )
    return TensorSpec((*t.shape[:axis], *indices.shape, *t.shape[axis + 1 :]), t.dtype)


@op
def gather_grad(
    dy: Tensor, indices: Tensor, shape: tuple[int, ...], axis: int, zero_OOR: bool
) -> TensorSpec:
    """Zeros of ``shape`` with dy's slices added at the indices along an axis: gather's gradient.
    Not in PopXL's API.

    Slices that share an index are added in the order of the indices; 16-bit types add in float32.
    """
    return TensorSpec(shape, dy.dtype)


@gather.vjp
def gather_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    indices: Tensor,
    axis: int,
    available_memory_proportion: Proportion,
    zero_OOR: bool,
) -> tuple[Tensor, None]:
    """Add the gradient's slices where they came from."""
    return gather_grad(dy, indices, t.shape, axis, zero_OOR), None


@gather_grad.vjp
def gather_grad_vjp(
    d: Tensor,
    y: Tensor,
    dy: Tensor,
    indices: Tensor,
    shape: tuple[int, ...],
    axis: int,
    zero_OOR: bool,
) -> tuple[Tensor, None]:
    """Gather."""
    return gather(d, indices, axis, None, zero_OOR), None


@gather.cost
def gather_cost(y: Tensor, t: Tensor, indices: Tensor, *attributes: Any) -> Cost:
    """Reads only the slices that are taken."""
    return Cost(bytes=2 * y.spec.nbytes + indices.spec.nbytes)


@gather_grad.cost
def gather_grad_cost(y: Tensor, dy: Tensor, *attributes: Any) -> Cost:
    """One addition per element of dy."""
    return Cost(flops=dy.nelms)


def tied_gather(
    t: Tensor,
    indices: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
    zero_OOR: bool = False,
) -> Tensor:
    """The same as `gather`; PopXL's variant keeps a matmul's layout for t, which makes no
    difference here.

    Shapes, arguments and errors: as for `gather`.
    """
    return gather(t, indices, axis, available_memory_proportion, zero_OOR)


# Elements by index


def _check_elementwise(
    name: str, t: Tensor, indices: Tensor, values_shape: tuple[int, ...], axis: int
) -> int:
    check_indices(name, "indices", indices)
    axis = normalise_axis(name, t, axis)
    fits = indices.rank == t.rank and all(
        i <= n for a, (i, n) in enumerate(zip(indices.shape, t.shape)) if a != axis
    )
    if not fits or values_shape != indices.shape:
        raise ShapeError(
            f"{name}: got t {t.spec}, indices {indices.spec} and values of shape "
            f"{list(values_shape)} on axis {axis}; expected indices and values of one shape, of "
            "t's rank and no longer than t except on that axis."
        )
    return axis


@op
def scatter(
    t: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int = 0,
    available_memory_proportion: float | None = None,
) -> TensorSpec:
    """A copy of t with values written along an axis, element by element, as torch.scatter does.

    ``result[.., indices[.., i, ..], ..] = values[.., i, ..]``. Where indices repeat, one of the
    values is kept, on CPUs the last, and it alone gets a gradient.

    Shapes: t [a], indices [b], integers, values [b], t's dtype -> [a].
    Raises:
        ShapeError: if indices and values differ in shape, or reach beyond t.
        IndexError: from runs, for an index below 0 or beyond the axis.
        DTypeError: from sessions, for indices that are no integers, or values of another dtype.
    """
    check_computes_in_one_dtype("scatter", t=t, values=values)
    _check_elementwise("scatter", t, indices, values.shape, axis)
    return t.spec


@scatter.vjp
def scatter_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    indices: Tensor,
    values: Tensor,
    axis: int,
    available_memory_proportion: Proportion,
) -> tuple[Tensor, None, Tensor]:
    """No gradient for what was overwritten, in t and among values that share a place."""
    positions = positions_along(indices.shape, axis)
    kept = scatter(zeros(TensorSpec(t.shape, dtypes.int32)), indices, positions, axis)
    is_kept = equal(take_along_axis(kept, indices, axis), positions)
    given = where(is_kept, take_along_axis(dy, indices, axis), scalar(0, dy.dtype))
    return scatter(dy, indices, zeros(values.spec), axis), None, given


@op
def take_along_axis(t: Tensor, indices: Tensor, axis: int) -> TensorSpec:
    """Elements of t along an axis, as numpy.take_along_axis: t [a], indices [b] -> [b]. Not in
    PopXL's API.
    """
    _check_elementwise("take_along_axis", t, indices, indices.shape, axis)
    return TensorSpec(indices.shape, t.dtype)


@take_along_axis.vjp
def take_along_axis_vjp(
    dy: Tensor, y: Tensor, t: Tensor, indices: Tensor, axis: int
) -> tuple[Tensor, None]:
    """Add the gradient where the elements came from."""
    return add_along_axis(dy, indices, t.shape, axis), None


@op
def add_along_axis(dy: Tensor, indices: Tensor, shape: tuple[int, ...], axis: int) -> TensorSpec:
    """Zeros of ``shape`` with dy's elements added along an axis: take_along_axis's gradient. Not in
    PopXL's API.
    """
    return TensorSpec(shape, dy.dtype)


@add_along_axis.vjp
def add_along_axis_vjp(
    d: Tensor, y: Tensor, dy: Tensor, indices: Tensor, shape: tuple[int, ...], axis: int
) -> tuple[Tensor, None]:
    """Take the elements."""
    return take_along_axis(d, indices, axis), None


scatter.cost(moves_data)
take_along_axis.cost(moves_data)
add_along_axis.cost(gather_grad_cost)


@op
def topk(
    t: Tensor,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    available_memory_proportion: float | None = None,
) -> tuple[TensorSpec, TensorSpec]:
    """The k largest (or smallest) values along an axis, and their int32 positions.

    Shapes: t [a.., n, b..], real numbers -> two of [a.., k, b..]: t's dtype, and int32.
    Args:
        sorted: whether they come in order, the extreme one first; otherwise in any order.
    Raises:
        ShapeError: for an axis that t lacks, or k outside 1 .. n.
        DTypeError: from sessions, if t is not real numbers.
    """
    check_real("topk", t=t)
    axis = normalise_axis("topk", t, axis)
    if not 1 <= k <= t.shape[axis]:
        raise ShapeError(
            f"topk: got k {k} for axis {axis} of t {t.spec}; expected 1 <= k <= {t.shape[axis]}."
        )
    shape = (*t.shape[:axis], k, *t.shape[axis + 1 :])
    return TensorSpec(shape, t.dtype), TensorSpec(shape, dtypes.int32)


@topk.vjp
def topk_vjp(
    dy: tuple[Tensor, None],
    y: tuple[Tensor, Tensor],
    t: Tensor,
    k: int,
    axis: int,
    *attributes: Any,
) -> Tensor:
    """The values' gradient, where they came from."""
    return add_along_axis(dy[0], y[1], t.shape, axis)


@topk.cost
def topk_cost(y: Any, t: Tensor, *attributes: Any) -> Cost:
    """FLOPs, about one comparison per element."""
    return Cost(flops=t.nelms)


# Choices


@op(host=lambda condition, lhs, rhs: np.where(condition, lhs, rhs))
def where(condition: Tensor, lhs: Tensor, rhs: Tensor) -> TensorSpec:
    """lhs where the condition holds (is not zero), rhs elsewhere; all three broadcast.

    Shapes: condition [a], any dtype; lhs [b] and rhs [c] of one dtype -> [broadcast(a, b, c)], that
        dtype.
    Raises:
        DTypeError: if lhs and rhs differ in dtype.
        ShapeError: if the shapes do not broadcast.
    """
    check_same_dtype("where", lhs=lhs, rhs=rhs)
    shape = broadcast_shape("where", condition=condition, lhs=lhs, rhs=rhs)
    meta = next((t.meta_shape for t in (lhs, rhs) if t.meta_shape and t.shape == shape), ())
    return TensorSpec(shape, lhs.dtype, meta)


@where.vjp
def where_vjp(
    dy: Tensor, y: Tensor, condition: Tensor, lhs: Tensor, rhs: Tensor
) -> tuple[None, Tensor, Tensor]:
    """The gradient goes to the side that was taken."""
    zero = scalar(0, dy.dtype)
    return (
        None,
        sum_to(where(condition, dy, zero), lhs.shape),
        sum_to(where(condition, zero, dy), rhs.shape),
    )


@where.cost
def where_cost(y: Tensor, condition: Tensor, lhs: Tensor, rhs: Tensor) -> Cost:
    """One choice per element."""
    return Cost(flops=y.nelms)


@op(name="onehot")
def _onehot(t: Tensor, num_classes: int, values: Tensor, axis: int) -> TensorSpec:
    """One-hot along a new axis, of a length that is known; `onehot` documents it."""
    check_indices("onehot", "t", t)
    if values.shape != (2,):
        raise ShapeError(f"onehot: got values {values.spec}; expected a tensor of two: [off, on].")
    if not -t.rank - 1 <= axis <= t.rank or num_classes < 1:
        raise ShapeError(
            f"onehot: got axis {axis} and num_classes {num_classes} for t {t.spec}; expected "
            f"{-t.rank - 1} <= axis <= {t.rank} and at least one class."
        )
    axis %= t.rank + 1
    return TensorSpec((*t.shape[:axis], num_classes, *t.shape[axis:]), values.dtype)


@_onehot.vjp
def onehot_vjp(
    dy: Tensor, y: Tensor, t: Tensor, num_classes: int, values: Tensor, axis: int
) -> tuple[None, Tensor]:
    """``on`` gets the sum over the hot positions, ``off`` that over the others."""
    off_on = make_constant(np.array([0, 1], dy.dtype.as_numpy()), dy.dtype, None)
    hot = sum_to(mul(dy, _onehot(t, num_classes, off_on, axis)), (1,) * dy.rank)
    every = sum_to(dy, (1,) * dy.rank)
    return None, concat([reshape(sub(every, hot), (1,)), reshape(hot, (1,))], 0)


@_onehot.cost
def onehot_cost(y: Tensor, *arguments: Any) -> Cost:
    """One comparison per element."""
    return Cost(flops=y.nelms)


def onehot(t: Tensor, num_classes: Tensor, values: Tensor, axis: int) -> Tensor:
    """One-hot along a new axis: values[1] at position t, values[0] elsewhere; positions outside are
    nowhere hot.

    Shapes: t [a.., b..], integers; num_classes, a constant; values [2], any dtype -> [a.., classes,
        b..], values' dtype.
    Raises:
        ShapeError: for values of another shape, or an axis outside -rank - 1 .. rank.
        ValueError: if num_classes is not a constant: the result's shape depends on it.
        DTypeError: from sessions, if t is not integers.
    """
    if not isinstance(num_classes, Constant) or num_classes.nelms != 1:
        raise GraphError(
            f"onehot: got num_classes {num_classes!r}; expected a constant of one element: it "
            "decides the result's shape."
        )
    return _onehot(t, int(num_classes.host_value.reshape(-1)[0]), values, axis)


# Slices at a position that is computed


def _check_dynamic(
    name: str, t: Tensor, index: Tensor, axes: Iterable[int], sizes: Iterable[int]
) -> tuple[int, ...]:
    """The shape of the slice."""
    check_indices(name, "index", index)
    where_ = [normalise_axis(name, t, a) for a in axes]
    lengths = list(sizes)
    fits = len(set(where_)) == len(where_) == len(lengths) == index.nelms and index.rank <= 1
    if not fits or any(not 1 <= n <= t.shape[a] for a, n in zip(where_, lengths)):
        raise ShapeError(
            f"{name}: got index {index.spec}, axes {where_} and sizes {lengths} for t {t.spec}; "
            "expected one index, one axis and one size for each axis that is sliced, and sizes "
            "no longer than it."
        )
    shape = list(t.shape)
    for a, n in zip(where_, lengths):
        shape[a] = n
    return tuple(shape)


@op(views=("t",))
def dynamic_slice(
    t: Tensor, index: Tensor, axes: list[int], sizes: list[int], no_overlap: bool
) -> TensorSpec:
    """The slice of ``sizes`` along ``axes`` that starts at a position read when the program runs;
    other axes are whole.

    Shapes: t [a]; index [axes], integers -> sizes on those axes, t's dtype.
    Args:
        no_overlap: a hint, without effect here.
    Raises:
        ShapeError: if index, axes and sizes differ in number, or a size is longer than its axis.
        DTypeError: from sessions, if index is not integers.
    """
    return TensorSpec(_check_dynamic("dynamic_slice", t, index, axes, sizes), t.dtype)


@op
def dynamic_update(
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Iterable[int],
    sizes: Iterable[int],
    no_overlap: bool,
) -> TensorSpec:
    """A copy of t in which the slice that `dynamic_slice` would read is replaced by t_update.

    Shapes: t [a]; index [axes], integers; t_update: sizes on those axes, t's dtype -> [a].
    Raises:
        ShapeError: as `dynamic_slice`; from sessions, if t_update has another shape than the slice.
        DTypeError: from sessions, if t_update has another dtype.
    """
    check_computes_in_one_dtype("dynamic_update", t=t, t_update=t_update)
    shape = _check_dynamic("dynamic_update", t, index, axes, sizes)
    if t_update.shape != shape:
        error = (
            f"dynamic_update: got t_update {t_update.spec}; expected the slice's shape "
            f"{list(shape)}. Reshape it."
        )
        refuse_to_execute(ShapeError(error))
    return t.spec


dynamic_update_ = inplace(dynamic_update, "t")


@dynamic_slice.vjp
def dynamic_slice_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    index: Tensor,
    axes: list[int],
    sizes: list[int],
    no_overlap: bool,
) -> tuple[Tensor, None]:
    """Zeros with the gradient in place of the slice."""
    return dynamic_update(zeros(t.spec), index, dy, axes, sizes, no_overlap), None


@dynamic_update.vjp
def dynamic_update_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    index: Tensor,
    t_update: Tensor,
    axes: Any,
    sizes: Any,
    no_overlap: bool,
) -> tuple[Tensor, None, Tensor]:
    """The gradient outside the slice for t, inside it for t_update."""
    outside = dynamic_update(dy, index, zeros(t_update.spec), axes, sizes, no_overlap)
    return outside, None, dynamic_slice(dy, index, axes, sizes, no_overlap)


@dynamic_slice.cost
def dynamic_slice_cost(y: Tensor, *arguments: Any) -> Cost:
    """Reads and writes the slice."""
    return Cost(bytes=2 * y.spec.nbytes)


dynamic_update.cost(moves_data)


@dynamic_update_.cost
def dynamic_update_in_place_cost(
    y: Tensor, t: Tensor, index: Tensor, t_update: Tensor, *attributes: Any
) -> Cost:
    """Reads and writes the slice."""
    return Cost(bytes=2 * t_update.spec.nbytes)

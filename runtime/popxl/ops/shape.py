"""Ops that rearrange elements. Out-of-place forms give independent values; the forms in ``_`` are
views.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from popxl.errors import ShapeError
from popxl.opdef import Cost, alias, op
from popxl.ops.checks import check_same_dtype, normalise_axes, normalise_axis
from popxl.tensor import Tensor, TensorSpec

Ints = int | Sequence[int] | None
SliceArgument = int | Sequence[int | None] | None

builtin_slice = slice


def moves_data(y: Any, *arguments: Any, **options: Any) -> Cost:
    """Cost of ops that compute nothing: operands read, results written."""
    return Cost()


# Reshape


def resolve_shape(name: str, t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """``shape`` with its one -1 filled in. ShapeError unless t's elements fill it."""
    if not isinstance(shape, Iterable):
        raise TypeError(
            f"{name}: got shape {shape!r} for t {t.spec}; expected a list or tuple of sizes."
        )
    given = tuple(int(n) for n in shape)
    is_wrong = any(n < -1 for n in given) or given.count(-1) > 1
    if is_wrong or (0 in given and (t.nelms or -1 in given)):
        raise ShapeError(
            f"{name}: got shape {list(given)} for t {t.spec}; expected positive sizes and at "
            "most one -1; or, of a tensor without elements, a 0 and no -1."
        )
    known = math.prod(n for n in given if n != -1)
    result = tuple(t.nelms // known if n == -1 else n for n in given)
    if math.prod(result) != t.nelms:
        raise ShapeError(
            f"{name}: got shape {list(given)} for t {t.spec}; expected a shape of {t.nelms} "
            "elements."
        )
    return result


@op(views=("t",), host=lambda t, shape: np.reshape(t, shape), names="{t}_reshaped")
def reshape(t: Tensor, shape: tuple[int, ...]) -> TensorSpec:
    """Give the elements, in row-major order, a new shape.

    Shapes: t [a], any dtype -> shape, t's dtype.
    Args:
        shape: sizes; one may be -1 and is filled in.
    Raises:
        ShapeError: for a size of 0 or below -1, several -1, or another number of elements.
        TypeError: for a shape that is no list of sizes.
    """
    return TensorSpec(resolve_shape("reshape", t, shape), t.dtype)


@reshape.vjp
def reshape_vjp(dy: Tensor, y: Tensor, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape back."""
    return reshape(dy, t.shape)


reshape.cost(moves_data)
reshape_ = alias(reshape)


def flatten(t: Tensor) -> Tensor:
    """Put the elements in one axis, in row-major order.

    Shapes: t [a], any dtype -> [elements], t's dtype.
    """
    return reshape(t, (-1,))


def flatten_(t: Tensor) -> Tensor:
    """The same as `flatten`, but a view of ``t``: writing to it writes to t.

    Shapes: t [a], any dtype -> [elements], t's dtype.
    """
    return reshape_(t, (-1,))


# Permute and drop axes


def resolve_permutation(t: Tensor, permutation: Iterable[int] | None) -> tuple[int, ...]:
    """The permutation, axes counted from the front; reversed for None. ShapeError unless each axis
    is there once.
    """
    if permutation is None:
        return tuple(reversed(range(t.rank)))
    axes = tuple(normalise_axis("transpose", t, a) for a in permutation)
    if sorted(axes) != list(range(t.rank)):
        raise ShapeError(
            f"transpose: got permutation {list(axes)} for t {t.spec}; expected each of its "
            f"{t.rank} axes once."
        )
    return axes


@op(views=("t",), host=lambda t, permutation: np.transpose(t, permutation), names="{t}_T")
def transpose(t: Tensor, permutation: tuple[int, ...] | None = None) -> TensorSpec:
    """Permute the axes: axis i of the result is axis ``permutation[i]`` of t; by default they are
    reversed.

    Shapes: t [a], any dtype -> t's sizes in the new order, t's dtype.
    Raises:
        ShapeError: for an axis that t lacks, or a list that is no permutation.
    """
    return TensorSpec((t.shape[a] for a in resolve_permutation(t, permutation)), t.dtype)


@transpose.vjp
def transpose_vjp(dy: Tensor, y: Tensor, t: Tensor, permutation: tuple[int, ...] | None) -> Tensor:
    """Permute back."""
    return transpose(dy, tuple(int(a) for a in np.argsort(resolve_permutation(t, permutation))))


transpose.cost(moves_data)
transpose_ = alias(transpose)


def resolve_squeezed(t: Tensor, axes: Iterable[int] | None) -> tuple[int, ...]:
    """The axes to drop, ascending: all of size 1 for None. ShapeError for one that is longer,
    missing or repeated.
    """
    if axes is None:
        return tuple(a for a, n in enumerate(t.shape) if n == 1)
    result = normalise_axes("squeeze", t, tuple(axes))
    if any(t.shape[a] != 1 for a in result):
        raise ShapeError(
            f"squeeze: got axes {list(result)} for t {t.spec}; expected axes of size 1. Slice "
            "longer ones first."
        )
    return result


@op(views=("t",), host=lambda t, axes: np.squeeze(t, None if axes is None else tuple(axes)))
def squeeze(t: Tensor, axes: list[int] | None = None) -> TensorSpec:
    """Drop axes of size 1: all of them, or the given ones.

    Shapes: t [a], any dtype -> a without those axes, t's dtype.
    Raises:
        ShapeError: for an axis that t lacks, that is named twice, or that is longer than 1.
    """
    dropped = resolve_squeezed(t, axes)
    return TensorSpec((n for a, n in enumerate(t.shape) if a not in dropped), t.dtype)


@squeeze.vjp
def squeeze_vjp(dy: Tensor, y: Tensor, t: Tensor, axes: list[int] | None) -> Tensor:
    """Put the axes back."""
    return reshape(dy, t.shape)


squeeze.cost(moves_data)


# Slice


def _as_list(value: Any) -> list[Any] | None:
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value]


def resolve_slices(
    shape: Sequence[int], start: Any, stop: Any, step: Any, axis: Any
) -> tuple[builtin_slice, ...]:
    """One Python slice per axis of ``shape`` from `slice`'s arguments.

    Raises:
        ShapeError: lists of different lengths, more entries than axes, an axis that is missing or
            named twice, or a step of 0.
    """
    what = (
        f"slice: got start={start}, stop={stop}, step={step}, axis={axis} for shape {list(shape)}"
    )
    given = [_as_list(v) for v in (start, stop, step, axis)]
    lengths = {len(v) for v in given if v is not None}
    if len(lengths) > 1:
        raise ShapeError(f"{what}; expected lists of one length.")
    length = lengths.pop() if lengths else 0
    starts, stops, steps = ([None] * length if v is None else v for v in given[:3])
    axes = list(range(length)) if given[3] is None else given[3]
    rank = len(shape)
    if any(not -rank <= a < rank for a in axes) or len({a % rank for a in axes if rank}) != length:
        raise ShapeError(f"{what}; expected each axis at most once, and one of {rank}.")
    if any(s == 0 for s in steps):
        raise ShapeError(f"{what}; expected steps other than 0.")
    result = [builtin_slice(None)] * rank
    for a, first, last, by in zip(axes, starts, stops, steps):
        result[a] = builtin_slice(first, last, by)
    return tuple(result)


def _slice_on_host(t: np.ndarray, start: Any, stop: Any, step: Any, axis: Any) -> np.ndarray:
    return np.asarray(t[resolve_slices(t.shape, start, stop, step, axis)])


@op(name="slice", views=("t",), host=_slice_on_host)
def _slice(
    t: Tensor,
    start: SliceArgument = None,
    stop: SliceArgument = None,
    step: SliceArgument = None,
    axis: Ints = None,
) -> TensorSpec:
    """The static slice; `slice` documents it."""
    slices = resolve_slices(t.shape, start, stop, step, axis)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(slices, t.shape))
    return TensorSpec(shape, t.dtype)


def slice(
    t: Tensor,
    start: int | list[int | None] | None = None,
    stop: int | list[int | None] | None = None,
    step: int | list[int | None] | None = None,
    axis: int | list[int] | None = None,
) -> Tensor:
    """Select elements by position, as Python slices do.

    Negative positions count from the end, a negative step reverses. Entry i of the lists is for
    axis ``axis[i]``; without ``axis``, for axis i. None entries mean the whole axis. Without start,
    stop and step the result is t itself. Nothing selected gives an axis of size 0.

    Shapes: t [a], any dtype -> on each axis the number of elements selected, t's dtype.
    Raises:
        ShapeError: lists of different lengths, an unknown axis, or a step of 0.
    """
    return t if start is stop is step is None else _slice(t, start, stop, step, axis)


_slice_ = alias(_slice)


def slice_(
    t: Tensor,
    start: int | list[int | None] | None = None,
    stop: int | list[int | None] | None = None,
    step: int | list[int | None] | None = None,
    axis: int | list[int] | None = None,
) -> Tensor:
    """The same as `slice`, but a view of ``t``: writing to it writes to t.

    Shapes and errors: as for `slice`.
    """
    return t if start is stop is step is None else _slice_(t, start, stop, step, axis)


@op
def slice_grad(
    dy: Tensor,
    shape: tuple[int, ...],
    start: SliceArgument,
    stop: SliceArgument,
    step: SliceArgument,
    axis: Ints,
) -> TensorSpec:
    """Put dy where `slice` with these arguments took it from, into zeros of ``shape``. Not in
    PopXL's API.
    """
    return TensorSpec(shape, dy.dtype)


@slice_grad.vjp
def slice_grad_vjp(
    dy: Tensor,
    y: Tensor,
    given: Tensor,
    shape: tuple[int, ...],
    start: Any,
    stop: Any,
    step: Any,
    axis: Any,
) -> Tensor:
    """Slice the gradient."""
    return _slice(dy, start, stop, step, axis)


@_slice.vjp
def slice_vjp(
    dy: Tensor, y: Tensor, t: Tensor, start: Any, stop: Any, step: Any, axis: Any
) -> Tensor:
    """Zeros around the gradient."""
    return slice_grad(dy, t.shape, start, stop, step, axis)


_slice.cost(moves_data)
slice_grad.cost(moves_data)


def subsample(t: Tensor, strides: int | Iterable[int]) -> Tensor:
    """Every n-th element of each axis: element i of axis a is t's element i * strides[a].

    Shapes: t [a], any dtype -> ceil(size / stride) on each axis, t's dtype.
    Args:
        strides: one for each of the first axes; a number is for every axis.
    Raises:
        ShapeError: for more strides than axes, or a stride below 1.
    """
    steps = tuple(strides) if isinstance(strides, Iterable) else (strides,) * t.rank
    if len(steps) > t.rank or any(s < 1 for s in steps):
        raise ShapeError(
            f"subsample: got strides {steps} for t {t.spec}; expected at most {t.rank} "
            "numbers of at least 1."
        )
    return _slice(t, None, None, steps, None)


# Split and join


def resolve_splits(t: Tensor, splits: int | Sequence[int], axis: int) -> tuple[int, ...]:
    """The length of each piece. ShapeError unless they fill the axis, TypeError for another kind of
    splits.
    """
    size = t.shape[normalise_axis("split", t, axis)]
    if isinstance(splits, (int, np.integer)):
        if splits < 1 or size % splits:
            raise ShapeError(
                f"split: got splits {splits} for axis {axis} of t {t.spec}; expected a "
                f"divisor of {size}."
            )
        return (size // splits,) * int(splits)
    if not isinstance(splits, Iterable):
        raise TypeError(
            f"split: got splits {splits!r} for t {t.spec}; expected a whole number or a list "
            "of lengths."
        )
    lengths = tuple(int(n) for n in splits)
    if sum(lengths) != size or any(n < 0 for n in lengths):
        raise ShapeError(
            f"split: got splits {list(lengths)} for axis {axis} of t {t.spec}; expected lengths of "
            f"at least 0 that add up to {size}."
        )
    return lengths


def _split_on_host(t: np.ndarray, splits: int | Sequence[int], axis: int) -> list[np.ndarray]:
    is_number = isinstance(splits, (int, np.integer))
    return list(np.split(t, splits if is_number else np.cumsum(splits)[:-1], axis))


@op(views=("t",), host=_split_on_host, names="{t}_split_{i}")
def split(t: Tensor, splits: int | list[int], axis: int = 0) -> list[TensorSpec]:
    """Cut an axis into pieces: that many equal ones for a number, or pieces of the given lengths.

    Shapes: t [a.., n, b..], any dtype -> list of [a.., length, b..], t's dtype.
    Raises:
        ShapeError: a number that does not divide the axis, or lengths that do not add up to it.
        TypeError: splits that are neither.
    """
    lengths = resolve_splits(t, splits, axis)
    axis = axis % t.rank
    return [TensorSpec((*t.shape[:axis], n, *t.shape[axis + 1 :]), t.dtype) for n in lengths]


@split.vjp
def split_vjp(
    dy: list[Tensor], y: list[Tensor], t: Tensor, splits: int | list[int], axis: int
) -> Tensor:
    """Join the gradients."""
    return concat(dy, axis)


split.cost(moves_data)


@op(views=("ts",), host=lambda ts, axis: np.concatenate(ts, axis))
def concat(ts: Iterable[Tensor], axis: int = 0) -> TensorSpec:
    """Join tensors along an axis; their other axes and dtypes are equal.

    Shapes: each [a.., n_i, b..], one dtype -> [a.., sum of n_i, b..], the same dtype.
    Raises:
        TypeError: for something that is no tensor, or different dtypes.
        ShapeError: for no tensors, or other axes that differ.
    """
    tensors = list(ts)
    if not tensors:
        raise ShapeError("concat: got no tensors; expected at least one.")
    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(
                f"concat: got {type(t).__name__} in ts; expected tensors. Make a constant "
                "with popxl.constant(...)."
            )
    check_same_dtype("concat", **{f"ts[{i}]": t for i, t in enumerate(tensors)})
    first = tensors[0]
    axis = normalise_axis("concat", first, axis)
    for t in tensors:
        if t.rank != first.rank or any(
            n != m for a, (n, m) in enumerate(zip(t.shape, first.shape)) if a != axis
        ):
            raise ShapeError(
                f"concat: got {first.spec} and {t.spec} for axis {axis}; expected equal sizes "
                "on all other axes."
            )
    total = sum(t.shape[axis] for t in tensors)
    return TensorSpec((*first.shape[:axis], total, *first.shape[axis + 1 :]), first.dtype)


@concat.vjp
def concat_vjp(dy: Tensor, y: Tensor, ts: Iterable[Tensor], axis: int) -> tuple[tuple[Tensor, ...]]:
    """Split the gradient."""
    return (tuple(split(dy, [t.shape[axis] for t in ts], axis)),)


concat.cost(moves_data)
concat_ = alias(concat)


# The same elements


@op(
    views=("t",),
    host=lambda t, output_name: t,
    names=lambda t, output_name: [output_name or "identity"],
)
def identity(t: Tensor, output_name: str | None = None) -> TensorSpec:
    """A copy of a tensor, called ``output_name`` if that is given. `identity` and `rename` are
    one op.

    Shapes: t [a], any dtype -> [a], t's dtype.
    """
    return t.spec


@identity.vjp
def identity_vjp(dy: Tensor, y: Tensor, t: Tensor, output_name: str | None) -> Tensor:
    """The gradient as it is."""
    return dy


identity.cost(moves_data)
rename = identity


@op(views=("t",), host=lambda t: t)
def detach(t: Tensor) -> TensorSpec:
    """A copy of a tensor through which no gradient flows back.

    Shapes: t [a], any dtype -> [a], t's dtype.
    """
    return t.spec


@detach.vjp
def detach_vjp(dy: Tensor, y: Tensor, t: Tensor) -> None:
    """No gradient: that is what the op is for."""
    return None


detach.cost(moves_data)
detach_ = alias(detach)

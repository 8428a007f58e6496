"""Reductions over axes, and running sums. 16-bit types accumulate in float32."""

from collections.abc import Callable, Iterable, Sequence

import torch

from popxl_engine.kernels.arithmetic import only_where, shared
from popxl_engine.kernels.dtypes import as_signed, computable, from_ordered, ordered
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32

Axis = int | Iterable[int] | None
Reduction = Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]


def axes_of(t: torch.Tensor, axis: Axis) -> tuple[int, ...]:
    """Axes counted from the front; all of them for None."""
    if axis is None:
        return tuple(range(t.dim()))
    if isinstance(axis, int):
        return (axis % t.dim(),)
    return tuple(sorted(a % t.dim() for a in axis))


def reduction(name: str, fn: Reduction, by_order: bool = False) -> None:
    """Register a kernel from ``fn(t, axes, keepdims)``, which gets at least one axis (torch takes
    none for all).

    Args:
        by_order: whether it chooses by the order of elements, not by arithmetic.
    """

    def widened(t: torch.Tensor) -> torch.Tensor:
        return ordered(t) if by_order else computable(t)

    def narrowed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if t.dtype == dtype:
            return t
        return from_ordered(t, dtype) if by_order else t.to(dtype)

    def run(t: torch.Tensor, axis: Axis, keepdims: bool) -> torch.Tensor:
        axes = axes_of(t, axis)
        wide = widened(t)
        if not axes:  # a scalar, or an empty list of axes: reduce an axis of size 1
            return narrowed(fn(wide.unsqueeze(0), (0,), False), t.dtype)
        return narrowed(fn(wide, axes, keepdims), t.dtype)

    kernel(name)(run)


def merged(t: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The axes to reduce merged into one, last."""
    kept = [a for a in range(t.dim()) if a not in axes]
    return t.permute(*kept, *axes).reshape([t.shape[a] for a in kept] + [-1])


def aligned(
    d: torch.Tensor, t: torch.Tensor, axes: tuple[int, ...], keepdims: bool
) -> torch.Tensor:
    """A reduced tensor with size-1 axes where ``t`` was reduced."""
    return d if keepdims else d.reshape([1 if a in axes else n for a, n in enumerate(t.shape)])


def along_merged(fn: Callable[[torch.Tensor], torch.Tensor]) -> Reduction:
    """A reduction from one that reduces the last axis."""

    def run(t: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
        result = fn(merged(t, axes))
        return aligned(result, t, axes, False) if keepdims else result

    return run


def logsum(t: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    """log(sum)."""
    return torch.log(as_float32(t).sum(axes, keepdim=keepdims))


ROW = 1024
"""Elements whose squares are added up at a time in the element type itself; the sums of rows are
added in float64.
"""


def sum_of_squares(t: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    """Sum of squares. That of a whole large tensor is taken row by row: one sum in float32 would
    lose three digits.
    """
    t = as_float32(t)
    if len(axes) < t.dim() or t.dtype != torch.float32 or t.numel() <= ROW or not t.is_contiguous():
        return t.square().sum(axes, keepdim=keepdims)
    flat = t.view(-1)
    whole = flat.numel() // ROW * ROW
    total = (
        torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
        .square()
        .sum(dtype=torch.float64)
    )
    total = (total + flat[whole:].square().sum(dtype=torch.float64)).to(t.dtype)
    return total.reshape([1] * t.dim() if keepdims else [])


reduction("sum", lambda t, axes, keepdims: t.sum(axes, keepdim=keepdims, dtype=t.dtype))
reduction("mean", lambda t, axes, keepdims: t.mean(axes, keepdim=keepdims))
reduction("prod", along_merged(lambda t: as_float32(t).prod(-1, dtype=as_float32(t).dtype)))
reduction("max", lambda t, axes, keepdims: t.amax(axes, keepdim=keepdims), by_order=True)
reduction("min", lambda t, axes, keepdims: t.amin(axes, keepdim=keepdims), by_order=True)
reduction("l1", lambda t, axes, keepdims: t.abs().sum(axes, keepdim=keepdims))
reduction(
    "l2",
    lambda t, axes, keepdims: torch.linalg.vector_norm(as_float32(t), 2, axes, keepdim=keepdims),
)
reduction("sumsquare", sum_of_squares)
reduction("logsum", logsum)
reduction(
    "logsumexp", lambda t, axes, keepdims: torch.logsumexp(as_float32(t), axes, keepdim=keepdims)
)
reduction("median", along_merged(lambda t: t.median(-1).values), by_order=True)


@kernel("extremum_grad")
def extremum_grad(
    dy: torch.Tensor, y: torch.Tensor, t: torch.Tensor, axis: Axis, keepdims: bool
) -> torch.Tensor:
    """dy to the elements that equal y, in equal shares."""
    axes = axes_of(t, axis)
    chosen = as_signed(t) == as_signed(aligned(y, t, axes, keepdims))
    if axes:
        dy = shared(aligned(dy, t, axes, keepdims), chosen.sum(axes, keepdim=True))
    return only_where(chosen, dy)


@kernel("prod_grad")
def prod_grad(dy: torch.Tensor, t: torch.Tensor, axis: Axis, keepdims: bool) -> torch.Tensor:
    """dy times the product of the elements before and of those after."""
    axes = axes_of(t, axis)
    if not axes:
        return dy.clone()
    flat = as_float32(computable(merged(t, axes)))
    one = torch.ones_like(flat[..., :1])
    before = torch.cumprod(torch.cat([one, flat[..., :-1]], -1), -1)
    after = torch.cumprod(torch.cat([one, flat[..., 1:].flip(-1)], -1), -1).flip(-1)
    kept = [a for a in range(t.dim()) if a not in axes]
    result = before * after * computable(dy).reshape([t.shape[a] for a in kept] + [1])
    return unmerged(result, t, axes).to(t.dtype)


def unmerged(flat: torch.Tensor, t: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `merged`."""
    order = [a for a in range(t.dim()) if a not in axes] + list(axes)
    back = sorted(range(t.dim()), key=lambda i: order[i])
    return flat.reshape([t.shape[a] for a in order]).permute(back).contiguous()


@kernel("median_grad")
def median_grad(dy: torch.Tensor, t: torch.Tensor, axis: Axis, keepdims: bool) -> torch.Tensor:
    """dy to the selected element."""
    axes = axes_of(t, axis)
    if not axes:
        return dy.clone()
    flat = merged(t, axes)
    chosen = ordered(flat).median(-1, keepdim=True).indices
    zeros = torch.zeros_like(as_signed(flat))
    found = zeros.scatter(-1, chosen, as_signed(dy).reshape(chosen.shape))
    return unmerged(found, t, axes).view(t.dtype)


@kernel("l2_grad")
def l2_grad(dy: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """dy * t / y, 0 where y is."""
    return t * torch.where(y == 0, torch.zeros_like(y), dy / y)


def _position(t: torch.Tensor, dim: int | None, keepdim: bool, largest: bool) -> torch.Tensor:
    wide = ordered(t)
    find = torch.argmax if largest else torch.argmin
    if dim is None and keepdim:
        return find(wide).reshape([1] * t.dim()).to(torch.int32)
    return (find(wide) if dim is None else find(wide, dim, keepdim)).to(torch.int32)


@kernel("argmax")
def argmax(t: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    """Index of the largest."""
    return _position(t, dim, keepdim, True)


@kernel("argmin")
def argmin(t: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    """Index of the smallest."""
    return _position(t, dim, keepdim, False)


@kernel("cumsum")
def cumsum(t: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Running sum."""
    wide = as_float32(computable(t))
    return torch.cumsum(wide, dim or 0, dtype=wide.dtype).to(t.dtype)


@kernel("cumsum_grad")
def cumsum_grad(dy: torch.Tensor, dim: int) -> torch.Tensor:
    """Running sum from the end."""
    return torch.cumsum(as_float32(computable(dy)).flip(dim), dim).flip(dim).to(dy.dtype)


@kernel("lamb_square")
def lamb_square(t: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float32."""
    return t.to(torch.float32).square().sum()


@kernel("histogram")
def histogram(t: torch.Tensor, levels: Sequence[float], absolute_of_input: bool) -> torch.Tensor:
    """Find each element's bin, count."""
    bounds = as_float32(torch.tensor(levels, dtype=torch.float64, device="cpu").to(t.dtype)).to(
        t.device, non_blocking=True
    )
    values = as_float32(t.abs() if absolute_of_input else t).reshape(-1).contiguous()
    bins = torch.bucketize(values, bounds, right=True)
    counts = torch.zeros(len(levels) + 1, dtype=torch.int64, device=t.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins)).to(torch.uint32)

"""Values between elements: weighted sums of a few of them, axis by axis. 16-bit types accumulate in
float32.
"""

from collections.abc import Callable, Iterator

import torch

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32

Scales = tuple[float, ...] | None
Tap = tuple[torch.Tensor, torch.Tensor]
"""(index of an element, its weight) for each value along an axis."""
A = -0.75
"""Slope of the cubic at distance one."""

Share = Callable[[torch.Tensor, float, float], torch.Tensor]
COORDINATES: dict[str, Callable[[torch.Tensor, Share, float, int], torch.Tensor]] = {
    "half_pixel": lambda i, share, scale, size: share(i + 0.5, 1, scale) - 0.5,
    "pytorch_half_pixel": lambda i, share, scale, size: (
        share(i + 0.5, 1, scale) - 0.5 if len(i) > 1 else i
    ),
    "align_corners": lambda i, share, scale, size: share(i, size - 1, max(len(i) - 1, 1)),
    "asymmetric": lambda i, share, scale, size: share(i, 1, scale),
}
"""The places where the values of an axis lie among its ``size`` elements; share(x, a, b) is x * a /
b.
"""

NEAREST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "round_prefer_floor": lambda position: torch.ceil(position - 0.5),
    "round_prefer_ceil": lambda position: torch.floor(position + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def cubic(distance: torch.Tensor) -> torch.Tensor:
    """Weight of an element at a distance from 0 to 2."""
    near = ((A + 2) * distance - (A + 3)) * distance**2 + 1
    far = A * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, far)


def taps(
    size: int,
    count: int,
    scale: float,
    mode: str,
    nearest_mode: str,
    coordinates: str,
    like: torch.Tensor,
) -> Iterator[Tap]:
    """The elements along an axis that make each value.

    Positions of which the nearest element is taken are computed in float64; others, and weights, in
    the type of what is weighed, as torch does: the ratio is rounded, then the position, once.
    """
    each = torch.arange(count, dtype=torch.float64, device=like.device)
    place = COORDINATES[coordinates]
    if mode == "nearest":
        position = place(each, lambda x, a, b: x * a / b, scale, size)
        yield NEAREST[nearest_mode](position).long().clamp(0, size - 1), like.new_ones(count)
        return

    def share(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return x * float(torch.tensor(a / b, dtype=like.dtype, device="cpu"))

    position = place(each, share, scale, size).to(like.dtype)
    if mode == "linear":
        position = position.clamp(0, size - 1)
    below = torch.floor(position)
    for offset in (0, 1) if mode == "linear" else (-1, 0, 1, 2):
        distance = (position - below - offset).abs()
        weight = 1 - distance if mode == "linear" else cubic(distance)
        yield (below.long() + offset).clamp(0, size - 1), weight


def scaled_axes(scale_factor: Scales) -> list[tuple[int, float]]:
    """(axis, factor) of axes that change: a factor of 1 leaves every element in its place."""
    return [(axis, factor) for axis, factor in enumerate(scale_factor or ()) if factor != 1]


def along(axis: int, weight: torch.Tensor, rank: int) -> torch.Tensor:
    """Weights of one axis, to broadcast against a tensor of ``rank`` axes."""
    return weight.view((-1,) + (1,) * (rank - axis - 1))


@kernel("interpolate")
def interpolate(
    t: torch.Tensor,
    scale_factor: Scales,
    mode: str,
    nearest_mode: str,
    coordinate_transformation_mode: str,
) -> torch.Tensor:
    """Select and weigh, axis by axis."""
    modes = mode, nearest_mode, coordinate_transformation_mode
    result = t if mode == "nearest" else as_float32(t)
    for axis, scale in scaled_axes(scale_factor):
        before, size = result, result.shape[axis]
        result = result.new_zeros(
            (*before.shape[:axis], int(size * scale), *before.shape[axis + 1 :])
        )
        for index, weight in taps(size, result.shape[axis], scale, *modes, like=result):
            result.addcmul_(before.index_select(axis, index), along(axis, weight, t.dim()))
    return result.clone() if result is t else result.to(t.dtype)


@kernel("interpolate_grad")
def interpolate_grad(
    dy: torch.Tensor,
    shape: tuple[int, ...],
    scale_factor: Scales,
    mode: str,
    nearest_mode: str,
    coordinate_transformation_mode: str,
) -> torch.Tensor:
    """Weigh and add where it was selected, axis by axis from the last."""
    modes = mode, nearest_mode, coordinate_transformation_mode
    d = as_float32(dy)
    for axis, scale in reversed(scaled_axes(scale_factor)):
        result = d.new_zeros((*d.shape[:axis], shape[axis], *d.shape[axis + 1 :]))
        for index, weight in taps(shape[axis], d.shape[axis], scale, *modes, like=d):
            result.index_add_(axis, index, d * along(axis, weight, d.dim()))
        d = result
    return d.clone() if d is dy else d.to(dy.dtype)


# Regions


def samples(
    low: torch.Tensor, high: torch.Tensor, bins: int, size: int, sampling_ratio: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements along one axis that make each bin: (index [regions, bins], its weight) for each.

    Args:
        low, high: the regions' ends in elements of the axis [regions].
        size: elements of the axis.
    """
    length = (high - low).clamp(min=1) / bins
    ratios = torch.full_like(length, sampling_ratio) if sampling_ratio else length.ceil()
    most = sampling_ratio or max(1, int(ratios.max()))
    starts = low[:, None] + torch.arange(bins, dtype=low.dtype, device=low.device) * length[:, None]
    for sample in range(most):
        position = starts + ((sample + 0.5) / ratios * length)[:, None]
        is_taken = (position >= -1) & (position <= size) & (sample < ratios)[:, None]
        share = is_taken / ratios[:, None]
        position = position.clamp(0, size - 1)
        below = position.floor()
        upper = (position - below) * share
        yield below.long(), share - upper
        yield (below.long() + 1).clamp(max=size - 1), upper


def sampled_rows(
    shape: tuple[int, ...],
    rois: torch.Tensor,
    batch_index: torch.Tensor,
    bins: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What makes each bin: (row of t as [n * h * w, c], its weight), [regions * rows * columns] and
    a size-1 axis.

    Args:
        shape: t's.
    """
    left, top, right, bottom = (as_float32(rois) * spatial_scale).unbind(1)
    across = list(samples(left, right, bins[1], shape[3], sampling_ratio))
    first = batch_index.long()[:, None] * shape[2]
    for y, y_weight in samples(top, bottom, bins[0], shape[2], sampling_ratio):
        for x, x_weight in across:
            row = ((first + y) * shape[3])[:, :, None] + x[:, None, :]
            weight = y_weight[:, :, None] * x_weight[:, None, :]
            yield row.reshape(-1), weight.reshape(-1, 1)


@kernel("roi_align")
def roi_align(
    t: torch.Tensor,
    rois: torch.Tensor,
    batch_index: torch.Tensor,
    output_size: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> torch.Tensor:
    """Select and weigh rows of channels."""
    regions, channels = rois.shape[0], t.shape[1]
    flat = as_float32(t).permute(0, 2, 3, 1).reshape(-1, channels)
    result = flat.new_zeros((regions * output_size[0] * output_size[1], channels))
    if regions:
        for row, weight in sampled_rows(
            t.shape, rois, batch_index, output_size, spatial_scale, sampling_ratio
        ):
            result.addcmul_(flat.index_select(0, row), weight)
    return result.view(regions, *output_size, channels).permute(0, 3, 1, 2).to(t.dtype).contiguous()


@kernel("roi_align_grad")
def roi_align_grad(
    dy: torch.Tensor,
    rois: torch.Tensor,
    batch_index: torch.Tensor,
    shape: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> torch.Tensor:
    """Weigh and add to rows of channels."""
    n, channels, height, width = shape
    flat = as_float32(dy).permute(0, 2, 3, 1).reshape(-1, channels)
    result = flat.new_zeros((n * height * width, channels))
    if len(rois):
        for row, weight in sampled_rows(
            shape, rois, batch_index, dy.shape[2:], spatial_scale, sampling_ratio
        ):
            result.index_add_(0, row, flat * weight)
    return result.view(n, height, width, channels).permute(0, 3, 1, 2).to(dy.dtype).contiguous()

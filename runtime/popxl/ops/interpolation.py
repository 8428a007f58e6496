"""Values between elements: resizing, and pooling of regions. Both are linear in t."""

import math
from typing import Any, Literal

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_computes_in_one_dtype, check_floating, check_indices
from popxl.ops.windows import per_axis
from popxl.tensor import Tensor, TensorSpec

InterpolateType = Literal["nearest", "linear", "cubic"]
InterpolateNearestType = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
InterpolateCoordinateTransformationType = Literal[
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"
]

TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
"""Elements that make one value, on each axis."""
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


def _check_choice(parameter: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"interpolate: got {parameter} = {value!r}; expected one of "
            f"{', '.join(repr(k) for k in known)}."
        )


@op
def interpolate(
    t: Tensor,
    scale_factor: tuple[float, ...] | None = (1.0, 1.0, 1.0, 1.0),
    mode: InterpolateType = "nearest",
    nearest_mode: InterpolateNearestType = "round_prefer_floor",
    coordinate_transformation_mode: InterpolateCoordinateTransformationType = "half_pixel",
) -> TensorSpec:
    """Resize each axis by a factor. Elements beyond an end are those at the end; nothing is
    smoothed before shrinking.

    Element i of an axis of y elements, scaled by f from x, is the value of t at a position p:
        half_pixel: (i + 0.5) / f - 0.5; pytorch_half_pixel: the same, but 0 where y is 1;
        align_corners: i * (x - 1) / (y - 1), 0 where y is 1; asymmetric: i / f.

    Shapes: t [x...], floating point -> [floor(x * f)...], t's dtype.
    Args:
        scale_factor: f, for each axis of t; None: 1.
        mode: 'nearest': the element next to p; 'linear': between the two around p; 'cubic': Keys'
            cubic convolution of the four around p, with a = -0.75. With several axes scaled, one
            after the other.
        nearest_mode: which element is next: 'round_prefer_floor' or 'round_prefer_ceil' (the lower
            or the upper one half-way between two), 'floor' or 'ceil'. Without effect in other
            modes.
        coordinate_transformation_mode: one of the above.
    Raises:
        ShapeError: if scale_factor has not one positive number for each axis, or an axis would be
            empty.
        DTypeError: from sessions, if t is not floating point.
        ValueError: for other modes.
    Source: ONNX, operator Resize; Keys 1981, IEEE Trans. ASSP 29 (6), for the cubic.
    """
    check_floating("interpolate", t=t)
    _check_choice("mode", mode, tuple(TAPS))
    _check_choice("nearest_mode", nearest_mode, NEAREST)
    _check_choice("coordinate_transformation_mode", coordinate_transformation_mode, COORDINATES)
    factors = (1.0,) * t.rank if scale_factor is None else scale_factor
    if len(factors) != t.rank or not all(0 < f < math.inf for f in factors):
        raise ShapeError(
            f"interpolate: got scale_factor {factors} for t {t.spec}; expected {t.rank} positive "
            "numbers, one for each axis: 1.0 for samples and channels."
        )
    shape = tuple(math.floor(x * f) for x, f in zip(t.shape, factors))
    if any(y == 0 < x for x, y in zip(t.shape, shape)):
        raise ShapeError(
            f"interpolate: got scale_factor {factors} for t {t.spec}; expected at least one "
            f"element on each axis of the result {list(shape)}. Use larger factors."
        )
    return TensorSpec(shape, t.dtype)


@op
def interpolate_grad(
    dy: Tensor,
    shape: tuple[int, ...],
    scale_factor: tuple[float, ...] | None,
    mode: InterpolateType,
    nearest_mode: InterpolateNearestType,
    coordinate_transformation_mode: InterpolateCoordinateTransformationType,
) -> TensorSpec:
    """Gradient of `interpolate` for its t of this shape. Not in PopXL's API."""
    return TensorSpec(shape, dy.dtype)


@interpolate.vjp
def interpolate_vjp(dy: Tensor, y: Tensor, t: Tensor, *attributes: Any) -> Tensor:
    """Each value's gradient to the elements that made it."""
    return interpolate_grad(dy, t.shape, *attributes)


@interpolate_grad.vjp
def interpolate_grad_vjp(
    d: Tensor, y: Tensor, dy: Tensor, shape: tuple[int, ...], *attributes: Any
) -> Tensor:
    """Interpolating is linear."""
    return interpolate(d, *attributes)


def _interpolation_flops(elements: int, mode: str, scale_factor: tuple[float, ...] | None) -> int:
    """A product and a sum for each tap of each scaled axis, of each of the larger tensor's
    elements.
    """
    axes = sum(f != 1 for f in scale_factor or ())
    return 0 if mode == "nearest" else 2 * TAPS[mode] * axes * elements


@interpolate.cost
def interpolate_cost(
    y: Tensor, t: Tensor, scale_factor: tuple[float, ...] | None, mode: str, *modes: Any
) -> Cost:
    """Nearest elements only move."""
    return Cost(flops=_interpolation_flops(max(y.nelms, t.nelms), mode, scale_factor))


@interpolate_grad.cost
def interpolate_grad_cost(
    dt: Tensor,
    dy: Tensor,
    shape: tuple[int, ...],
    scale_factor: tuple[float, ...] | None,
    mode: str,
    *modes: Any,
) -> Cost:
    """FLOPs, as many as forward, and a sum for each nearest element."""
    return Cost(flops=_interpolation_flops(max(dy.nelms, dt.nelms), mode, scale_factor) or dy.nelms)


# Regions


@op
def roi_align(
    t: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    output_size: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> TensorSpec:
    """The mean of t in each bin of regions of interest, from samples between the elements.

    A region, at least one element high and wide, is cut into output_size bins, each with a grid of
    samples. A sample is interpolated from the four elements around it; up to one element outside t
    it has the value at the edge, further away it is 0. Regions get no gradient.

    Shapes: t [n, c, h, w]; rois [regions, 4], t's dtype, each x1, y1, x2, y2; batch_index
    [regions], integers in 0 .. n - 1 -> [regions, c, *output_size], t's dtype.
    Args:
        output_size: bins of a region, (rows, columns).
        spatial_scale: elements of t for one unit of the regions' coordinates.
        sampling_ratio: samples of a bin on each axis; 0: as many as elements on that axis, rounded
            up. An accelerator is then waited for, to learn how many.
    Raises:
        ShapeError: for other ranks, regions that do not match, or sizes below 1.
        DTypeError: from sessions, if t and rois differ or are not floating point, or batch_index
            not integers.
    Source: He et al. 2017, arXiv:1703.06870, section 3; ONNX, operator RoiAlign (version 10) in
        average mode.
    """
    check_floating("roi_align", t=t)
    check_computes_in_one_dtype("roi_align", t=t, rois=rois)
    check_indices("roi_align", "batch_index", batch_index)
    if t.rank != 4 or 0 in t.shape[1:]:
        raise ShapeError(
            f"roi_align: got t {t.spec}; expected [n, c, h, w] with elements on each axis."
        )
    if rois.rank != 2 or rois.shape[1] != 4 or batch_index.shape != rois.shape[:1]:
        raise ShapeError(
            f"roi_align: got rois {rois.spec} and batch_index {batch_index.spec}; expected "
            "[regions, 4] and [regions]."
        )
    bins = per_axis("roi_align", "output_size", output_size, 2)
    if not spatial_scale > 0 or sampling_ratio < 0:
        raise ShapeError(
            f"roi_align: got spatial_scale {spatial_scale} and sampling_ratio {sampling_ratio}; "
            "expected a positive number, and a whole number of at least 0."
        )
    return TensorSpec((rois.shape[0], t.shape[1], *bins), t.dtype)


@op
def roi_align_grad(
    dy: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    shape: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> TensorSpec:
    """Gradient of `roi_align` for its t of this shape. Not in PopXL's API."""
    return TensorSpec(shape, dy.dtype)


@roi_align.vjp
def roi_align_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    output_size: tuple[int, ...],
    spatial_scale: float,
    sampling_ratio: int,
) -> tuple[Tensor, None, None]:
    """The gradient of t alone; the source treats regions as given."""
    return roi_align_grad(dy, rois, batch_index, t.shape, spatial_scale, sampling_ratio), None, None


@roi_align_grad.vjp
def roi_align_grad_vjp(
    d: Tensor,
    y: Tensor,
    dy: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    shape: Any,
    *attributes: Any,
) -> tuple[Tensor, None, None]:
    """Sampling is linear in t."""
    return roi_align(d, rois, batch_index, dy.shape[2:], *attributes), None, None


def _roi_flops(regions: Tensor, shape: tuple[int, ...], sampling_ratio: int) -> int:
    """Four products and sums for each sample; where it depends on the regions, as many as if each
    covered t.
    """
    bins = zip(shape[2:], regions.shape[2:])
    return (
        8 * regions.nelms * math.prod(sampling_ratio or -(-size // count) for size, count in bins)
    )


@roi_align.cost
def roi_align_cost(
    y: Tensor, t: Tensor, rois: Tensor, batch_index: Tensor, *attributes: Any
) -> Cost:
    """Eight for each sample."""
    return Cost(flops=_roi_flops(y, t.shape, attributes[-1]))


@roi_align_grad.cost
def roi_align_grad_cost(
    dt: Tensor, dy: Tensor, rois: Tensor, batch_index: Tensor, *attributes: Any
) -> Cost:
    """FLOPs, as many as forward."""
    return Cost(flops=_roi_flops(dy, dt.shape, attributes[-1]))

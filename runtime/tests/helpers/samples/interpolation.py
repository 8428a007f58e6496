"""Samples of values between elements."""

import math

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample

MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def position(i, x, y, f, mode):
    """ONNX's coordinate transformations."""
    if mode == "align_corners":
        return 0.0 if y == 1 else i * (x - 1) / (y - 1)
    if mode == "asymmetric":
        return i / f
    return 0.0 if mode == "pytorch_half_pixel" and y == 1 else (i + 0.5) / f - 0.5


def nearest(p, mode):
    if mode in ("floor", "ceil"):
        return {"floor": math.floor, "ceil": math.ceil}[mode](p)
    low = math.floor(p)
    if p - low == 0.5:
        return low if mode == "round_prefer_floor" else low + 1
    return low if p - low < 0.5 else low + 1


def keys(d, a=-0.75):
    """The cubic convolution kernel."""
    d = abs(d)
    if d < 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def matrix(x, f, mode, nearest_mode, coordinates):
    """The linear map of one axis, [y, x]."""
    y = math.floor(x * f)
    result = torch.zeros(y, x, dtype=torch.float64)
    for i in range(y):
        p = position(i, x, y, f, coordinates)
        around = range(math.floor(p) - 2, math.floor(p) + 4)
        if mode == "nearest":
            weights = {nearest(p, nearest_mode): 1.0}
        elif mode == "linear":
            weights = {j: max(0.0, 1 - abs(p - j)) for j in around}
        else:
            weights = {j: keys(p - j) for j in around}
        for j, weight in weights.items():
            result[i, min(max(j, 0), x - 1)] += weight
    return result


def maps(shape, scale_factor, modes):
    factors = scale_factor or (1.0,) * len(shape)
    return [matrix(x, f, *modes) for x, f in zip(shape, factors)]


def interpolate(
    t,
    scale_factor=None,
    mode="nearest",
    nearest_mode="round_prefer_floor",
    coordinate_transformation_mode="half_pixel",
):
    """A matrix product for each axis."""
    for axis, m in enumerate(
        maps(t.shape, scale_factor, (mode, nearest_mode, coordinate_transformation_mode))
    ):
        t = torch.movedim(torch.tensordot(m, t, ([1], [axis])), 0, axis)
    return t


def interpolate_grad(dy, shape, scale_factor, mode, nearest_mode, coordinate_transformation_mode):
    for axis, m in enumerate(
        maps(shape, scale_factor, (mode, nearest_mode, coordinate_transformation_mode))
    ):
        dy = torch.movedim(torch.tensordot(m, dy, ([0], [axis])), 0, axis)
    return dy


def torchs(mode, align_corners=None):
    """torch's own resizing, in its own words."""

    def resized(t, scale_factor, **modes):
        return torch.nn.functional.interpolate(
            torch.from_numpy(t),
            scale_factor=scale_factor[2:],
            mode=mode,
            align_corners=align_corners,
        ).numpy()

    return resized


IMAGE = (1, 2, 4, 3)


def resized(shape, *factors, oracle=None, **modes):
    names = {
        "nearest_mode": "nearest_mode",
        "coordinates": "coordinate_transformation_mode",
        "mode": "mode",
    }
    attrs = {"scale_factor": factors, **{names[n]: m for n, m in modes.items()}}
    return Sample(
        "interpolate", operands=(shape,), attrs=attrs, autograd=interpolate, oracle=oracle
    )


ATTRS = {
    "scale_factor": (1.0, 1.0, 2.0, 1.5),
    "nearest_mode": "round_prefer_floor",
    "coordinate_transformation_mode": "half_pixel",
}

INTERPOLATED = [
    *(
        resized(IMAGE, 1.0, 1.0, 0.5, 3.0, nearest_mode=n, coordinates=c)
        for n in NEAREST
        for c in MODES
    ),
    resized(IMAGE, 1.0, 1.0, 2.0, 1.5),
    resized(IMAGE, 1.0, 1.0, 2.0, 1.5, nearest_mode="ceil", coordinates="asymmetric"),
    *(
        resized(IMAGE, 1.0, 1.0, height, width, mode=m, coordinates=c)
        for m in ("linear", "cubic")
        for c in MODES
        for height, width in ((0.5, 3.0), (0.3, 1.5))  # the second leaves one row
    ),
    resized((2, 3), 2.0, 2.5, mode="linear"),  # any axis
    resized((3,), 2.0, mode="cubic"),
    resized((1, 1, 2, 2, 2), 1.0, 1.0, 2.0, 1.5, 2.0, mode="linear"),
    *(resized((1, 1, 1, 1), 1.0, 1.0, 3.0, 2.0, mode=m) for m in ("nearest", "linear", "cubic")),
    # nothing to do
    *(resized(IMAGE, 1.0, 1.0, 1.0, 1.0, mode=m) for m in ("nearest", "linear", "cubic")),
    *(resized((0, 2, 2, 2), 1.0, 1.0, 2.0, 2.0, mode=m) for m in ("nearest", "linear", "cubic")),
    # What torch has too.
    resized(
        IMAGE,
        1.0,
        1.0,
        2.0,
        3.0,
        coordinates="asymmetric",
        nearest_mode="floor",
        oracle=torchs("nearest"),
    ),
    resized(
        IMAGE, 1.0, 1.0, 2.0, 3.0, nearest_mode="round_prefer_ceil", oracle=torchs("nearest-exact")
    ),
    resized(IMAGE, 1.0, 1.0, 2.0, 1.5, mode="linear", oracle=torchs("bilinear", False)),
    resized(
        IMAGE,
        1.0,
        1.0,
        2.0,
        3.0,
        mode="linear",
        coordinates="align_corners",
        oracle=torchs("bilinear", True),
    ),
    resized(IMAGE, 1.0, 1.0, 2.0, 1.5, mode="cubic", oracle=torchs("bicubic", False)),
    resized(
        IMAGE,
        1.0,
        1.0,
        2.0,
        3.0,
        mode="cubic",
        coordinates="align_corners",
        oracle=torchs("bicubic", True),
    ),
    Sample("interpolate", operands=(IMAGE,), autograd=interpolate),
    Sample("interpolate", operands=((2, 3),), attrs={"scale_factor": None}, autograd=interpolate),
    *(
        Sample(
            "interpolate",
            operands=(Operand((2, 2, 3, 2), layout=layout),),
            attrs={**ATTRS, "mode": mode},
            autograd=interpolate,
        )
        for layout, mode in (
            ("transposed", "linear"),
            ("strided", "nearest"),
            ("expanded", "cubic"),
        )
    ),
    Sample(
        "interpolate",
        operands=(IMAGE,),
        attrs={**ATTRS, "mode": "linear"},
        autograd=interpolate,
        dtype=popxl.float64,
    ),
    *(
        Sample(
            "interpolate_grad",
            operands=((1, 1, 8, 4),),
            attrs={**ATTRS, "shape": (1, 1, 4, 3), "mode": mode},
            autograd=interpolate_grad,
        )
        for mode in ("nearest", "linear", "cubic")
    ),
    Sample(
        "interpolate_grad",
        operands=((2, 3),),
        attrs={**ATTRS, "scale_factor": (1.0, 1.0), "shape": (2, 3), "mode": "linear"},
        autograd=interpolate_grad,
    ),  # nothing to do
]


# Regions

ROIS = np.array(
    [[0, 0, 4, 3], [1.25, 0.5, 3.75, 2.25], [-2.5, -2, 1, 1], [2, 2, 2.25, 2.5], [3, 1, 6.5, 4.5]],
    np.float32,
)
"""A whole image, a part, one that starts outside, one below an element's size, and one that ends
outside.
"""
BATCH = np.array([0, 1, 1, 0, 1], np.int32)


def at(image, y, x):
    """An image [c, h, w] between its elements."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0 * image[:, 0, 0]
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    result = 0
    for row in {math.floor(y), min(math.floor(y) + 1, height - 1)}:
        for column in {math.floor(x), min(math.floor(x) + 1, width - 1)}:
            result = (
                result
                + max(0, 1 - abs(y - row)) * max(0, 1 - abs(x - column)) * image[:, row, column]
            )
    return result


def roi_align(t, rois, batch_index, output_size, spatial_scale, sampling_ratio):
    """Region by region, bin by bin, sample by sample."""
    rows, columns = output_size
    results = []
    for (x1, y1, x2, y2), n in zip((rois.detach() * spatial_scale).tolist(), batch_index.tolist()):
        height, width = max(y2 - y1, 1) / rows, max(x2 - x1, 1) / columns
        down, across = sampling_ratio or math.ceil(height), sampling_ratio or math.ceil(width)
        for i, j in np.ndindex(rows, columns):
            grid = [
                at(
                    t[n],
                    y1 + (i + (u + 0.5) / down) * height,
                    x1 + (j + (v + 0.5) / across) * width,
                )
                for u, v in np.ndindex(down, across)
            ]
            results.append(sum(grid) / len(grid))
    if not results:
        return t.new_zeros(0, t.shape[1], rows, columns)
    return torch.stack(results, -1).reshape(t.shape[1], len(rois), rows, columns).transpose(0, 1)


def roi_align_grad(dy, rois, batch_index, shape, spatial_scale, sampling_ratio):
    t = torch.zeros(shape, dtype=dy.dtype, requires_grad=True)
    y = roi_align(t, rois, batch_index, dy.shape[2:], spatial_scale, sampling_ratio)
    return torch.autograd.grad(y, t, dy, create_graph=True)[0]


def regions(output_size, spatial_scale, sampling_ratio, t=(2, 1, 4, 5), rois=ROIS, batch=BATCH):
    return Sample(
        "roi_align",
        operands=(t, rois, batch),
        attrs={
            "output_size": output_size,
            "spatial_scale": spatial_scale,
            "sampling_ratio": sampling_ratio,
        },
        autograd=roi_align,
        grads=("t",),
    )


ALIGNED = [
    regions((2, 3), 1.0, 2),
    regions((2, 2), 1.0, 0),
    regions((1, 1), 0.5, 0),
    regions((3, 1), 0.5, 1),
    regions((1, 2), 2.0, 3),
    regions((1, 2), 1.0, 1, t=(1, 1, 1, 1), batch=0 * BATCH),
    regions((2, 2), 1.0, 0, rois=ROIS[:0], batch=BATCH[:0]),
    regions((2, 2), 1.0, 1, batch=BATCH.astype(np.uint32)),
    regions(
        (1, 2),
        1.0,
        2,
        t=Operand((2, 3, 2, 3), layout="transposed"),
        rois=ROIS[1:4],
        batch=BATCH[1:4],
    ),
    regions(
        (2, 1), 1.0, 0, t=Operand((2, 2, 2, 3), layout="strided"), rois=ROIS[1:4], batch=BATCH[1:4]
    ),
    *(
        Sample(
            "roi_align_grad",
            operands=((rois.shape[0], 2, 2, 2), rois, BATCH[: len(rois)]),
            attrs={"shape": (2, 2, 3, 4), "spatial_scale": 1.0, "sampling_ratio": ratio},
            autograd=roi_align_grad,
            grads=("dy",),
        )
        for rois, ratio in ((ROIS, 0), (ROIS, 2), (ROIS[:1], 1))
    ),
    Sample(
        "roi_align_grad",
        operands=((0, 2, 2, 2), ROIS[:0], BATCH[:0]),
        attrs={"shape": (1, 2, 3, 4), "spatial_scale": 1.0, "sampling_ratio": 0},
        autograd=lambda dy, *others, shape, **attrs: (
            torch.zeros(shape, dtype=dy.dtype) + 0 * dy.sum()
        ),
        grads=("dy",),
    ),
]

SAMPLES = [*INTERPOLATED, *ALIGNED]


def refused(op, *operands, says, error=ShapeError, **attrs):
    if op == "roi_align":
        attrs = {"output_size": (2, 2), "spatial_scale": 1.0, "sampling_ratio": 1, **attrs}
    return Refusal(op, operands=operands, attrs=attrs, error=error, says=says)


REFUSALS = [
    refused("interpolate", (2, 3), says="expected 2 positive numbers, one for each axis"),
    refused("interpolate", (2, 3), scale_factor=(1.0, 0.0), says="expected 2 positive numbers"),
    refused(
        "interpolate", (2, 3), scale_factor=(1.0, math.nan), says="expected 2 positive numbers"
    ),
    refused(
        "interpolate",
        (2, 3),
        scale_factor=(1.0, 0.25),
        says="at least one element on each axis of the result",
    ),
    refused(
        "interpolate",
        IMAGE,
        mode="area",
        error=ValueError,
        says="got mode = 'area'; expected one of 'nearest'",
    ),
    refused(
        "interpolate",
        IMAGE,
        nearest_mode="round",
        error=ValueError,
        says="got nearest_mode = 'round'",
    ),
    refused(
        "interpolate",
        IMAGE,
        coordinate_transformation_mode="tf_crop_and_resize",
        error=ValueError,
        says="got coordinate_transformation_mode = 'tf_crop_and_resize'; expected one of "
        "'half_pixel'",
    ),
    refused(
        "interpolate",
        Operand(IMAGE, dtype=popxl.int32),
        error=DTypeError,
        says="expected floating point",
    ),
    refused("roi_align", (2, 4, 5), ROIS, BATCH, says=r"expected \[n, c, h, w\]"),
    refused("roi_align", IMAGE, (5, 3), BATCH, says=r"expected \[regions, 4\] and \[regions\]"),
    refused("roi_align", IMAGE, ROIS, BATCH[:2], says=r"expected \[regions, 4\] and \[regions\]"),
    refused(
        "roi_align",
        IMAGE,
        ROIS,
        ROIS[:, 0],
        error=DTypeError,
        says="got batch_index .* expected integers",
    ),
    refused(
        "roi_align", IMAGE, ROIS, BATCH, output_size=(0, 2), says="got output_size = .* at least 1"
    ),
    refused(
        "roi_align", IMAGE, ROIS, BATCH, output_size=(2,), says="got output_size = .* a tuple of 2"
    ),
    refused("roi_align", IMAGE, ROIS, BATCH, spatial_scale=0.0, says="got spatial_scale 0.0"),
    refused(
        "roi_align", IMAGE, ROIS, BATCH, sampling_ratio=-1, says="and sampling_ratio -1; expected"
    ),
    refused(
        "roi_align",
        IMAGE,
        Operand((5, 4), dtype=popxl.float64),
        BATCH,
        error=DTypeError,
        says="expected equal dtypes",
    ),
]

"""Samples of convolutions."""

import math

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError
from popxl.ops.windows import Window

from .sample import Operand, Refusal, Same, Sample

SAME = ("same_upper", "same_lower")


def halves(total, pad_type):
    """(begin, end) of an axis's padding: ONNX's rule for 'same_upper', and for all others."""
    less, more = total // 2, total - total // 2
    return (less, more) if pad_type == "same_upper" else (more, less)


def pads(sizes, spans, strides, padding, pad_type):
    """(begin, end) of each axis, by the formulas of ONNX's Conv."""
    if pad_type in SAME:
        totals = [
            max(0, (math.ceil(x / s) - 1) * s + span - x)
            for x, span, s in zip(sizes, spans, strides)
        ]
        return [halves(total, pad_type) for total in totals]
    padding = padding or (0,) * (2 * len(sizes))
    return list(zip(padding[: len(sizes)], padding[len(sizes) :]))


def spread(around):
    """Padding of each axis as torch's `pad` takes it."""
    return [amount for pair in reversed(around) for amount in pair]


def met(wide, point, strides, dilations, counts):
    """What one point of the window meets at every place."""
    at = [
        slice(p * d, p * d + (y - 1) * s + 1, s)
        for p, d, y, s in zip(point, dilations, counts, strides)
    ]
    return wide[(slice(None), slice(None), *at)]


def grouped(t, groups):
    return t.reshape(t.shape[0], groups, t.shape[1] // groups, *t.shape[2:])


def geometry(weight, stride, dilation):
    kernel = weight.shape[2:]
    strides, dilations = stride or (1,) * len(kernel), dilation or (1,) * len(kernel)
    return strides, dilations, [d * (k - 1) + 1 for d, k in zip(dilations, kernel)]


def conv(
    t, weight, stride=None, padding=None, dilation=None, groups=1, pad_type="not_set", **hints
):
    """Point by point of the window: the sum over the group's channels of elements times weights."""
    strides, dilations, spans = geometry(weight, stride, dilation)
    around = pads(t.shape[2:], spans, strides, padding, pad_type)
    wide = torch.nn.functional.pad(t, spread(around))
    counts = [(x - span) // s + 1 for x, span, s in zip(wide.shape[2:], spans, strides)]
    result = 0
    for point in np.ndindex(*weight.shape[2:]):
        w = weight[(slice(None), slice(None), *point)].reshape(groups, -1, weight.shape[1])
        part = grouped(met(wide, point, strides, dilations, counts), groups)
        result = result + torch.einsum("ngc...,goc->ngo...", part, w)
    return result.reshape(t.shape[0], weight.shape[0], *counts)


def torch_conv(
    t, weight, stride=None, padding=None, dilation=None, groups=1, pad_type="not_set", **hints
):
    strides, dilations, spans = geometry(weight, stride, dilation)
    around = pads(t.shape[2:], spans, strides, padding, pad_type)
    function = getattr(torch.nn.functional, f"conv{t.ndim - 2}d")
    wide = torch.nn.functional.pad(torch.from_numpy(t), spread(around))
    return function(wide, torch.from_numpy(weight), None, strides, 0, dilations, groups).numpy()


def transposed_sizes(t, weight, strides, spans, padding, pad_type, output_padding, output_shape):
    """(full size, begin, size) of each axis, by the formulas of ONNX's ConvTranspose."""
    more = output_padding or (0,) * len(strides)
    full = [s * (x - 1) + span + e for x, s, span, e in zip(t.shape[2:], strides, spans, more)]
    if pad_type in SAME or output_shape:
        sizes = output_shape[2:] if output_shape else [s * x for s, x in zip(strides, t.shape[2:])]
        return [(n, halves(max(0, n - size), pad_type)[0], size) for n, size in zip(full, sizes)]
    around = pads(t.shape[2:], spans, strides, padding, "not_set")
    return [(n, begin, n - begin - end) for n, (begin, end) in zip(full, around)]


def cropped(full, sizes):
    """Zeros are added where a size reaches beyond."""
    for axis, (_, begin, size) in enumerate(sizes, 2):
        missing = begin + size - full.shape[axis]
        if missing > 0:
            zeros = full.new_zeros([missing if a == axis else n for a, n in enumerate(full.shape)])
            full = torch.cat([full, zeros], axis)
        full = full.narrow(axis, begin, size)
    return full


def conv_transpose(
    t,
    weight,
    stride=None,
    padding=None,
    dilation=None,
    groups=1,
    pad_type="not_set",
    output_padding=None,
    output_shape=None,
):
    """Each element adds its multiple of the weights."""
    strides, dilations, spans = geometry(weight, stride, dilation)
    sizes = transposed_sizes(
        t, weight, strides, spans, padding, pad_type, output_padding, output_shape
    )
    out = weight.shape[1] * groups
    full = t.new_zeros(t.shape[0], out, *(n for n, _, _ in sizes))
    for point in np.ndindex(*weight.shape[2:]):
        w = weight[(slice(None), slice(None), *point)].reshape(groups, -1, weight.shape[1])
        part = torch.einsum("ngc...,gco->ngo...", grouped(t, groups), w).reshape(
            t.shape[0], out, *t.shape[2:]
        )
        met(full, point, strides, dilations, t.shape[2:]).add_(part)
    return cropped(full, sizes)


def torch_conv_transpose(t, weight, stride=None, dilation=None, groups=1, **padded):
    strides, dilations, spans = geometry(weight, stride, dilation)
    given = [padded.get(n) for n in ("padding", "pad_type", "output_padding", "output_shape")]
    sizes = transposed_sizes(t, weight, strides, spans, *given)
    function = getattr(torch.nn.functional, f"conv_transpose{t.ndim - 2}d")
    full = function(
        torch.from_numpy(t), torch.from_numpy(weight), None, strides, 0, 0, groups, dilations
    )
    return cropped(full, sizes).numpy()


def conv_weight_grad(t, dy, windows, groups):
    """Point by point: the sum over samples and places of elements times gradients."""
    strides, dilations = [w.stride for w in windows], [w.dilation for w in windows]
    ends = [
        max(0, (w.count - 1) * w.stride + w.dilation * (w.kernel - 1) + 1 - w.begin - w.size)
        for w in windows
    ]
    wide = torch.nn.functional.pad(t, spread([(w.begin, end) for w, end in zip(windows, ends)]))
    parts = []
    for point in np.ndindex(*(w.kernel for w in windows)):
        part = grouped(met(wide, point, strides, dilations, dy.shape[2:]), groups)
        parts.append(
            torch.einsum("ngcp,ngop->goc", part.flatten(3), grouped(dy, groups).flatten(3))
        )
    return torch.stack(parts, -1).reshape(
        dy.shape[1], t.shape[1] // groups, *(w.kernel for w in windows)
    )


def forward(*operands, **attrs):
    return Sample("conv", operands=operands, attrs=attrs, autograd=conv, oracle=torch_conv)


def backward(*operands, **attrs):
    return Sample(
        "conv_transpose",
        operands=operands,
        attrs=attrs,
        autograd=conv_transpose,
        oracle=torch_conv_transpose,
    )


HINTS = {
    "available_memory_proportions": [0.4],
    "partials_types": ["half"],
    "enable_conv_dithering": [1],
}

SAMPLES = [
    forward((2, 3, 5, 4), (4, 3, 3, 2)),
    # unequal on all sides
    forward((1, 2, 5, 6), (2, 2, 2, 2), stride=(2, 1), padding=(1, 0, 2, 1), dilation=(1, 2)),
    forward((1, 2, 5, 5), (3, 2, 3, 3), padding=(1, 1, 1, 1)),
    forward((2, 4, 4, 3), (6, 2, 2, 2), groups=2),
    # each channel by itself
    forward((1, 3, 4, 3), (6, 1, 3, 2), stride=(1, 2), padding=(1, 1, 1, 1), groups=3),
    *(forward((1, 2, 5, 4), (2, 2, 2, 3), stride=(2, 3), pad_type=p) for p in (*SAME, "valid")),
    *(
        forward((1, 1, 6, 3), (1, 1, 2, 2), stride=(1, 1), dilation=(3, 1), pad_type=p)
        for p in SAME
    ),
    # no padding is needed
    forward((1, 1, 4, 4), (1, 1, 1, 1), stride=(3, 3), pad_type="same_upper"),
    forward((1, 1, 6, 7), (1, 1, 2, 2), stride=(4, 3)),  # the last elements are left out
    forward((2, 3, 7), (2, 3, 3), stride=(2,), padding=(1, 2), dilation=(2,)),
    forward((1, 2, 5), (4, 1, 2), stride=None, padding=None, dilation=None, groups=2),
    forward(
        (1, 2, 3, 3, 2),
        (2, 1, 2, 2, 2),
        stride=(1, 2, 1),
        padding=(0, 1, 0, 1, 0, 1),
        dilation=None,
        groups=2,
    ),
    forward((1, 1, 1, 1), (1, 1, 1, 1)),
    forward((1, 1, 1, 2), (1, 1, 3, 3), padding=(1, 1, 1, 1)),  # more padding than elements
    forward((0, 2, 4, 4), (3, 2, 3, 3)),
    forward((0, 2, 4, 4), (3, 2, 3, 3), padding=(0, 0, 1, 2), stride=(2, 2)),
    forward((2, 2, 3, 3), Same(0)),
    forward(Operand((2, 2, 4, 3), layout="transposed"), Operand((3, 2, 2, 2), layout="strided")),
    forward(
        Operand((2, 2, 4, 3), layout="expanded"),
        Operand((3, 2, 2, 2), layout="transposed"),
        padding=(1, 0, 0, 2),
    ),
    forward((1, 1, 3, 3), (1, 1, 2, 2), **HINTS),
    Sample("conv", operands=((1, 2, 4, 3), (2, 2, 2, 2)), autograd=conv, dtype=popxl.float64),
    # 16-bit sums of many terms would be off by more than one rounding.
    # too slow to differentiate
    Sample("conv", operands=((1, 64, 3, 3), (2, 64, 3, 3)), autograd=conv, grads=None),
    backward((2, 3, 3, 4), (3, 2, 3, 2)),
    backward((1, 2, 3, 3), (2, 2, 3, 2), stride=(2, 3), padding=(1, 0, 0, 1), dilation=(1, 2)),
    backward(
        (1, 2, 3, 2), (2, 2, 3, 3), stride=(2, 2), padding=(1, 1, 1, 1), output_padding=(1, 0)
    ),
    # as much as dilation allows
    backward((1, 1, 3, 2), (1, 1, 2, 2), dilation=(3, 2), output_padding=(2, 1)),
    backward((2, 4, 2, 3), (4, 3, 2, 2), stride=(2, 1), groups=2),
    *(backward((1, 2, 3, 2), (2, 1, 4, 3), stride=(2, 1), pad_type=p) for p in (*SAME, "valid")),
    # t does not reach so far
    *(backward((1, 1, 3, 2), (1, 1, 1, 2), stride=(2, 3), pad_type=p) for p in SAME),
    *(
        backward((1, 1, 3, 3), (1, 1, 3, 3), stride=(2, 2), output_shape=(1, 1, 6, 4), pad_type=p)
        for p in SAME
    ),
    backward(
        (1, 1, 3, 3), (1, 1, 3, 3), stride=(2, 2), output_shape=(1, 1, 6, 9), output_padding=(1, 1)
    ),
    backward((2, 3, 4), (3, 2, 3), stride=(2,), padding=(1, 2), dilation=None),
    backward(
        (1, 2, 2, 2, 2), (2, 1, 2, 1, 2), stride=(2, 1, 2), padding=None, dilation=None, groups=2
    ),
    backward((1, 1, 1, 1), (1, 1, 1, 1)),
    backward((0, 2, 2, 2), (2, 3, 2, 2)),
    backward((0, 2, 2, 2), (2, 3, 2, 2), stride=(2, 2), padding=(0, 1, 1, 0)),
    backward(Operand((2, 2, 2, 3), layout="transposed"), Operand((2, 3, 2, 2), layout="strided")),
    Sample(
        "conv_transpose",
        operands=((1, 2, 3, 3), (2, 2, 2, 2)),
        attrs=HINTS,
        autograd=lambda t, weight, **hints: conv_transpose(t, weight),
    ),
    *(
        Sample(
            "conv_weight_grad",
            operands=operands,
            attrs={"windows": windows, "groups": groups},
            autograd=conv_weight_grad,
        )
        for operands, windows, groups in (
            (((2, 2, 4, 3), (2, 3, 2, 3)), (Window(4, 2, 2, 1, 0, 2), Window(3, 2, 1, 1, 1, 3)), 1),
            (((1, 4, 5), (1, 2, 3)), (Window(5, 2, 2, 2, 1, 3),), 2),
            (((0, 2, 3), (0, 2, 2)), (Window(3, 2, 1, 1, 0, 2),), 1),
        )
    ),
]


def refused(op, *operands, says, error=ShapeError, **attrs):
    return Refusal(op, operands=operands, attrs=attrs, error=error, says=says)


IMAGE, WEIGHT = (1, 4, 5, 5), (2, 4, 3, 3)

REFUSALS = [
    refused("conv", (4, 5), (2, 4), says=r"expected \[n, c, ...\] with 1 to 3 spatial axes"),
    refused("conv", (1, 1, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1), says="1 to 3 spatial axes"),
    refused(
        "conv",
        (1, 4, 0, 5),
        WEIGHT,
        says="expected at least one channel, and one element on each axis",
    ),
    refused("conv", IMAGE, (2, 4, 3), says="expected 4 axes that are not empty"),
    refused("conv", IMAGE, (2, 4, 0, 3), says="expected 4 axes that are not empty"),
    refused(
        "conv",
        IMAGE,
        (2, 3, 3, 3),
        says=r"expected weight \[out, channels / groups, ...\] with 4 channels",
    ),
    refused("conv", IMAGE, WEIGHT, groups=2, says="groups that divide channels and outputs"),
    refused("conv", IMAGE, (3, 2, 3, 3), groups=2, says="groups that divide channels and outputs"),
    refused("conv", IMAGE, WEIGHT, groups=0, says="got weight .* and groups 0"),
    refused("conv", IMAGE, WEIGHT, stride=(1,), says=r"got stride = \(1,\); expected a tuple of 2"),
    refused(
        "conv",
        IMAGE,
        WEIGHT,
        stride=(1, 0),
        says="one whole number of at least 1 for each spatial axis",
    ),
    refused(
        "conv",
        IMAGE,
        WEIGHT,
        dilation=(1.5, 1),
        says="got dilation = .* one whole number of at least 1",
    ),
    refused("conv", IMAGE, WEIGHT, stride=2, says="got stride = 2; expected a tuple of 2"),
    refused(
        "conv",
        IMAGE,
        WEIGHT,
        padding=(1, 1),
        says="expected a tuple of 4, .* each begin and then each end",
    ),
    refused("conv", IMAGE, WEIGHT, padding=(-1, 0, 0, 0), says="whole number of at least 0"),
    refused(
        "conv",
        IMAGE,
        WEIGHT,
        pad_type="same",
        error=ValueError,
        says="expected one of 'not_set', 'same_upper'",
    ),
    refused(
        "conv", IMAGE, WEIGHT, pad_type="valid", padding=(1, 0, 0, 0), says="expected one of them"
    ),
    refused(
        "conv",
        IMAGE,
        WEIGHT,
        dilation=(3, 1),
        says="a window of 7 positions for 0 .* expected a window that fits",
    ),
    refused(
        "conv",
        IMAGE,
        Operand(WEIGHT, dtype=popxl.float16),
        error=DTypeError,
        says="expected equal dtypes",
    ),
    refused(
        "conv",
        Operand(IMAGE, dtype=popxl.int32),
        Operand(WEIGHT, dtype=popxl.int32),
        error=DTypeError,
        says="expected floating point",
    ),
    Refusal(
        "conv",
        attrs={"t": 1.0, "weight": 2.0},
        error=TypeError,
        says="got t = float; expected a popxl.Tensor",
    ),
    refused(
        "conv_transpose",
        IMAGE,
        (3, 2, 3, 3),
        says=r"expected weight \[channels, out / groups, ...\]",
    ),
    refused("conv_transpose", IMAGE, (4, 2, 3, 3), groups=3, says="groups that divide"),
    refused(
        "conv_transpose",
        IMAGE,
        (4, 2, 3, 3),
        output_padding=(1, 0),
        says="expected less than stride 1 or",
    ),
    refused(
        "conv_transpose",
        IMAGE,
        (4, 2, 3, 3),
        output_padding=(1,),
        says="got output_padding = .* a tuple of 2",
    ),
    refused(
        "conv_transpose",
        IMAGE,
        (4, 2, 3, 3),
        output_shape=(1, 2, 6, 6),
        padding=(1, 1, 1, 1),
        says=r"got output_shape \(1, 2, 6, 6\) and padding .* expected one of them",
    ),
    refused(
        "conv_transpose",
        IMAGE,
        (4, 2, 3, 3),
        output_shape=(6, 6),
        says="got output_shape = .* a tuple of 4",
    ),
    refused(
        "conv_transpose",
        IMAGE,
        (4, 2, 3, 3),
        output_shape=(1, 3, 6, 6),
        says="begins with 1 samples and 2 chan",
    ),
    refused(
        "conv_transpose", (1, 4, 2, 2), (4, 2, 1, 1), padding=(1, 0, 1, 0), says="that is not empty"
    ),
    refused(
        "conv_transpose",
        IMAGE,
        (4, 2, 3, 3),
        pad_type=None,
        error=ValueError,
        says="expected one of 'not_set'",
    ),
]

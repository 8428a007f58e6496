"""Samples of pooling."""

import math

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError
from popxl.ops.windows import Window

from .convolution import SAME, pads, spread
from .sample import Operand, Refusal, Sample


def places(x, k, s, d, begin, end, spacing, ceil_mode, given):
    """The elements in each window along an axis: by walking over begin, elements and end."""
    holds = {begin + i * spacing: i for i in range(x)}
    last, span = begin + spacing * (x - 1), d * (k - 1) + 1
    length, start, found = last + 1 + end, 0, []
    while start + span <= length or (ceil_mode and start + span - length < s and start <= last):
        if len(found) == given:
            break
        found.append([holds[start + p * d] for p in range(k) if start + p * d in holds])
        start += s
    return found


def pool(reduce):
    """``reduce`` over the elements of each window, by hand."""

    def pooled(
        t,
        kernel_size,
        stride=None,
        padding=None,
        out_pads=None,
        dilation=None,
        in_dilations=None,
        auto_pad="not_set",
        ceil_mode=False,
        storage_order="row",
    ):
        ones = (1,) * len(kernel_size)
        stride, dilation, spacing = stride or ones, dilation or ones, in_dilations or ones
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel_size)]
        extents = [g * (x - 1) + 1 for g, x in zip(spacing, t.shape[2:])]
        around = pads(extents, spans, stride, padding, auto_pad)
        given = [math.ceil(x / s) if auto_pad in SAME else None for x, s in zip(extents, stride)]
        axes = [
            places(x, k, s, d, *pair, g, ceil_mode and auto_pad == "not_set", n)
            for x, k, s, d, pair, g, n in zip(
                t.shape[2:], kernel_size, stride, dilation, around, spacing, given
            )
        ]
        result = by_hand(t, axes, reduce)
        ends = pads(result.shape[2:], None, None, out_pads, "not_set")
        return torch.nn.functional.pad(result, spread(ends))

    return pooled


def by_hand(t, axes, reduce):
    found = []
    for place in np.ndindex(*map(len, axes)):
        part = t
        for axis, windows, i in zip(range(2, t.dim()), axes, place):
            part = part.index_select(axis, torch.tensor(windows[i], dtype=torch.int64))
        found.append(reduce(part.flatten(2)))
    return torch.stack(found, -1).reshape(*t.shape[:2], *map(len, axes))


def mean(part):
    return part.mean(-1)


def largest(part):
    return part.amax(-1)


average_pool, max_pool = pool(mean), pool(largest)


def windows_by_hand(windows):
    """`places` for each window, which says how many there are."""
    return [
        places(w.size, w.kernel, w.stride, w.dilation, w.begin, w.count * w.stride + w.kernel * w.dilation, w.spacing,
               False, w.count)
        for w in windows
    ]  # fmt: skip


def pool_grad(reduce):
    def gradient(dy, t, windows):
        with torch.enable_grad():
            t = t.detach().requires_grad_()
            return torch.autograd.grad(
                by_hand(t, windows_by_hand(windows), reduce), t, dy, create_graph=True
            )[0]

    return gradient


def average_pool_grad(dy, windows):
    t = torch.zeros(*dy.shape[:2], *(w.size for w in windows), dtype=dy.dtype)
    return pool_grad(mean)(dy, t, windows)


def torchs(function):
    """torch's own pooling, in its own words."""

    def pooled(t, kernel_size, stride, padding=None, ceil_mode=False, dilation=None):
        options = {} if dilation is None else {"dilation": dilation}
        if "avg" in function:
            options["count_include_pad"] = False
        half = padding[: len(kernel_size)] if padding else 0
        torch_function = getattr(torch.nn.functional, f"{function}{t.ndim - 2}d")
        return torch_function(
            torch.from_numpy(t), kernel_size, stride, half, ceil_mode=ceil_mode, **options
        ).numpy()

    return pooled


IMAGE = (2, 2, 5, 4)
COMMON = [
    (IMAGE, {"kernel_size": (2, 3)}),
    (IMAGE, {"kernel_size": (2, 2), "stride": (2, 3)}),
    # unequal on all sides
    (IMAGE, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0, 2, 1)}),
    (IMAGE, {"kernel_size": (2, 2), "dilation": (3, 2)}),
    (IMAGE, {"kernel_size": (2, 2), "in_dilations": (2, 1), "stride": (3, 1)}),
    (
        IMAGE,
        {
            "kernel_size": (3, 2),
            "in_dilations": (2, 2),
            "padding": (1, 0, 0, 1),
            "dilation": (1, 1),
        },
    ),
    (IMAGE, {"kernel_size": (4, 4), "out_pads": (1, 0, 2, 1)}),
    *((IMAGE, {"kernel_size": (2, 3), "stride": (3, 3), "auto_pad": p}) for p in (*SAME, "valid")),
    # one more, on either side
    *((IMAGE, {"kernel_size": (2, 2), "stride": (1, 1), "auto_pad": p}) for p in SAME),
    ((1, 1, 3, 3), {"kernel_size": (1, 1), "stride": (2, 2), "auto_pad": "same_lower"}),
    ((2, 2, 4), {"kernel_size": (3,), "stride": (2,), "padding": (1, 0)}),
    ((1, 1, 3, 2, 3), {"kernel_size": (2, 2, 1), "padding": (1, 0, 0, 0, 1, 0)}),
    ((1, 1, 2, 2, 3, 2), {"kernel_size": (2, 1, 2, 2), "stride": (1, 1, 1, 1)}),
    ((1, 1, 1, 1), {"kernel_size": (1, 1)}),
    ((1, 1, 1, 2), {"kernel_size": (2, 1), "padding": (1, 0, 0, 0)}),
    ((0, 2, 3, 3), {"kernel_size": (2, 2)}),
]
CEIL = [
    ((1, 1, 5, 6), {"kernel_size": (2, 3), "stride": (2, 2), "ceil_mode": True}),
    # one drops
    (
        (1, 1, 5, 4),
        {"kernel_size": (3, 2), "stride": (2, 3), "ceil_mode": True, "padding": (1, 1, 1, 1)},
    ),
    ((1, 1, 5), {"kernel_size": (3,), "stride": (3,), "ceil_mode": True, "padding": (1, 1)}),
    # the only window reaches beyond the end
    ((1, 1, 2), {"kernel_size": (3,), "stride": (2,), "ceil_mode": True}),
]
TORCHS = [
    ((2, 2, 5, 4), {"kernel_size": (2, 3), "stride": (2, 1)}),
    ((1, 2, 5, 4), {"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 1, 1, 1)}),
    (
        (1, 1, 4, 3, 3),
        {"kernel_size": (2, 2, 3), "stride": (2, 1, 2), "padding": (0, 1, 1, 0, 1, 1)},
    ),
    *CEIL,
]
TIES = np.array([[0, 3, 1, 1], [3, 0, 1, 1], [2, 0, 2, 2]], np.float32).reshape(1, 1, 3, 4)
"""Windows whose largest element is there twice (in the first, in neither the same row nor column)
or four times.
"""
NOT_A_NUMBER = np.array([[0, 3, 1, np.nan], [3, 0, 1, 1], [2, 0, 2, 2]], np.float32).reshape(
    1, 1, 3, 4
)
TIED = (Window(3, 2, 1, 1, 0, 2), Window(4, 2, 1, 1, 0, 3))


def torch_ties(dy, t, windows):
    t = torch.from_numpy(t).requires_grad_()
    y = torch.nn.functional.max_pool2d(t, [w.kernel for w in windows], [w.stride for w in windows])
    return torch.autograd.grad(y, t, torch.from_numpy(dy))


def sample(op, shape, attrs, **oracles):
    return Sample(op, operands=(Operand(shape, distinct=True),), attrs=attrs, **oracles)


GRADS = [
    ((2, 1, 2, 2), (2, 1, 4, 3), (Window(4, 3, 2, 1, 1, 2), Window(3, 2, 2, 1, 0, 2))),
    ((1, 2, 3), (1, 2, 3), (Window(3, 2, 2, 1, 1, 3, 2),)),
    # some elements in no window
    ((1, 1, 1, 1), (1, 1, 4, 4), (Window(4, 2, 1, 2, 0, 1), Window(4, 2, 1, 1, 0, 1))),
]

SAMPLES = [
    *(sample("average_pool", shape, attrs, autograd=average_pool) for shape, attrs in (*COMMON, *CEIL)),
    *(sample("average_pool", shape, attrs, oracle=torchs("avg_pool")) for shape, attrs in TORCHS),
    *(sample("max_pool", shape, attrs, autograd=max_pool) for shape, attrs in (*COMMON, *CEIL)),
    *(sample("max_pool", shape, attrs, oracle=torchs("max_pool")) for shape, attrs in TORCHS),
    sample("max_pool", IMAGE, {"kernel_size": (2, 2), "storage_order": "column"}, autograd=max_pool),
    *(
        sample("max_pool", (1, 1, 4), {"kernel_size": (2,), "stride": (3,), "ceil_mode": True, "auto_pad": p},
               autograd=max_pool)
        for p in (*SAME, "valid")
    ),
    sample("max_pool", (1, 1, 5), {"kernel_size": (2,), "stride": (1,), "dilation": (2,)}, oracle=torchs("max_pool")),
    *(
        Sample(op, operands=(Operand((2, 2, 3, 4), layout=layout, distinct=True),), attrs={"kernel_size": (2, 2)},
               autograd=fn)
        for op, fn in (("average_pool", average_pool), ("max_pool", max_pool))
        for layout in ("transposed", "strided", "expanded")
    ),
    sample("average_pool", IMAGE, {"kernel_size": (2, 2)}, autograd=average_pool, dtype=popxl.float64),
    # Negative infinity is a number, padding is none.
    Sample(
        "max_pool",
        operands=(np.array([-np.inf, -np.inf, 1, np.inf], np.float32).reshape(1, 1, 4),),
        attrs={"kernel_size": (2,), "padding": (1, 0)},
        autograd=max_pool,
        grads=None,  # differences of infinities
    ),
    *(
        Sample("average_pool_grad", operands=(dy,), attrs={"windows": windows}, autograd=average_pool_grad)
        for dy, _, windows in GRADS
    ),
    *(
        Sample("max_pool_grad", operands=(dy, Operand(t, distinct=True)), attrs={"windows": windows},
               autograd=pool_grad(largest))
        for dy, t, windows in GRADS
    ),
    Sample("max_pool_grad", operands=((1, 1, 2, 3), TIES), attrs={"windows": TIED}, oracle=torch_ties),
    Sample("max_pool_grad", operands=((1, 1, 2, 3), NOT_A_NUMBER), attrs={"windows": TIED}, oracle=torch_ties),
    Sample(
        "max_pool_grad",
        operands=((1, 1, 2), np.array([1.0, np.nan, 2.0], np.float32).reshape(1, 1, 3)),
        attrs={"windows": (Window(3, 2, 1, 1, 0, 2),)},
        oracle=lambda dy, t, windows: np.stack([0 * dy[..., 0], dy.sum(-1), 0 * dy[..., 0]], -1),
    ),  # the gradient of a maximum that is not a number arrives there, and there only
]  # fmt: skip


def refused(says, error=ShapeError, shape=IMAGE, op="average_pool", **attrs):
    return Refusal(
        op, operands=(shape,), attrs={"kernel_size": (2, 2), **attrs}, error=error, says=says
    )


REFUSALS = [
    refused("with at least one spatial axes", shape=(2, 3)),
    refused("one element on each axis", shape=(2, 3, 0, 2)),
    refused(r"got kernel_size = \(2,\); expected a tuple of 2", kernel_size=(2,)),
    refused(r"got kernel_size = \(\); expected a tuple of 2", kernel_size=None),
    refused("got kernel_size = 2; expected a tuple of 2", kernel_size=2),
    refused("one whole number of at least 1", stride=(0, 1)),
    refused("got in_dilations = .* at least 1", in_dilations=(0, 1)),
    refused("got out_pads = .* a tuple of 4", out_pads=(1, 1)),
    refused("got padding = .* at least 0", padding=(0, 0, 0, -1)),
    refused("a window of 6 positions .* expected a window that fits", kernel_size=(6, 1)),
    refused("a window without any element of t .* on spatial axis 1", padding=(0, 2, 0, 0)),
    refused("a window without any element", in_dilations=(3, 1)),
    refused("got auto_pad = 'same'; expected one of 'not_set'", error=ValueError, auto_pad="same"),
    refused("got auto_pad = 'valid' and padding", auto_pad="valid", padding=(1, 0, 0, 0)),
    refused(
        "got storage_order = 'diagonal'", error=ValueError, op="max_pool", storage_order="diagonal"
    ),
    refused(
        "expected floating point",
        error=DTypeError,
        op="max_pool",
        shape=Operand(IMAGE, dtype=popxl.int32),
    ),
    Refusal(
        "max_pool",
        attrs={"t": 1.0, "kernel_size": (2,)},
        error=TypeError,
        says="expected a popxl.Tensor",
    ),
]

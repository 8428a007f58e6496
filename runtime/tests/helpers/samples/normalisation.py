"""Samples of softmax and normalisations."""

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample


def softmax(t, axis):
    e = torch.exp(t - t.max())
    return e / e.sum(axis, keepdim=True)


def softmax_grad(dy, y, axis):
    return y * (dy - (y * dy).sum(axis, keepdims=True))


def group_norm(t, weight, bias, num_groups=1, eps=1e-5):
    """The normalisation by the textbook, sample by sample and group by group."""
    flat = t.reshape(t.shape[0], num_groups, -1)
    mean = flat.mean(-1, keepdim=True)
    var = ((flat - mean) ** 2).mean(-1, keepdim=True)
    normalised = ((flat - mean) / torch.sqrt(var + eps)).reshape(t.shape)
    per_channel = [-1] + [1] * (t.dim() - 2)
    return normalised * weight.reshape(per_channel) + bias.reshape(per_channel)


def group_norm_grad(dy, t, weight, num_groups, eps):
    leaves = [torch.from_numpy(a).requires_grad_() for a in (t, weight, np.zeros(weight.shape))]
    return torch.autograd.grad(group_norm(*leaves, num_groups, eps), leaves, torch.from_numpy(dy))


def rms_norm(t, weight, eps=1e-5, offset=0.0):
    return t / torch.sqrt((t**2).mean(1, keepdim=True) + eps) * (weight + offset)


def rms_norm_grad(dy, t, weight, eps, offset=0.0):
    leaves = [torch.from_numpy(a).requires_grad_() for a in (t, weight)]
    return torch.autograd.grad(rms_norm(*leaves, eps, offset), leaves, torch.from_numpy(dy))


def merge_moments(own, slices):
    """The statistics of rows of which every slice is (mean + rest - s, mean + rest + s)."""
    centres = slices[..., 0] + slices[..., 1]
    spreads = np.sqrt(slices[..., 2])
    rows = np.stack([centres - spreads, centres + spreads])
    return own[:, :1] - rows.mean((0, 1))[:, None], rows.var((0, 1))[:, None]


def batch_norm(t, scale, bias, mean, var, epsilon=1e-5, momentum=0.9):
    shape = [-1] + [1] * (t.dim() - 2)
    scale, bias, mean, var = (v.reshape(shape) for v in (scale, bias, mean, var))
    return (t - mean) / torch.sqrt(var + epsilon) * scale + bias


def batch_norm_grad(dy, t, scale, mean, var, epsilon):
    leaves = [
        torch.from_numpy(a).requires_grad_() for a in (t, scale, np.zeros(scale.shape), mean, var)
    ]
    return torch.autograd.grad(batch_norm(*leaves, epsilon), leaves, torch.from_numpy(dy))


def statistics(channels):
    """scale, bias, mean and (positive) variance."""
    return ((channels,), (channels,), (channels,), Operand((channels,), low=0.3, high=2.0))


SAMPLES = [
    *(
        Sample("softmax", operands=((2, 3, 4),), attrs={"axis": axis}, autograd=softmax)
        for axis in (0, 1, -1)
    ),
    Sample(
        "softmax",
        operands=(Operand((3, 4), layout="transposed"),),
        attrs={"axis": 1},
        autograd=softmax,
    ),
    Sample(
        "softmax",
        operands=(Operand((3, 4), layout="strided"),),
        attrs={"axis": 0},
        autograd=softmax,
    ),
    Sample(
        "softmax",
        operands=(Operand((2, 5), low=-900.0, high=900.0),),
        attrs={"axis": 1},
        autograd=softmax,
        in_16_bits=False,
        grads=None,
    ),  # no overflow; one probability is 1 and differences see rounding only
    Sample(
        "softmax_grad",
        operands=((3, 4), Operand((3, 4), low=0.0, high=1.0)),
        attrs={"axis": 1},
        oracle=softmax_grad,
    ),
    Sample("layer_norm", operands=((3, 5), (5,), (5,)), autograd=group_norm),
    Sample(
        "layer_norm",
        operands=((3, 5), (5,), (5,)),
        attrs={"eps": 0.1},
        autograd=lambda t, w, b, eps: group_norm(t, w, b, 1, eps),
    ),
    Sample("layer_norm", operands=((2, 3, 4), (3,), (3,)), autograd=group_norm),
    Sample(
        "layer_norm",
        operands=(Operand((3, 5), layout="transposed"), (5,), Operand((5,), layout="strided")),
        autograd=group_norm,
    ),
    Sample("layer_norm", operands=((3, 5), (5,), (5,)), autograd=group_norm, dtype=popxl.float64),
    # A mean far from zero: in 16 bits the statistics would lose the spread.
    Sample(
        "layer_norm",
        operands=(Operand((2, 400), low=30.0, high=32.0), (400,), (400,)),
        autograd=group_norm,
        grads=None,
        rtol=1e-4,
        atol=1e-4,
    ),  # float32 statistics of numbers near 31 keep five digits of the spread
    Sample("rms_norm", operands=((3, 5), (5,)), autograd=rms_norm),
    *(
        Sample("rms_norm", operands=((3, 5), (5,)), attrs=attrs, autograd=rms_norm)
        for attrs in ({"eps": 0.1}, {"offset": 1.5})
    ),
    Sample(
        "rms_norm",
        operands=(Operand((3, 5), layout="transposed"), Operand((5,), layout="strided")),
        autograd=rms_norm,
    ),
    Sample("rms_norm", operands=((3, 5), (5,)), autograd=rms_norm, dtype=popxl.float64),
    Sample(
        "rms_norm_grad",
        operands=((3, 5), (3, 5), (5,)),
        attrs={"eps": 0.1, "offset": 1.0},
        oracle=rms_norm_grad,
    ),
    *(
        Sample(
            "merge_moments",
            operands=((4, 3), Operand((size, 4, 3), low=0.1, high=2.0)),
            oracle=merge_moments,
            in_16_bits=False,
        )
        for size in (1, 2, 3, 4, 5, 16)
    ),
    Sample(
        "group_norm", operands=((2, 6), (6,), (6,)), attrs={"num_groups": 2}, autograd=group_norm
    ),
    Sample(
        "group_norm", operands=((2, 6, 3), (6,), (6,)), attrs={"num_groups": 3}, autograd=group_norm
    ),
    Sample(
        "group_norm",
        operands=((2, 4, 3, 2), (4,), (4,)),
        attrs={"num_groups": 1, "eps": 0.01},
        autograd=group_norm,
    ),
    Sample(
        "group_norm",
        operands=(Operand((2, 6, 3), layout="transposed"), (6,), (6,)),
        attrs={"num_groups": 2},
        autograd=group_norm,
    ),
    Sample(
        "group_norm_grad",
        operands=((3, 5), (3, 5), (5,)),
        attrs={"num_groups": 1, "eps": 1e-5},
        oracle=group_norm_grad,
    ),
    Sample(
        "group_norm_grad",
        operands=((2, 4, 3), (2, 4, 3), (4,)),
        attrs={"num_groups": 2, "eps": 1e-5},
        oracle=group_norm_grad,
    ),
    Sample("batch_norm_inference", operands=((3, 4), *statistics(4)), autograd=batch_norm),
    Sample(
        "batch_norm_inference",
        operands=((2, 3, 4, 2), *statistics(3)),
        attrs={"epsilon": 0.1},
        autograd=batch_norm,
    ),
    Sample(
        "batch_norm_inference",
        operands=(Operand((2, 3, 4), layout="transposed"), *statistics(3)),
        autograd=batch_norm,
    ),
    Sample(
        "batch_norm_inference_grad",
        operands=((3, 4), (3, 4), (4,), (4,), Operand((4,), low=0.3, high=2.0)),
        attrs={"epsilon": 1e-5},
        oracle=batch_norm_grad,
    ),
]

REFUSALS = [
    Refusal(
        "softmax",
        operands=((3, 4),),
        attrs={"axis": 2},
        error=ShapeError,
        says="expected -2 <= axis < 2",
    ),
    Refusal(
        "softmax",
        operands=(Operand((3,), dtype=popxl.int32),),
        attrs={"axis": 0},
        error=DTypeError,
        says="expected floating point",
    ),
    Refusal(
        "layer_norm",
        operands=((3, 5), (4,), (5,)),
        error=ShapeError,
        says=r"got weight .* expected one value for each channel, \[5\]",
    ),
    Refusal(
        "layer_norm",
        operands=((3, 5), (5,), (3,)),
        error=ShapeError,
        says=r"got bias .* expected one value for each channel",
    ),
    Refusal(
        "layer_norm",
        operands=((5,), (5,), (5,)),
        error=ShapeError,
        says="expected samples and channels",
    ),
    Refusal(
        "layer_norm",
        operands=((3, 5), (5,), (5,)),
        attrs={"eps": 0.0},
        error=ShapeError,
        says="expected a positive number",
    ),
    Refusal(
        "layer_norm",
        operands=((3, 5), Operand((5,), dtype=popxl.float16), (5,)),
        error=DTypeError,
        says="expected equal dtypes",
    ),
    Refusal(
        "rms_norm",
        operands=((3, 5), (4,)),
        error=ShapeError,
        says=r"got weight .* expected one value for each channel, \[5\]",
    ),
    Refusal(
        "rms_norm",
        operands=((3, 5, 2), (5,)),
        error=ShapeError,
        says=r"expected rows, \[n, c\]",
    ),
    Refusal(
        "group_norm",
        operands=((2, 6), (6,), (6,)),
        attrs={"num_groups": 4},
        error=ShapeError,
        says="expected a divisor of 6",
    ),
    Refusal(
        "group_norm",
        operands=((2, 6), (2,), (6,)),
        attrs={"num_groups": 2},
        error=ShapeError,
        says="one value for each channel",
    ),
    Refusal(
        "batch_norm_inference",
        operands=((3, 4), (4,), (4,), (4,), (3,)),
        error=ShapeError,
        says="got var",
    ),
]

"""Softmax and normalisations. Statistics are kept in float32 for 16-bit types."""

import math

import torch

from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32

aten = torch.ops.aten
ALL = [True, True, True]


@kernel("softmax")
def softmax(t: torch.Tensor, axis: int) -> torch.Tensor:
    """Softmax along an axis."""
    return torch.softmax(t, axis)


@kernel("softmax_grad")
def softmax_grad(dy: torch.Tensor, y: torch.Tensor, axis: int) -> torch.Tensor:
    """y * (dy - sum(y * dy))."""
    return aten._softmax_backward_data(dy, y, axis, y.dtype)


def parameter(value: torch.Tensor) -> torch.Tensor:
    """A weight or bias as torch wants it: in order, for torch reads it so whatever its strides are;
    and on CPUs in float32, for statistics follow its type there.
    """
    return (value if value.is_cuda else as_float32(value)).contiguous()


def sizes(t: torch.Tensor) -> tuple[int, int, int]:
    """Samples, channels and elements per channel."""
    return t.shape[0], t.shape[1], math.prod(t.shape[2:])


def near_zero(t: torch.Tensor, num_groups: int = 1) -> torch.Tensor:
    """Samples whose groups are moved to mean 0, up to rounding: of numbers far from zero torch's
    statistics, and what it subtracts them from, would lose digits. 16-bit types have none to lose.
    """
    if t.element_size() < 4 or not t.numel():
        return t
    grouped = t.reshape(t.shape[0], num_groups, -1)
    return (grouped - grouped.mean(2, keepdim=True)).reshape(t.shape)


@kernel("layer_norm")
def layer_norm(
    t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalise samples."""
    if t.dim() == 2:
        return torch.native_layer_norm(
            near_zero(t), [t.shape[1]], parameter(weight), parameter(bias), eps
        )[0]
    return group_norm(t, weight, bias, 1, eps)


@kernel("group_norm")
def group_norm(
    t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """Normalise groups of channels."""
    centred = near_zero(t, num_groups).contiguous()
    return torch.native_group_norm(
        centred, parameter(weight), parameter(bias), *sizes(t), num_groups, eps
    )[0]


@kernel("group_norm_grad")
def group_norm_grad(
    dy: torch.Tensor, t: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
) -> tuple[torch.Tensor, ...]:
    """Gradients for t, weight and bias."""
    w, t = parameter(weight), near_zero(t, num_groups)
    if t.dim() == 2 and num_groups == 1:
        # The forward kernel gives the statistics several times faster than torch.var_mean.
        normalised = [t.shape[1]]
        _, mean, rstd = torch.native_layer_norm(t, normalised, w, w, eps)
        grads = aten.native_layer_norm_backward(dy, t, normalised, mean, rstd, w, w, ALL)
    else:
        t, dy = t.contiguous(), dy.contiguous()
        _, mean, rstd = torch.native_group_norm(t, w, w, *sizes(t), num_groups, eps)
        grads = aten.native_group_norm_backward(dy, t, mean, rstd, w, *sizes(t), num_groups, ALL)
    dt, dweight, dbias = grads
    return dt, dweight.to(weight.dtype), dbias.to(weight.dtype)


@kernel("rms_norm")
def rms_norm(
    t: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Rows over the root of their mean square."""
    wide = as_float32(t)
    return (wide * _over_rms(wide, eps) * gain(weight, offset)).to(t.dtype)


def gain(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """What channels are scaled by, at least float32."""
    return as_float32(weight) + offset if offset else as_float32(weight)


def _over_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """One over the root of each row's mean square, [n, 1]."""
    return (wide.square().mean(1, keepdim=True) + eps).rsqrt()


@kernel("rms_norm_grad")
def rms_norm_grad(
    dy: torch.Tensor, t: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """Gradients for t and weight."""
    wide = as_float32(t)
    rrms = _over_rms(wide, eps)
    normalised, slope = wide * rrms, as_float32(dy) * gain(weight, offset)
    dt = (slope - normalised * (slope * normalised).mean(1, keepdim=True)) * rrms
    return dt.to(t.dtype), (as_float32(dy) * normalised).sum(0).to(weight.dtype)


@kernel("merge_moments")
def merge_moments(own: torch.Tensor, slices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares are only taken of deviations, so that rows far from zero lose no digits."""
    means, rests, variances = slices.split(1, 2)
    mean = means.mean(0)
    deviations = means - mean + rests
    rest = deviations.mean(0)
    variance = (variances + (deviations - rest).square()).mean(0)
    return own[:, :1] - mean - rest, variance


def per_channel(value: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A parameter [c], at least float32, so that it broadcasts against t [n, c, ...]."""
    return as_float32(value).reshape([-1] + [1] * (t.dim() - 2))


@kernel("batch_norm_inference")
def batch_norm_inference(
    t: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    epsilon: float,
    momentum: float,
) -> torch.Tensor:
    """(t - mean) / sqrt(var + epsilon) * scale + bias."""
    factor = per_channel(scale, t) * (per_channel(var, t) + epsilon).rsqrt()
    return ((as_float32(t) - per_channel(mean, t)) * factor + per_channel(bias, t)).to(t.dtype)


@kernel("batch_norm_inference_grad")
def batch_norm_inference_grad(
    dy: torch.Tensor,
    t: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """Gradients for t, scale, bias, mean and var."""
    wide, rstd = as_float32(dy), (per_channel(var, t) + epsilon).rsqrt()
    centred = (as_float32(t) - per_channel(mean, t)) * rstd
    rest: list[int] = [a for a in range(t.dim()) if a != 1]
    dbias, dscale = wide.sum(rest), (wide * centred).sum(rest)
    flat, gain = rstd.reshape(-1), as_float32(scale)
    dt = wide * per_channel(scale, t) * rstd
    grads = (dt, dscale, dbias, -dbias * gain * flat, -0.5 * dscale * gain * flat.square())
    return tuple(g.to(t.dtype) for g in grads)

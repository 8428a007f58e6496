"""Softmax and normalisations. Statistics are kept in float32 for 16-bit types."""

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_computes_in_one_dtype, check_floating, normalise_axis
from popxl.tensor import Tensor, TensorSpec


@op
def softmax(t: Tensor, axis: int) -> TensorSpec:
    """e**t divided by its sum along an axis, without overflow.

    Shapes: t [a], floating point -> [a].
    Args:
        axis: negative ones are counted from the end.
    Raises:
        ShapeError: for an axis that t lacks.
        DTypeError: from sessions, if t is not floating point.
    """
    check_floating("softmax", t=t)
    normalise_axis("softmax", t, axis)
    return TensorSpec(t.shape, t.dtype)


@softmax.vjp
def softmax_vjp(dy: Tensor, y: Tensor, t: Tensor, axis: int) -> Tensor:
    """The gradient from the result alone."""
    return softmax_grad(dy, y, axis)


@op(differentiable=False)
def softmax_grad(dy: Tensor, y: Tensor, axis: int) -> TensorSpec:
    """Gradient of softmax from its result: y * (dy - sum(y * dy))."""
    return y.spec


softmax.cost(lambda y, t, axis: Cost(flops=10 * y.nelms))
softmax_grad.cost(lambda dt, dy, y, axis: Cost(flops=4 * dt.nelms))


def _check_channels(name: str, t: Tensor, **parameters: Tensor) -> None:
    """Operands of one floating-point type, and parameters of one value for each of ``t``'s channels
    (axis 1).
    """
    check_floating(name, t=t)
    check_computes_in_one_dtype(name, t=t, **parameters)
    if t.rank < 2:
        raise ShapeError(
            f"{name}: got t {t.spec}; expected samples and channels, [n, c, ...]. Reshape it "
            "to (1, -1)."
        )
    for parameter, value in parameters.items():
        if value.shape != (t.shape[1],):
            raise ShapeError(
                f"{name}: got {parameter} {value.spec} for t {t.spec}; expected one value for "
                f"each channel, [{t.shape[1]}]. Put the normalised axis second: reshape t to "
                "[samples, channels]."
            )


def _check_positive(name: str, parameter: str, value: float) -> None:
    if not value > 0:
        raise ShapeError(f"{name}: got {parameter} = {value}; expected a positive number.")


@op
def layer_norm(t: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-05) -> TensorSpec:
    """Normalise each sample to zero mean and unit variance, then scale and shift its channels.

    It is `group_norm` with one group.
    Shapes: t [n, c, ...], weight and bias [c], one floating-point type -> t's shape. A t [n, c] has
    its rows normalised.
    Args:
        eps: added to the variance, in the units of t squared.
    Raises:
        ShapeError: if weight or bias does not match t's axis 1.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
    Source: Ba et al. 2016, arXiv:1607.06450, section 3.
    """
    _check_channels("layer_norm", t, weight=weight, bias=bias)
    _check_positive("layer_norm", "eps", eps)
    return t.spec


Grads = tuple[Tensor | None, ...]


@layer_norm.vjp
def layer_norm_vjp(
    dy: Tensor, y: Tensor, t: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Grads:
    """One op; it computes the statistics again."""
    dt, dweight, dbias = group_norm_grad(dy, t, weight, 1, eps)
    return dt, dweight, dbias


@op
def group_norm(
    t: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-05
) -> TensorSpec:
    """Normalise groups of each sample's channels to zero mean and unit variance, then scale and
    shift the channels.

    Shapes: t [n, c, ...], weight and bias [c], one floating-point type -> t's shape.
    Args:
        num_groups: how many equal groups of neighbouring channels.
        eps: added to the variance, in the units of t squared.
    Raises:
        ShapeError: if weight or bias does not match t's axis 1, or num_groups does not divide it.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
    Source: Wu and He 2018, arXiv:1803.08494, section 3.
    """
    _check_channels("group_norm", t, weight=weight, bias=bias)
    _check_positive("group_norm", "eps", eps)
    if num_groups < 1 or t.shape[1] % num_groups:
        raise ShapeError(
            f"group_norm: got num_groups {num_groups} for t {t.spec}; expected a divisor of "
            f"{t.shape[1]} channels."
        )
    return t.spec


@group_norm.vjp
def group_norm_vjp(
    dy: Tensor, y: Tensor, t: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float
) -> Grads:
    """One op; it computes the statistics again."""
    dt, dweight, dbias = group_norm_grad(dy, t, weight, num_groups, eps)
    return dt, dweight, dbias


@op(differentiable=False)
def group_norm_grad(
    dy: Tensor, t: Tensor, weight: Tensor, num_groups: int, eps: float
) -> tuple[TensorSpec, ...]:
    """Gradients of `group_norm` for t, weight and bias."""
    return t.spec, weight.spec, weight.spec


layer_norm.cost(lambda y, t, weight, bias, eps: Cost(flops=8 * y.nelms))
group_norm.cost(lambda y, t, weight, bias, num_groups, eps: Cost(flops=8 * y.nelms))
group_norm_grad.cost(lambda grads, dy, t, weight, num_groups, eps: Cost(flops=16 * t.nelms))


@op
def rms_norm(t: Tensor, weight: Tensor, eps: float = 1e-05, offset: float = 0.0) -> TensorSpec:
    """Divide each row by the root of its mean square, then scale its channels by weight + offset.

    Programs call `popxl.extensions.rms_norm`.
    Shapes: t [n, c], weight [c], one floating-point type -> [n, c].
    Args:
        eps: added to the mean square, in the units of t squared.
        offset: added to the weight in float32 or wider.
    Raises:
        ShapeError: if weight does not match t's axis 1, or t has other axes.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467, section 4.
    """
    _check_channels("rms_norm", t, weight=weight)
    _check_positive("rms_norm", "eps", eps)
    if t.rank != 2:
        raise ShapeError(
            f"rms_norm: got t {t.spec}; expected rows, [n, c]. Reshape it to (-1, {t.shape[-1]})."
        )
    return t.spec


@rms_norm.vjp
def rms_norm_vjp(
    dy: Tensor, y: Tensor, t: Tensor, weight: Tensor, eps: float, offset: float
) -> Grads:
    """One op; it computes the mean squares again."""
    dt, dweight = rms_norm_grad(dy, t, weight, eps, offset)
    return dt, dweight


@op(differentiable=False)
def rms_norm_grad(
    dy: Tensor, t: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[TensorSpec, ...]:
    """Gradients of `rms_norm` for t and weight."""
    return t.spec, weight.spec


rms_norm.cost(lambda y, t, weight, eps, offset: Cost(flops=4 * y.nelms))
rms_norm_grad.cost(lambda grads, dy, t, weight, eps, offset: Cost(flops=11 * t.nelms))


@op(differentiable=False)
def merge_moments(own: Tensor, slices: Tensor) -> tuple[TensorSpec, ...]:
    """What gives a slice of each row, less its own mean, the mean 0 of all slices when it is added;
    and the variance over all.

    Moments are a mean, what rounding took from it, and a variance.
    Shapes: own [n, 3], slices [size, n, 3], float32 -> [n, 1], [n, 1].
    Args:
        own: the moments of this slice.
        slices: those of all slices, which are equally long.
    Source: Chan, Golub and LeVeque 1983, The American Statistician 37(3), section 2.
    """
    rows = TensorSpec((own.shape[0], 1), own.dtype)
    return rows, rows


merge_moments.cost(lambda y, own, slices: Cost(flops=3 * slices.nelms + own.nelms))


@op
def batch_norm_inference(
    t: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float = 1e-05,
    momentum: float = 0.9,
) -> TensorSpec:
    """Normalise channels by given statistics: (t - mean) / sqrt(var + epsilon) * scale + bias.

    Shapes: t [n, c, ...], scale, bias, mean and var [c], one floating-point type -> t's shape.
    Args:
        epsilon: added to the variance, in the units of t squared.
        momentum: kept for programs that pass it; only training would use it.
    Raises:
        ShapeError: if a parameter does not match t's axis 1.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
    Source: Ioffe and Szegedy 2015, arXiv:1502.03167, section 3.1.
    """
    _check_channels("batch_norm_inference", t, scale=scale, bias=bias, mean=mean, var=var)
    _check_positive("batch_norm_inference", "epsilon", epsilon)
    return t.spec


@batch_norm_inference.vjp
def batch_norm_inference_vjp(
    dy: Tensor,
    y: Tensor,
    t: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float,
    momentum: float,
) -> Grads:
    """The gradients of t and all four parameters."""
    return tuple(batch_norm_inference_grad(dy, t, scale, mean, var, epsilon))


@op(differentiable=False)
def batch_norm_inference_grad(
    dy: Tensor, t: Tensor, scale: Tensor, mean: Tensor, var: Tensor, epsilon: float
) -> tuple[TensorSpec, ...]:
    """Gradients of `batch_norm_inference` for t, scale, bias, mean and var."""
    return t.spec, scale.spec, scale.spec, scale.spec, scale.spec


batch_norm_inference.cost(lambda y, *arguments: Cost(flops=4 * y.nelms))
batch_norm_inference_grad.cost(lambda grads, dy, *arguments: Cost(flops=8 * dy.nelms))

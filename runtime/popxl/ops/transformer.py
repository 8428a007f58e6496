"""What transformer layers compute beside attention. Programs call these by `popxl.extensions`."""

from popxl.dtypes import int32
from popxl.errors import DTypeError, ShapeError
from popxl.opdef import Cost, OpFunction, op
from popxl.ops.arithmetic import add, mul, negate, sub
from popxl.ops.checks import check_computes_in_one_dtype, check_floating
from popxl.ops.elementwise import TRANSCENDENTAL
from popxl.ops.reductions import sum as sum_
from popxl.ops.shape import reshape, split
from popxl.tensor import Constant, Tensor, TensorSpec


def _gated(name: str, function: str, flops: int) -> tuple[OpFunction[..., Tensor], ...]:
    """An op that multiplies values by a function of as many gates, and the op of its gradient."""

    def gradient(dy: Tensor, t: Tensor) -> TensorSpec:
        return t.spec

    def forward(t: Tensor) -> TensorSpec:
        check_floating(name, t=t)
        if t.rank != 2 or t.shape[1] % 2:
            raise ShapeError(
                f"{name}: got t {t.spec}; expected rows of a gate and as many values, [n, 2 * c]. "
                "Put them side by side with concat."
            )
        return TensorSpec((t.shape[0], t.shape[1] // 2), t.dtype)

    gradient.__name__, gradient.__module__ = f"{name}_grad", __name__
    gradient.__doc__ = (
        f"Gradient of `{name}` from its operand: that of the gate, and that of the values, side by "
        "side."
    )
    forward.__name__, forward.__module__ = name, __name__
    forward.__doc__ = (
        f"{function}(gate) * values, with the gate and the values side by side.\n\n"
        "Shapes: t [n, 2 * c], floating point -> [n, c].\n"
        "Raises:\n"
        "    ShapeError: for another shape.\n"
        "    DTypeError: from sessions, if t is not floating point.\n"
        "Source: Shazeer 2020, arXiv:2002.05202, section 2."
    )
    gradient_op, forward_op = op(differentiable=False)(gradient), op(forward)
    gradient_op.cost(lambda dt, dy, t: Cost(flops=(2 * flops + 2) * dy.nelms))
    forward_op.cost(lambda y, t: Cost(flops=(flops + 1) * y.nelms))
    forward_op.vjp(lambda dy, y, t: gradient_op(dy, t))
    return forward_op, gradient_op


swiglu, swiglu_grad = _gated("swiglu", "swish", TRANSCENDENTAL)
geglu, geglu_grad = _gated("geglu", "gelu", 2 * TRANSCENDENTAL)


@op
def softcap(t: Tensor, cap: float) -> TensorSpec:
    """Elementwise cap * tanh(t / cap): numbers near zero stay, none goes beyond the cap.

    Shapes: t [a], floating point -> [a].
    Raises:
        ValueError: for a cap that is not above zero.
        DTypeError: from sessions, if t is not floating point.
    Source: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    check_floating("softcap", t=t)
    if not cap > 0:
        raise ValueError(f"softcap: got cap {cap}; expected a number above 0. Leave the op out.")
    return t.spec


@softcap.vjp
def softcap_vjp(dy: Tensor, y: Tensor, t: Tensor, cap: float) -> Tensor:
    """The gradient from the result alone."""
    return softcap_grad(dy, y, cap)


@op(differentiable=False)
def softcap_grad(dy: Tensor, y: Tensor, cap: float) -> TensorSpec:
    """Gradient of `softcap` from its result: dy * (1 - (y / cap)**2)."""
    return y.spec


softcap.cost(lambda y, t, cap: Cost(flops=(TRANSCENDENTAL + 2) * y.nelms))
softcap_grad.cost(lambda dt, dy, y, cap: Cost(flops=4 * dt.nelms))


@op
def rotary(
    t: Tensor, sin: Tensor, cos: Tensor, inverse: bool = False, size: int | None = None
) -> TensorSpec:
    """Turn pairs of features by angles: (a, b) becomes (a cos - b sin, b cos + a sin).

    A row is of one head or of several side by side. Features i and i + p of a head are its pair i;
    those from 2 * p on stay. Row r turns by row r modulo s of the tables. Computed in float32 or
    wider.

    Shapes: t [n, h * size], sin and cos [s, p], one floating-point type -> t's.
    Args:
        inverse: turn back.
        size: features of a head, 2 * p or more; none: 2 * p.
    Raises:
        ShapeError: for other shapes or a smaller size, or an n that s does not divide.
        DTypeError: from sessions, if the dtypes differ or are not floating point.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2; the pairs are those of LLaMA.
    """
    check_floating("rotary", t=t)
    check_computes_in_one_dtype("rotary", t=t, sin=sin, cos=cos)
    fits = t.rank == sin.rank == 2 and sin.shape == cos.shape
    if not fits or t.shape[0] % sin.shape[0] or t.shape[1] % (size or 2 * sin.shape[1]):
        raise ShapeError(
            f"rotary: got t {t.spec}, sin {sin.spec} and cos {cos.spec}; expected [n, h * "
            f"{size or '2 * p'}] and twice [s, p], where s divides n. Reshape or slice them."
        )
    if size is not None and size < 2 * sin.shape[1]:
        raise ShapeError(
            f"rotary: got size {size} and sin {sin.spec}; expected 2 * {sin.shape[1]} features of "
            "a head or more, for so many turn. Slice the tables."
        )
    return t.spec


@rotary.vjp
def rotary_vjp(
    dy: Tensor, y: Tensor, t: Tensor, sin: Tensor, cos: Tensor, inverse: bool, size: int | None
) -> tuple[Tensor | None, ...]:
    """Turned back. Those of tables, unless they are constant, by the composition."""
    dt = rotary(dy, sin, cos, not inverse, size)
    if isinstance(sin, Constant) and isinstance(cos, Constant):
        return dt, None, None
    (positions, pairs), width = sin.shape, size or 2 * sin.shape[1]
    by_heads = (t.shape[0] // positions, positions, t.shape[1] // width, width)
    parts = [pairs, pairs, width - 2 * pairs] if width > 2 * pairs else 2
    (a, b, *_), (da, db, *_) = (split(reshape(x, by_heads), parts, axis=3) for x in (t, dy))
    over = (0, 2)
    d_sin = sum_(sub(mul(db, a), mul(da, b)), over)
    return dt, negate(d_sin) if inverse else d_sin, sum_(add(mul(da, a), mul(db, b)), over)


rotary.cost(
    lambda y, t, sin, cos, inverse, size: Cost(
        flops=3 * y.nelms * 2 * sin.shape[1] // (size or 2 * sin.shape[1])
    )
)


@op
def short_convolution(
    t: Tensor, weight: Tensor, positions: Tensor, transposed: bool = False
) -> TensorSpec:
    """Add to each row those before it, times a factor per channel for each distance: row r becomes
    t[r] + sum over i from 1 to min(k, positions[r], r) of weight[i - 1] * t[r - i].

    Rows of several sequences stand one after the other; a position says how many rows of its
    sequence are before a row. Computed in float32 or wider.

    Shapes: t [n, c] and weight [k, c] of one floating-point type, positions int32 [n] -> t's.
    Args:
        transposed: add to row r weight[i - 1] * t[r + i] of each row that r would be added to.
    Raises:
        ShapeError: for other shapes.
        DTypeError: for positions that are not int32; from sessions, if t and weight differ in their
            dtypes or are not floating point.
    Source: Allen-Zhu 2025, "Physics of Language Models: Part 4.1", arXiv:2512.17351, whose
    convolutions weigh the row itself, too.
    """
    check_floating("short_convolution", t=t)
    check_computes_in_one_dtype("short_convolution", t=t, weight=weight)
    fits = t.rank == weight.rank == 2 and t.shape[1] == weight.shape[1]
    if not fits or positions.shape != t.shape[:1]:
        raise ShapeError(
            f"short_convolution: got t {t.spec}, weight {weight.spec} and positions "
            f"{positions.spec}; expected [n, c], [k, c] and [n]. Reshape them."
        )
    if positions.dtype is not int32:
        raise DTypeError(
            f"short_convolution: got positions {positions.spec}; expected int32. Cast them."
        )
    return t.spec


@short_convolution.vjp
def short_convolution_vjp(
    dy: Tensor, y: Tensor, t: Tensor, weight: Tensor, positions: Tensor, transposed: bool
) -> tuple[Tensor | None, ...]:
    """The other way round, and the weight's in one op."""
    earlier, later = (dy, t) if transposed else (t, dy)
    return (
        short_convolution(dy, weight, positions, not transposed),
        short_convolution_weight_grad(later, earlier, positions, weight.shape[0]),
        None,
    )


@op(differentiable=False)
def short_convolution_weight_grad(
    dy: Tensor, t: Tensor, positions: Tensor, size: int
) -> TensorSpec:
    """Gradient of the weight [size, c] of `short_convolution`: row i - 1 is the sum of dy[r] *
    t[r - i] over the rows r that have i before them.
    """
    return TensorSpec((size, t.shape[1]), t.dtype)


short_convolution.cost(
    lambda y, t, weight, positions, transposed: Cost(flops=2 * weight.shape[0] * y.nelms)
)
short_convolution_weight_grad.cost(
    lambda dweight, dy, t, positions, size: Cost(flops=2 * size * t.nelms)
)

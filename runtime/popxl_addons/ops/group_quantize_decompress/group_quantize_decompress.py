"""Four-bit group quantisation: groups of a row share a scale and a bias.

A number is ``q * scale + bias`` with q from 0 to 15. Four q are packed into a uint16, the first in
the highest bits.
"""

from collections.abc import Sequence

import numpy as np
import popxl
from popxl import Tensor, dtypes, ops
from popxl.errors import DTypeError

LEVELS = 16
PACKED = 4
"""Numbers in one uint16."""
DIVISORS = np.array([LEVELS**3, LEVELS**2, LEVELS, 1])
"""What moves each of the four to the lowest bits."""


def group_quantize_decompress(
    t: Tensor, group_scale: Tensor, group_bias: Tensor, dim: int = -1
) -> Tensor:
    """The matrix that `group_quantize_compress_numpy` packed. Scales and biases are differentiable.

    Shapes: t [a, groups, size/4], uint16; group_scale and group_bias [a, groups, 1] -> [a, groups *
    size] of their dtype, with its last axis moved to ``dim``.
    Raises:
        NotImplementedError: if t has not three axes.
        ValueError: if the shapes do not fit each other, or ``dim`` is no axis of a matrix.
        TypeError: if t is not uint16.
    """
    if t.dtype is not dtypes.uint16:
        raise DTypeError(
            f"group_quantize_decompress: got t {t.spec}; expected uint16. Pack it with the "
            "compression."
        )
    _check_packed("group_quantize_decompress", t.shape, group_scale.shape, group_bias.shape, dim)
    rows, groups, words = t.shape
    words_apart = ops.reshape(ops.cast(t, dtypes.int32), (rows, groups, words, 1))
    levels = ops.fmod(
        words_apart / popxl.constant(DIVISORS, dtypes.int32), popxl.constant(LEVELS, dtypes.int32)
    )
    steps = ops.reshape(ops.cast(levels, group_scale.dtype), (rows, groups, PACKED * words))
    matrix = ops.reshape(steps * group_scale + group_bias, (rows, groups * PACKED * words))
    return matrix if dim in (-1, 1) else matrix.T


def group_quantize_decompress_numpy(
    t: np.ndarray, group_scale: np.ndarray, group_bias: np.ndarray, dim: int
) -> np.ndarray:
    """The same as `group_quantize_decompress`, on the host."""
    _check_packed(
        "group_quantize_decompress_numpy", t.shape, group_scale.shape, group_bias.shape, dim
    )
    rows, groups, words = t.shape
    levels = t[..., np.newaxis] // DIVISORS.astype(t.dtype) % LEVELS
    steps = levels.reshape(rows, groups, PACKED * words).astype(group_scale.dtype)
    return np.moveaxis((steps * group_scale + group_bias).reshape(rows, -1), -1, dim)


def group_quantize_compress_numpy(
    t: np.ndarray, group_size: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack an array: each group of neighbours along an axis is rounded to 16 levels from its
    minimum to its maximum.

    Args:
        t: floating point, one or more axes.
        group_size: elements, a multiple of 4 that divides the axis.
        dim: the axis along which elements are grouped. It becomes the last: [..., groups *
            group_size].
    Returns:
        (uint16 [..., groups, group_size/4], scale [..., groups, 1], bias [..., groups, 1]), the
        latter two in float16, whatever t's dtype.
    Raises:
        ValueError: elements that are not finite in float16, no such axis, or a group size that does
            not fit.
        TypeError: another type of elements.
    """
    where = "group_quantize_compress_numpy"
    if not -t.ndim <= dim < t.ndim:
        raise ValueError(
            f"{where}: got shape {list(t.shape)} and dim {dim}; expected an array and one of "
            "its axes."
        )
    if t.dtype.kind != "f":
        raise TypeError(f"{where}: got {t.dtype} data; expected floating point.")
    if not (np.abs(t) <= np.finfo(np.float16).max).all():
        raise ValueError(
            f"{where}: got NaN, or magnitudes up to {np.abs(t).max()}; expected finite numbers of "
            f"at most {np.finfo(np.float16).max}, as scales and biases are float16."
        )
    rows = np.moveaxis(t, dim, -1)
    if group_size < PACKED or group_size % PACKED or rows.shape[-1] % group_size:
        raise ValueError(
            f"{where}: got group_size {group_size} for {rows.shape[-1]} elements on axis {dim}; "
            f"expected a multiple of {PACKED} that divides them."
        )
    groups = rows.reshape(*rows.shape[:-1], -1, group_size).astype(np.float64)
    bias = groups.min(-1, keepdims=True).astype(np.float16)
    scale = ((groups.max(-1, keepdims=True) - bias) / (LEVELS - 1)).astype(np.float16)
    steps = np.divide(groups - bias, scale, out=np.zeros_like(groups), where=scale > 0)
    levels = np.clip(np.rint(steps), 0, LEVELS - 1).astype(np.uint16)
    words = levels.reshape(*groups.shape[:-1], -1, PACKED) * DIVISORS.astype(np.uint16)
    return words.sum(-1, dtype=np.uint16), scale, bias


def _check_packed(
    where: str, t: Sequence[int], scale: Sequence[int], bias: Sequence[int], dim: int
) -> None:
    if len(t) != 3:
        raise NotImplementedError(
            f"{where}: got t of shape {list(t)}; expected [a, groups, size/4], a packed matrix."
        )
    expected = (*t[:2], 1)
    if tuple(scale) != expected or tuple(bias) != expected:
        raise ValueError(
            f"{where}: got group_scale {list(scale)} and group_bias {list(bias)} for t {list(t)}; "
            f"expected {list(expected)} each."
        )
    if not -2 <= dim < 2:
        raise ValueError(f"{where}: got dim {dim}; expected an axis of a matrix, -2 <= dim < 2.")

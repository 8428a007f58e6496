"""Rotary position embedding: pairs of features rotated by angles that grow with the position."""

from typing import Any

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl.errors import ShapeError
from popxl.ops.utils import cast_if_needed
from popxl.tensor import Constant


def trig_tables(
    seq_len: int, rotary_dim: int, base: int = 10000, np_dtype: Any = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """(sin, cos) of the angle of every position and pair: position * base**(-2 * pair /
    rotary_dim), in radians.

    Shapes: two of [seq_len, rotary_dim / 2], np_dtype. Every step is computed in np_dtype: float16
        does not know all positions from 2049 on.
    Raises:
        ShapeError: for an odd rotary_dim.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ShapeError(
            f"trig_tables: got rotary_dim {rotary_dim}; expected a positive even number: "
            "features turn in pairs."
        )
    speeds = 1 / base ** (np.arange(0, rotary_dim, 2, dtype=np_dtype) / rotary_dim)
    angles = np.outer(np.arange(seq_len, dtype=np_dtype), speeds)
    return np.sin(angles), np.cos(angles)


def trig_table_constants(
    seq_len: int, rotary_dim: int, base: int = 10000, dtype: popxl.dtype = popxl.float32
) -> tuple[Constant, Constant]:
    """`trig_tables`, computed in float32, as constants "sin" and "cos" of the current graph."""
    sin, cos = trig_tables(seq_len, rotary_dim, base)
    return popxl.constant(sin, dtype, "sin"), popxl.constant(cos, dtype, "cos")


def rotary_pos_embed(t: Tensor, sin: Tensor, cos: Tensor, rotary_dim: int | None = None) -> Tensor:
    """Turn the features (2i, 2i + 1) of each head by the angle of their position and pair i.

    Shapes: t [batch, sequence, heads, features]; sin and cos [sequence, rotary_dim / 2] -> t's. The
        tables are taken in t's dtype.
    Args:
        rotary_dim: how many features turn, from the first; the others stay. Default: all.
    Raises:
        ShapeError: for another rank of t, a rotary_dim that is odd or larger than the features, or
            other tables.
    """
    if t.rank != 4:
        raise ShapeError(
            f"rotary_pos_embed: got t {t.spec}; expected [batch, sequence, heads, features]. "
            "Reshape it."
        )
    batch, sequence, heads, features = t.shape
    size = features if rotary_dim is None else rotary_dim
    if size % 2 or not 2 <= size <= features:
        raise ShapeError(
            f"rotary_pos_embed: got rotary_dim {size} for t {t.spec}; expected an even number "
            f"from 2 to {features}."
        )
    for name, table in (("sin", sin), ("cos", cos)):
        if table.shape != (sequence, size // 2):
            raise ShapeError(
                f"rotary_pos_embed: got {name} {table.spec} for t {t.spec}; expected shape "
                f"{[sequence, size // 2]}, as trig_tables(sequence, rotary_dim) has it. Slice "
                "longer tables."
            )
    by_pairs = (sequence, 1, size // 2, 1)
    sine, cosine = (cast_if_needed(table, t.dtype).reshape(by_pairs) for table in (sin, cos))
    turning = t if size == features else t[:, :, :, :size]
    first, second = ops.split(turning.reshape((batch, sequence, heads, size // 2, 2)), 2, axis=-1)
    rotated = ops.concat([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    rotated = rotated.reshape((batch, sequence, heads, size))
    return rotated if size == features else ops.concat([rotated, t[:, :, :, size:]], axis=-1)

"""Products with a sparse matrix that is known when the program is built."""

from typing import Protocol

import numpy as np
import popxl
from popxl import Tensor, TensorSpec, ops
from popxl.errors import ShapeError
from popxl.opdef import Cost, op


class SparseRows(Protocol):
    """What is used of a ``scipy.sparse.csr_matrix``: row i has data[indptr[i]:indptr[i + 1]] in
    columns indices[..].
    """

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    shape: tuple[int, int]


def random_sparse(dense: np.ndarray, density: float = 0.5) -> np.ndarray:
    """A copy of an array in which each entry stays with probability ``density`` and is zero
    otherwise.

    Draws from numpy's global generator. ValueError for a density outside 0..1.
    """
    if not 0 <= density <= 1:
        raise ValueError(f"random_sparse: got density {density}; expected 0 <= density <= 1.")
    dense = np.asarray(dense)
    return np.where(np.random.random(dense.shape) < density, dense, np.zeros((), dense.dtype))


@op
def sparse_matmul(
    lhs: Tensor, values: Tensor, rows: Tensor, columns: Tensor, output_cols: int
) -> TensorSpec:
    """Product with the matrix that holds values[i] at (rows[i], columns[i]) and zeros elsewhere.

    Shapes: lhs [.., k], values [entries], lhs's dtype; rows and columns [entries], integers -> [..,
        output_cols], lhs's dtype. 16-bit types add in float32.
    """
    return TensorSpec((*lhs.shape[:-1], output_cols), lhs.dtype)


@sparse_matmul.vjp
def sparse_matmul_vjp(
    dy: Tensor,
    y: Tensor,
    lhs: Tensor,
    values: Tensor,
    rows: Tensor,
    columns: Tensor,
    output_cols: int,
) -> tuple[Tensor, Tensor, None, None]:
    """The transposed matrix for lhs; for each value what lhs and the gradient have at its place."""
    taken = ops.gather(lhs, rows, axis=-1) * ops.gather(dy, columns, axis=-1)  # [.., entries]
    d_values = ops.sum(taken, axis=tuple(range(lhs.rank - 1))) if lhs.rank > 1 else taken
    return sparse_matmul(dy, values, columns, rows, lhs.shape[-1]), d_values, None, None


@sparse_matmul.cost
def sparse_matmul_cost(
    y: Tensor, lhs: Tensor, values: Tensor, rows: Tensor, columns: Tensor, output_cols: int
) -> Cost:
    """A product and a sum per entry and row of lhs."""
    return Cost(flops=2 * values.nelms * (lhs.nelms // max(1, lhs.shape[-1])))


def dense_const_sparse_matmul(lhs: Tensor, rhs: SparseRows, output_cols: int) -> Tensor:
    """``lhs @ rhs`` with a constant sparse matrix; only its entries are kept and multiplied.

    Shapes: lhs [.., k], float16 or float32; rhs [k, output_cols], a scipy CSR matrix -> [..,
        output_cols], lhs's dtype.
    Raises:
        RuntimeError: for another dtype of lhs.
        ShapeError: if rhs has another shape.
    """
    if lhs.dtype not in (popxl.float16, popxl.float32, popxl.bfloat16):
        raise RuntimeError(
            f"dense_const_sparse_matmul: got lhs {lhs.spec}; expected float16 or float32. "
            "Cast it with ops.cast."
        )
    if lhs.rank < 1 or tuple(rhs.shape) != (lhs.shape[-1], output_cols):
        raise ShapeError(
            f"dense_const_sparse_matmul: got lhs {lhs.spec}, rhs of shape {list(rhs.shape)} and "
            f"output_cols {output_cols}; expected rhs of shape [lhs's last axis, output_cols]."
        )
    rows = np.repeat(np.arange(rhs.shape[0], dtype=np.int32), np.diff(rhs.indptr))
    if rows.size == 0:
        return ops.init((*lhs.shape[:-1], output_cols), lhs.dtype)
    values = popxl.constant(np.asarray(rhs.data), lhs.dtype, "values")
    columns = popxl.constant(np.asarray(rhs.indices), popxl.int32, "columns")
    return sparse_matmul(
        lhs, values, popxl.constant(rows, popxl.int32, "rows"), columns, output_cols
    )

"""Products with sparse matrices."""

import torch

from popxl_engine.kernels.dtypes import computable
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import as_float32


@kernel("sparse_matmul")
def sparse_matmul(
    lhs: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    output_cols: int,
) -> torch.Tensor:
    """torch's product of a sparse matrix, transposed, with lhs's rows as columns."""
    indices = torch.stack([columns, rows]).to(torch.int64)
    others = as_float32(computable(lhs)).reshape(-1, lhs.shape[-1]).T
    if lhs.is_meta:  # plans cannot look into sparse tensors
        result = others.new_empty(output_cols, others.shape[1])
    else:
        size = (output_cols, lhs.shape[-1])
        result = (
            torch.sparse_coo_tensor(
                indices, as_float32(computable(values)), size, check_invariants=True
            )
            @ others
        )
    return result.T.reshape((*lhs.shape[:-1], output_cols)).to(lhs.dtype)

"""Products with a sparse matrix that is known when the program is built."""

from popxl_addons.ops.static_sparse_ops.static_sparse_ops import (
    SparseRows,
    dense_const_sparse_matmul,
    random_sparse,
)

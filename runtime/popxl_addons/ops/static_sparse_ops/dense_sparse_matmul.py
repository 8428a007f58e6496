"""The product, under the module name that PopXL gives it."""

from popxl_addons.ops.static_sparse_ops.static_sparse_ops import dense_const_sparse_matmul

__all__ = ["dense_const_sparse_matmul"]

"""Samples of the add-ons' product with a sparse matrix."""

import numpy as np
import popxl_addons.ops.static_sparse_ops  # noqa: F401 - declares the op
import torch

from .sample import Operand, Sample

ROWS = np.array([0, 0, 1, 3, 3, 3], np.int32)
COLUMNS = np.array([1, 4, 0, 2, 4, 4], np.int32)
"""Row 2 and column 3 are empty; two entries share a place and add."""


def product(lhs, values, rows, columns, output_cols):
    dense = np.zeros((lhs.shape[-1], output_cols), values.dtype)
    np.add.at(dense, (rows, columns), values)
    return lhs @ dense


def torch_product(lhs, values, rows, columns, output_cols):
    dense = torch.zeros(lhs.shape[-1], output_cols, dtype=values.dtype)
    return lhs @ dense.index_put((rows.long(), columns.long()), values, accumulate=True)


def use(lhs):
    return Sample("sparse_matmul", operands=(lhs, (6,), ROWS, COLUMNS), attrs={"output_cols": 5}, oracle=product,
                  autograd=torch_product)  # fmt: skip


SAMPLES = [use((3, 4)), use((2, 3, 4)), use((4,)), use(Operand((3, 4), layout="transposed"))]
REFUSALS = []
"""The op's one public function, `dense_const_sparse_matmul`, checks before it adds the op."""

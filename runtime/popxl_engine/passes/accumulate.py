"""Gradients that go straight into their accumulators: products, column sums, and rows of an
embedding table.
"""

from popxl.op_records import OpDefinition

from popxl_engine.ir import Block
from popxl_engine.ops.accumulate import (
    accumulate_column_sum_,
    accumulate_gather_grad_,
    accumulate_gemm_,
)
from popxl_engine.passes.rewriter import Pattern, fuse, pattern


def fuse_accumulated_gemm(block: Block) -> Block:
    """A product of matrices whose only use is accumulate_mean_ into a matrix of its shape."""
    product = pattern("matmul", lhs="lhs", rhs="rhs", output_type=None)
    return _accumulated(block, product, accumulate_gemm_)


def fuse_accumulated_column_sum(block: Block) -> Block:
    """A sum over the rows of a matrix, the gradient of a bias, whose only use is
    accumulate_mean_.
    """
    return _accumulated(block, pattern("sum_to", t="X"), accumulate_column_sum_)


def fuse_accumulated_gather_grad(block: Block) -> Block:
    """The gradient of a table lookup whose only use is accumulate_mean_ into the table's
    accumulator.
    """
    rows = pattern("gather_grad", dy="dy", indices="indices", axis=0, zero_OOR="zero_OOR")
    return _accumulated(block, rows, accumulate_gather_grad_)


def _accumulated(block: Block, value: Pattern, definition: OpDefinition) -> Block:
    """Each accumulation of such a value as one instruction."""
    return fuse(block, "accumulate_mean_", definition, {"t": "t", "X": value, "step": "step"})

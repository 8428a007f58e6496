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
    return _accumulated(block, accumulate_gemm_, product)


def fuse_accumulated_column_sum(block: Block) -> Block:
    """A sum over the rows of a matrix, the gradient of a bias, whose only use is
    accumulate_mean_.
    """
    # of a square matrix, a sum over its columns has the same shape
    over_rows = (pattern("sum_to", t="X", dropped=dropped) for dropped in ((), (0,)))
    return _accumulated(block, accumulate_column_sum_, *over_rows)


def fuse_accumulated_gather_grad(block: Block) -> Block:
    """The gradient of a table lookup whose only use is accumulate_mean_ into the table's
    accumulator.
    """
    rows = pattern("gather_grad", dy="dy", indices="indices", axis=0, zero_OOR="zero_OOR")
    return _accumulated(block, accumulate_gather_grad_, rows)


def _accumulated(block: Block, definition: OpDefinition, *values: Pattern) -> Block:
    """Each accumulation of one of such values as one instruction."""
    patterns = ({"t": "t", "X": value, "step": "step"} for value in values)
    return fuse(block, "accumulate_mean_", definition, *patterns)

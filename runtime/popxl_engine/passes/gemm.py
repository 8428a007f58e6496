"""Matrix products with what is added to them: bias, and the scale and mask of attention scores; and
by tiles.
"""

from popxl import dtypes

from popxl_engine.ir import Block
from popxl_engine.ops.gemm import gemm, gemm_bias, masked_scores
from popxl_engine.passes.rewriter import Rewriter, ScalarPattern, fuse, fused, pattern

FEWEST, LEAST = 512, 64
"""Rows of a product, and columns or terms of its sums, from which packing the right operand
pays.
"""


def fuse_gemm_bias(block: Block) -> Block:
    """matmul of matrices, then a row added to its result."""
    product = pattern("matmul", lhs="lhs", rhs="rhs")
    sides = {"lhs": product, "rhs": "bias"}, {"lhs": "bias", "rhs": product}
    return fuse(block, "add", gemm_bias, *sides)


def fuse_masked_scores(block: Block) -> Block:
    """matmul of stacked matrices, times a number, plus a matrix."""
    product = pattern("matmul", lhs="lhs", rhs="rhs")
    scaled = pattern("mul", lhs=product, rhs=ScalarPattern("scale"))
    return fuse(block, "add", masked_scores, {"lhs": scaled, "rhs": "mask"})


def tile_gemm(block: Block) -> Block:
    """Products of bfloat16 matrices, with or without bias, that the library's tiles may make: the
    kernel decides.
    """
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("matmul", gemm_bias.name):
        a = instr.arguments
        lhs, rhs = a["lhs"], a["rhs"]
        is_bfloat16 = lhs.dtype is instr.outputs[0].dtype is dtypes.bfloat16
        if is_bfloat16 and lhs.shape[0] >= FEWEST and min(rhs.shape) >= LEAST:
            arguments = {"lhs": lhs, "rhs": rhs, "bias": a.get("bias")}
            rewriter.replace(i, fused(instr, gemm, arguments))
    return rewriter.result()

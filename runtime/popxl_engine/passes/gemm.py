"""Matrix products with what is added to them: bias, and the scale and mask of attention scores; and
by tiles.
"""

from popxl import dtypes

from popxl_engine.ir import Block, Instr
from popxl_engine.ops.gemm import gemm, gemm_bias, masked_scores
from popxl_engine.passes.rewriter import Rewriter, fused

FEWEST, LEAST = 512, 64
"""Rows of a product, and columns or terms of its sums, from which packing the right operand
pays.
"""


def fuse_gemm_bias(block: Block) -> Block:
    """matmul of matrices, then a row added to its result."""
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("add"):
        for side, other in (("lhs", "rhs"), ("rhs", "lhs")):
            y, bias = instr.arguments[side], instr.arguments[other]
            made = rewriter.made_by(y, "matmul")
            if made is None or rewriter.writes_between(made, i):
                continue
            factors = rewriter.instrs[made].arguments
            arguments = {"lhs": factors["lhs"], "rhs": factors["rhs"], "bias": bias}
            found = fused(instr, gemm_bias, arguments) if y.dtype.is_floating_point else None
            if found is not None:
                rewriter.replace(i, found, made)
                break
    return rewriter.result()


def _is_gemm(product: Instr) -> bool:
    """Whether it is a product of two matrices, in their type."""
    a = product.arguments
    return a["output_type"] is None and a["lhs"].rank == a["rhs"].rank == 2


def fuse_masked_scores(block: Block) -> Block:
    """matmul of stacked matrices, times a number, plus a matrix."""
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("add"):
        scaled, mask = instr.arguments["lhs"], instr.arguments["rhs"]
        times = rewriter.made_by(scaled, "mul")
        if times is None:
            continue
        y = rewriter.instrs[times].arguments["lhs"]
        scale = rewriter.number(rewriter.instrs[times].arguments["rhs"])
        made = rewriter.made_by(y, "matmul")
        if (
            made is None
            or scale is None
            or rewriter.writes_between(made, i)
            or y.shape != scaled.shape
        ):
            continue
        a = rewriter.instrs[made].arguments
        arguments = {"lhs": a["lhs"], "rhs": a["rhs"], "mask": mask, "scale": scale}
        rewriter.replace(i, fused(instr, masked_scores, arguments), made, times)
    return rewriter.result()


def tile_gemm(block: Block) -> Block:
    """Products of bfloat16 matrices, with or without bias, that the library's tiles may make: the
    kernel decides.
    """
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("matmul", gemm_bias.name):
        a = instr.arguments
        lhs, rhs = a["lhs"], a["rhs"]
        is_gemm = instr.definition is gemm_bias or _is_gemm(instr)
        is_bfloat16 = lhs.dtype is rhs.dtype is dtypes.bfloat16
        if is_gemm and is_bfloat16 and lhs.shape[0] >= FEWEST and min(rhs.shape) >= LEAST:
            arguments = {"lhs": lhs, "rhs": rhs, "bias": a.get("bias")}
            rewriter.replace(i, fused(instr, gemm, arguments))
    return rewriter.result()

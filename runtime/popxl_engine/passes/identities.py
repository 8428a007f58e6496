"""Casts that change nothing, and transposed products in another order, which needs no copy."""

from dataclasses import replace

from popxl.op_records import OPS

from popxl_engine.ir import Block
from popxl_engine.passes.rewriter import Rewriter, pattern, swaps_axes


def drop_casts(block: Block) -> Block:
    """A cast to the type that a tensor has is a copy, which nothing has to make."""
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("cast"):
        t = instr.arguments["t"]
        if t.dtype is instr.outputs[0].dtype:
            arguments = {"t": t, "output_name": None}
            rewriter.replace(i, replace(instr, definition=OPS["identity"], arguments=arguments))
    return rewriter.result()


def swap_transposed_gemm(block: Block) -> Block:
    """(a^T b)^T is b^T a: the product comes out in the order in which it is used."""
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("transpose"):
        found = rewriter.match(i, t=pattern("matmul", lhs="lhs", rhs="rhs"))
        if found is None:
            continue
        (position,), (lhs, rhs) = found.absorbed, found.arguments.values()
        if lhs.rank == rhs.rank == 2 and swaps_axes(instr):
            product = rewriter.instrs[position]
            factors = {"lhs": rewriter.transposed(rhs, i), "rhs": rewriter.transposed(lhs, i)}
            swapped = replace(
                instr,
                definition=product.definition,
                arguments={**product.arguments, **factors},
            )
            rewriter.replace(i, swapped, position)
    return rewriter.result()

"""Squares of a gradient, summed up where the product stores it: nothing reads the gradient again
for its norm.
"""

from typing import Dict

from popxl import dtypes
from popxl.opdef import OPS

from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.ops.accumulate import accumulate_gemm_, accumulate_gemm_sumsq_
from popxl_engine.rewrites.match import fused_instr


def stored_squares(block: Block) -> None:
    """sumsquare of a whole accumulator in float32 that nothing may write after an accumulated
    product did.
    """
    if not any(map(_is_sum_of_squares, block.instrs)):
        return
    groups = storage_groups(block)
    products: Dict[Value, int] = {}
    """By storage: the product that was the last to write it."""
    gone = set()
    for i, instr in enumerate(block.instrs):
        if _is_sum_of_squares(instr):
            t = instr.arguments["t"]
            made = products.get(groups.get(t, t))
            if made is not None and t in (
                (product := block.instrs[made]).arguments["t"],
                *product.outputs,
            ):
                outputs = [*product.outputs, *instr.outputs]
                block.instrs[made] = fused_instr(product, accumulate_gemm_sumsq_, outputs=outputs)
                del products[groups.get(t, t)]
                gone.add(i)
        for value in (*instr.written(), *instr.lent()):
            products.pop(groups.get(value, value), None)
        if (
            instr.definition is accumulate_gemm_
            and instr.arguments["t"].spec.dtype is dtypes.float32
        ):
            t = instr.arguments["t"]
            products[groups.get(t, t)] = i
    block.instrs = [instr for i, instr in enumerate(block.instrs) if i not in gone]


def _is_sum_of_squares(instr: Instr) -> bool:
    """Whether it sums up all squares of a tensor to one number without axes."""
    definition, a = instr.definition, instr.arguments
    return definition is OPS["sumsquare"] and a["axis"] is None and not a["keepdims"]

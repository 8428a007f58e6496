"""Squares of a gradient, summed up where the product stores it: nothing reads the gradient again
for its norm.
"""

from popxl.op_records import OPS

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.accumulate import accumulate_gemm_, accumulate_gemm_sumsq_
from popxl_engine.passes.rewriter import fused


def fuse_grad_norm(block: Block) -> Block:
    """sumsquare of a whole accumulator in float32 that nothing may write after an accumulated
    product did.
    """
    if not any(map(_is_sumsquare, block.instrs)):
        return block
    aliases = block.find(MustAlias)
    instrs: list[Instr | None] = list(block.instrs)
    products: dict[Value, int] = {}
    """The product of each storage that was the last to write it."""
    for i, instr in enumerate(block.instrs):
        if _is_sumsquare(instr):
            t = instr.arguments["t"]
            product = products.get(aliases.storage(t))
            if product is not None and _gives(block.instrs[product], t):
                found = block.instrs[product]
                outputs = (*found.outputs, *instr.outputs)
                both = fused(found, accumulate_gemm_sumsq_, outputs=outputs)
                if both is not None:
                    instrs[product], instrs[i] = both, None
                    del products[aliases.storage(t)]
        for value in instr.may_write():
            products.pop(aliases.storage(value), None)
        if instr.definition is accumulate_gemm_:
            products[aliases.storage(instr.arguments["t"])] = i
    return block.with_instrs(instr for instr in instrs if instr is not None)


def _gives(product: Instr, t: Value) -> bool:
    """Whether a value is all that a product has written."""
    return t in (product.arguments["t"], *product.outputs)


def _is_sumsquare(instr: Instr) -> bool:
    """Whether it sums up all squares of a tensor to one number without axes."""
    a = instr.arguments
    return instr.definition is OPS["sumsquare"] and a["axis"] is None and not a["keepdims"]

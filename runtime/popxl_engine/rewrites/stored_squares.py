"""Squares of a gradient, summed up where the product stores it: nothing reads the gradient again
for its norm.
"""

from dataclasses import replace
from typing import Any, Dict, Tuple

import torch
from popxl import dtypes
from popxl.opdef import OPS

from popxl_engine import native
from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.rewrites.accumulate import PRODUCT, accumulate_product_, add_product_
from popxl_engine.rewrites.match import fused, kernel_like


def accumulate_product_squares_(
    t: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, step: Any
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`accumulate_product_`, and the sum of the squares of all that t holds then."""
    if native.adds_product(t, lhs, rhs):
        squares = t.new_empty(())
        return add_product_(t, lhs, rhs, step, squares), squares
    accumulate_product_(t, lhs, rhs, step)
    return t, kernel_like("sumsquare", t)(t, None, False)


PRODUCT_SQUARES = fused(accumulate_product_squares_, writes=("t",))


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
                block.instrs[made] = replace(product, definition=PRODUCT_SQUARES, outputs=outputs)
                del products[groups.get(t, t)]
                gone.add(i)
        for value in (*instr.written(), *instr.lent()):
            products.pop(groups.get(value, value), None)
        if instr.definition is PRODUCT and instr.arguments["t"].spec.dtype is dtypes.float32:
            t = instr.arguments["t"]
            products[groups.get(t, t)] = i
    block.instrs = [instr for i, instr in enumerate(block.instrs) if i not in gone]


def _is_sum_of_squares(instr: Instr) -> bool:
    """Whether it sums up all squares of a tensor to one number without axes."""
    definition, a = instr.definition, instr.arguments
    return definition is OPS["sumsquare"] and a["axis"] is None and not a["keepdims"]

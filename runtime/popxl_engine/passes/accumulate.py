"""Gradients that go straight into their accumulators: products, column sums, and rows of an
embedding table.
"""

from collections.abc import Callable, Mapping
from typing import Any

from popxl.op_records import OpDefinition

from popxl_engine.ir import Block
from popxl_engine.ops.accumulate import (
    accumulate_column_sum_,
    accumulate_gather_grad_,
    accumulate_gemm_,
)
from popxl_engine.passes.rewriter import Rewriter, fused

Operands = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""From the arguments of what makes an accumulator's value: the fused op's other operands; None: no
match.
"""


def fuse_accumulated_gemm(block: Block) -> Block:
    """A product of matrices whose only use is accumulate_mean_ into a matrix of its shape."""

    def operands(product: Mapping[str, Any]) -> dict[str, Any] | None:
        is_plain = product["output_type"] is None
        return {"lhs": product["lhs"], "rhs": product["rhs"]} if is_plain else None

    return _fused_with(block, "matmul", accumulate_gemm_, operands)


def fuse_accumulated_column_sum(block: Block) -> Block:
    """A sum over the rows of a matrix, the gradient of a bias, whose only use is
    accumulate_mean_.
    """

    return _fused_with(block, "sum_to", accumulate_column_sum_, lambda total: {"X": total["t"]})


def fuse_accumulated_gather_grad(block: Block) -> Block:
    """The gradient of a table lookup whose only use is accumulate_mean_ into the table's
    accumulator.
    """

    def operands(lookup: Mapping[str, Any]) -> dict[str, Any] | None:
        given = {name: lookup[name] for name in ("dy", "indices", "zero_OOR")}
        return given if lookup["axis"] == 0 else None

    return _fused_with(block, "gather_grad", accumulate_gather_grad_, operands)


def _fused_with(block: Block, name: str, definition: OpDefinition, operands: Operands) -> Block:
    """Each accumulation of what an op of this name makes, with nobody else to use it, as one
    instruction.
    """
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops("accumulate_mean_"):
        match = _accumulated(rewriter, i, name)
        if match is None:
            continue
        made, a = match
        given = operands(rewriter.instrs[made].arguments)
        if given is not None:
            arguments = {"t": a["t"], **given, "step": a["step"]}
            rewriter.replace(i, fused(instr, definition, arguments), made)
    return rewriter.result()


def _accumulated(rewriter: Rewriter, index: int, name: str) -> tuple[int, Mapping[str, Any]] | None:
    """(where its value is made by an op of this name, its arguments) for an accumulation that may
    run right there.
    """
    a = rewriter.instrs[index].arguments
    made = rewriter.made_by(a["X"], name)
    if made is None or rewriter.writes_between(made, index):
        return None
    return made, a

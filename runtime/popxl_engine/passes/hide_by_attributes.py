"""Attention whose constant mask is causal, or causal with a window, takes attributes instead."""

from typing import Any

import numpy as np
from popxl.tensor import Constant

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr
from popxl_engine.ops.attention import attention
from popxl_engine.passes.rewriter import fused

HIDDEN = -9e3
"""What is added to the score of a key that a query must not see, at most: its exponential is 0."""


def hide_by_attributes(block: Block) -> Block:
    """Kernels walk the keys that queries see, and nothing holds a mask of queries times keys."""
    known: dict[Constant, dict[str, Any] | None] = {}
    replaced: dict[Instr, Instr] = {}
    for instr in block.instrs:
        if instr.definition is attention:
            source = block.find(DefUse).source(instr.arguments["mask"])
            constant = None if source is None else block.find(DefUse).constants.get(source)
            if constant is None:
                continue
            if constant not in known:
                mask = np.asarray(constant.host_value, np.float32)
                known[constant] = attributes_of(mask.reshape(constant.shape))
            hiding = known[constant]
            if hiding is None:
                continue
            hidden = fused(instr, attention, {**instr.arguments, **hiding})
            if hidden is not None:
                replaced[instr] = hidden
    return block.with_instrs(replaced.get(i, i) for i in block.instrs)


def attributes_of(mask: np.ndarray) -> dict[str, Any] | None:
    """The arguments that hide what a mask [queries, keys] hides, if it is causal."""
    queries, keys = mask.shape
    if mask.size == 0:
        return None
    hidden = mask <= HIDDEN
    window = keys - int(np.count_nonzero(hidden[-1]))  # the last query's own key is the last
    distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)
    if window < 1 or not np.array_equal(hidden, (distance < 0) | (distance >= window)):
        return None
    if mask[~hidden].any():
        return None
    return {"mask": None, "causal": True, "window": window if window < keys else None}

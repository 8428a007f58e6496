"""Causal attention on GPUs without its probabilities in memory: the gradient makes them again,
piece by piece.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Set

import numpy as np
import torch
from popxl import dtypes
from popxl.opdef import Op
from popxl.values import Constant, TensorSpec

from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.ops.attention import (
    ALIGNMENT,
    attention,
    attention_grad,
    flash_attention,
    flash_attention_grad,
)
from popxl_engine.rewrites.known_shares import are_of_same
from popxl_engine.rewrites.match import fused_instr
from popxl_engine.rewrites.uses import Uses
from popxl_engine.summaries import blocks_of

HIDDEN = -9e3
"""What is added to the score of a key that a query must not see, at most: its exponential is 0."""


def streams(device: torch.device) -> bool:
    """Whether a device has the kernels: a GPU from compute capability 8.0 on. One that is not there
    counts as such.
    """
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass
class Found:
    """Attention in a block whose probabilities nothing sees but gradients of it."""

    block: Block
    forward: Instr
    gradients: List[Instr]


def stream_attention(main: Block) -> None:
    """Attention with a causal mask and without dropout gives its result and log-sum-exp instead of
    probabilities.

    An op is rewritten wherever a program runs it or nowhere, so that what is computed again has the
    same bits.
    """
    everywhere: List[Found] = []
    refused: Set[Optional[Op]] = set()
    for block in blocks_of(main):
        uses = Uses(block)
        hiding = {v: c for c, v in block.constants.items()}
        for instr in block.instrs:
            if instr.definition is attention:
                found = (
                    _seen_by_gradients(block, uses, instr)
                    if _is_causal(uses, hiding, instr)
                    else None
                )
                if found is not None:
                    everywhere.append(found)
                else:
                    refused.add(instr.source)
    for found in everywhere:
        if found.forward.source not in refused:
            _replace(found)


def _is_causal(uses: Uses, hiding: Dict[Value, Constant], instr: Instr) -> bool:
    """Whether the kernels take it: as many keys as queries, each of which sees those up to its own,
    and whole heads.
    """
    a = instr.arguments
    query, key_t, value = (a[n].spec for n in ("query", "key_t", "value"))
    heads_fit = (
        query.shape[3] * query.dtype.itemsize % ALIGNMENT == 0 and query.dtype is not dtypes.float64
    )
    if a["seed_tensor"] is not None or not heads_fit or not query.shape == value.shape:
        return False
    mask = uses.source(a["mask"])
    if key_t.shape[3] != query.shape[2] or mask is None or mask not in hiding:
        return False
    added = np.asarray(hiding[mask].host_value, np.float32).reshape(a["mask"].spec.shape)
    above = np.triu(np.ones(added.shape, np.bool_), k=1)
    return not added[~above].any() and bool((added[above] <= HIDDEN).all())


def _seen_by_gradients(block: Block, uses: Uses, instr: Instr) -> Optional[Found]:
    """Its gradients, if nothing else sees the probabilities, and they are for the very same
    operands.
    """
    probabilities, y = instr.outputs
    gradients = uses.readers([probabilities])
    if gradients is None or gradients and uses.is_written(y):
        return None
    is_fit = all(g.definition is attention_grad and _is_gradient(uses, instr, g) for g in gradients)
    return Found(block, instr, gradients) if is_fit else None


def _is_gradient(uses: Uses, forward: Instr, gradient: Instr) -> bool:
    """Whether a gradient is that of an attention, whose probabilities it is given, nobody having
    written to them.
    """
    a = gradient.arguments
    are_given = all(
        uses.source(a[name]) is forward.outputs[0] for name in ("probs", "dropped_probs")
    )
    return are_given and a["seed_tensor"] is None and are_of_same(uses, forward, gradient)


def _replace(found: Found) -> None:
    of, (probabilities, y) = found.forward.arguments, found.forward.outputs
    logsumexp = Value(
        f"logsumexp_of_{probabilities.name}", TensorSpec(y.spec.shape[:3], dtypes.float32)
    )
    made: Dict[Instr, Instr] = {}
    arguments = {n: of[n] for n in ("query", "key_t", "value", "scale")}
    made[found.forward] = fused_instr(found.forward, flash_attention, arguments, [y, logsumexp])
    for gradient in found.gradients:
        arguments = {n: gradient.arguments[n] for n in ("dy", "query_t", "key", "value_t")}
        arguments |= {"y": y, "logsumexp": logsumexp, "scale": of["scale"]}
        made[gradient] = fused_instr(gradient, flash_attention_grad, arguments)
    found.block.instrs = [made.get(i, i) for i in found.block.instrs]

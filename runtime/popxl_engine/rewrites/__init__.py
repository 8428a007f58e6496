"""Fusion: rules that replace a few steps of one graph by one faster step. May import the core's
records and kernels.

`REWRITES` and `BLOCK_REWRITES` list them in the order in which they run;
``POPXL_REWRITES=-name,-name`` switches some off. To add one: a file here with a function ``(steps,
graph) -> steps`` and its fused kernel, and its line in the list. A rule for steps that come from
different graphs, as forward and gradient do, works on a block with its calls inlined; one that must
do the same to an op wherever it runs, on the whole program (`PROGRAM_REWRITES`).
"""

import os
from typing import Callable, Collection, Dict, List, Optional, Sequence

import torch
from popxl.graph import Graph
from popxl.opdef import Op

from popxl_engine.blocks import Block
from popxl_engine.lowering import Lowering
from popxl_engine.rewrites.accumulate import (
    fuse_accumulated_products,
    fuse_accumulated_rows,
    fuse_accumulated_sums,
)
from popxl_engine.rewrites.adam import fuse_adam
from popxl_engine.rewrites.added_rows import added_rows
from popxl_engine.rewrites.attention import fuse_attention, fuse_attention_grad
from popxl_engine.rewrites.identities import drop_casts, swap_transposed_products
from popxl_engine.rewrites.joined_gradients import join_gradients
from popxl_engine.rewrites.known_shares import known_shares, remade_shares
from popxl_engine.rewrites.narrow_logits import narrow_logits
from popxl_engine.rewrites.products import fuse_bias, fuse_scores, tile_products
from popxl_engine.rewrites.repeated import repeated_numbers
from popxl_engine.rewrites.stored_squares import stored_squares
from popxl_engine.rewrites.streamed_attention import stream_attention, streams
from popxl_engine.rewrites.unread_shares import unread_shares
from popxl_engine.rewrites.unread_zeros import unread_zeros
from popxl_engine.steps import Step
from popxl_engine.summaries import blocks_of

REWRITES: Dict[str, Callable[[List[Step], Graph], List[Step]]] = {
    "casts": drop_casts,
    "transposed_products": swap_transposed_products,
    "bias": fuse_bias,
    "scores": fuse_scores,
    "attention": fuse_attention,
    "attention_grad": fuse_attention_grad,
    "accumulated_products": fuse_accumulated_products,
    "accumulated_rows": fuse_accumulated_rows,
    "accumulated_sums": fuse_accumulated_sums,
    "adam": fuse_adam,
    "tiled_products": tile_products,
}
BLOCK_REWRITES: Dict[str, Callable[[Block], None]] = {
    "narrow_logits": narrow_logits,
    "joined_gradients": join_gradients,
    "remade_shares": remade_shares,
    "known_shares": known_shares,
    "unread_shares": unread_shares,
    "unread_zeros": unread_zeros,
    "added_rows": added_rows,
    "stored_squares": stored_squares,
    "repeated_numbers": repeated_numbers,
}

PROGRAM_REWRITES: Dict[str, Callable[[Block], None]] = {"streamed_attention": stream_attention}
KEEPING = ("joined_gradients", "remade_shares", "known_shares", "unread_shares")
"""Rules for attention with probabilities, which is not streamed."""
HAS_KERNELS: Dict[str, Callable[[torch.device], bool]] = {
    "streamed_attention": streams,
    **dict.fromkeys(KEEPING, lambda device: not streams(device)),
}
"""Of rewrites that are not for every device: whether they are for this one."""
CPU = torch.device("cpu")


def enabled_rewrites(device: torch.device = CPU) -> List[str]:
    """Every fusion for a device except those that the environment switches off.

    ``POPXL_REWRITES=-bias,-adam``, or ``-all``.
    """
    every = [*REWRITES, *BLOCK_REWRITES, *PROGRAM_REWRITES]
    off = {
        name.strip().lstrip("-")
        for name in os.environ.get("POPXL_REWRITES", "").split(",")
        if name.strip()
    }
    unknown = off - {*every, "all"}
    if unknown:
        raise ValueError(
            f"POPXL_REWRITES: got {', '.join(sorted(unknown))}; expected '-name' for some of "
            f"{', '.join(every)}, or '-all'."
        )
    if "all" in off:
        return []
    return [
        name
        for name in every
        if name not in off and (name not in HAS_KERNELS or HAS_KERNELS[name](device))
    ]


def fused_program(
    graph: Graph,
    names: Optional[Sequence[str]] = None,
    ops: Optional[Collection[Op]] = None,
    device: torch.device = CPU,
) -> Block:
    """A main graph, or these ops of it, lowered with fusions; default: those that are enabled for
    the device.
    """
    chosen = enabled_rewrites(device) if names is None else names
    block = Lowering([REWRITES[name] for name in REWRITES if name in chosen], ops).main(graph)
    for name, rewrite in BLOCK_REWRITES.items():
        if name in chosen:
            for each in list(blocks_of(block)):
                rewrite(each)
    for name, rewrite in PROGRAM_REWRITES.items():
        if name in chosen:
            rewrite(block)
    return block

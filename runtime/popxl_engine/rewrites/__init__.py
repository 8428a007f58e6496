"""Fusion: rules that replace a few steps of one graph by one faster step. May import the core's records and kernels.

`REWRITES` lists them in the order in which they run; ``POPXL_REWRITES=-name,-name`` switches some off. To add one: a
file here with a function ``(steps, graph) -> steps`` and its fused kernel, and its line in the list.
"""

from typing import Callable, Dict, List

from popxl.graph import Graph

from popxl_engine.rewrites.accumulate import fuse_accumulated_products, fuse_accumulated_rows
from popxl_engine.rewrites.adam import fuse_adam
from popxl_engine.rewrites.identities import drop_casts, swap_transposed_products
from popxl_engine.rewrites.products import fuse_bias, fuse_scores
from popxl_engine.steps import Step

REWRITES: Dict[str, Callable[[List[Step], Graph], List[Step]]] = {
    "casts": drop_casts,
    "transposed_products": swap_transposed_products,
    "bias": fuse_bias,
    "scores": fuse_scores,
    "accumulated_products": fuse_accumulated_products,
    "accumulated_rows": fuse_accumulated_rows,
    "adam": fuse_adam,
}

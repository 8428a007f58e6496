"""Matrix products with what is added to them: bias, and the scale and mask of attention scores; and
by tiles.
"""

from typing import List, Optional

import torch
from popxl import dtypes
from popxl.graph import Graph

from popxl_engine import native
from popxl_engine.kernels.linalg import (
    matrix_product,
    multiplies_natively,
    product,
    rows_on_boundaries,
)
from popxl_engine.kernels.rounding import NARROW
from popxl_engine.rewrites.match import Steps, fused, scalar_constant
from popxl_engine.steps import Step


def linear(lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """lhs @ rhs + bias: [m, k], [k, n], [n] -> [m, n]."""
    if lhs.dtype in NARROW and not (lhs.is_cuda or multiplies_natively(lhs.dtype)):
        return product(lhs, rhs, torch.float32).add_(bias).to(lhs.dtype)
    return matrix_product(lhs, rhs, bias)


def scores(lhs: torch.Tensor, rhs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """lhs @ rhs * scale + mask in one pass over the result: [..., m, k], [..., k, n], [m, n] ->
    [..., m, n].
    """
    if lhs.dtype in NARROW and not (lhs.is_cuda or multiplies_natively(lhs.dtype)):
        return product(lhs, rhs, torch.float32).mul_(scale).add_(mask).to(lhs.dtype)
    shape = (*lhs.shape[:-1], rhs.shape[-1])
    left, right = lhs.reshape(-1, *lhs.shape[-2:]), rhs.reshape(-1, *rhs.shape[-2:])
    return torch.baddbmm(mask.expand(left.shape[0], *mask.shape), left, right, alpha=scale).reshape(
        shape
    )


def tiled(lhs: torch.Tensor, rhs: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """lhs @ rhs, plus a bias where there is one: by the library's tiles where it has them."""
    (rows, inner), columns = lhs.shape, rhs.shape[1]
    if not native.multiplies(lhs, rhs):
        return product(lhs, rhs, lhs.dtype) if bias is None else linear(lhs, rhs, bias)
    y = rows_on_boundaries(rows, columns, lhs, TILE_ROW)
    added, factors = (
        None if bias is None else bias.contiguous(),
        (lhs, *lhs.stride(), rhs, *rhs.stride()),
    )
    native.call("multiply_add", (), *factors, added, y, y.stride(0), rows, columns, inner)
    return y


LINEAR = fused(linear)
SCORES = fused(scores)
TILED = fused(tiled)

FEWEST, LEAST = 512, 64
"""Rows of a product, and columns or terms of its sums, from which packing the right operand
pays.
"""
TILE_ROW = 64
"""Bytes of a row of a tile: a product whose rows begin on such boundaries is not packed when it is
multiplied again.
"""


def fuse_bias(steps: List[Step], graph: Graph) -> List[Step]:
    """matmul of matrices, then a row added to its result."""
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name != "add":
            continue
        for side, other in (("lhs", "rhs"), ("rhs", "lhs")):
            y, bias = step.arguments[side], step.arguments[other]
            made = found.made_by(y, "matmul")
            if (
                made is None
                or bias.rank != 1
                or y.rank != 2
                or bias.shape != y.shape[1:]
                or found.writes_between(made, i)
            ):
                continue
            a = steps[made].arguments
            if (
                a["output_type"] is None
                and a["lhs"].rank == a["rhs"].rank == 2
                and y.dtype.is_floating_point
            ):
                arguments = {"lhs": a["lhs"], "rhs": a["rhs"], "bias": bias}
                found.replace(i, Step(LINEAR, arguments, step.outputs, step.source), made)
                break
    return found.result()


def fuse_scores(steps: List[Step], graph: Graph) -> List[Step]:
    """matmul of stacked matrices, times a number, plus a matrix."""
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name != "add":
            continue
        scaled, mask = step.arguments["lhs"], step.arguments["rhs"]
        times = found.made_by(scaled, "mul")
        if times is None or mask.rank != 2 or scaled.rank < 3 or mask.shape != scaled.shape[-2:]:
            continue
        y, scale = steps[times].arguments["lhs"], scalar_constant(steps[times].arguments["rhs"])
        made = found.made_by(y, "matmul")
        if (
            made is None
            or scale is None
            or found.writes_between(made, i)
            or y.shape != scaled.shape
        ):
            continue
        a = steps[made].arguments
        if a["output_type"] is None and a["lhs"].shape[:-2] == a["rhs"].shape[:-2]:
            arguments = {"lhs": a["lhs"], "rhs": a["rhs"], "mask": mask, "scale": scale}
            found.replace(i, Step(SCORES, arguments, step.outputs, step.source), made, times)
    return found.result()


def tile_products(steps: List[Step], graph: Graph) -> List[Step]:
    """Products of bfloat16 matrices, with or without bias, that the library's tiles may make:
    `tiled` decides.
    """
    result = []
    for step in steps:
        a, name = step.arguments, step.definition.name
        if name == LINEAR.name or (name == "matmul" and a["output_type"] is None):
            lhs, rhs = a["lhs"], a["rhs"]
            is_matrix = lhs.rank == rhs.rank == 2 and lhs.dtype is rhs.dtype is dtypes.bfloat16
            if is_matrix and lhs.shape[0] >= FEWEST and min(rhs.shape) >= LEAST:
                arguments = {"lhs": lhs, "rhs": rhs, "bias": a.get("bias")}
                step = Step(TILED, arguments, step.outputs, step.source)
        result.append(step)
    return result

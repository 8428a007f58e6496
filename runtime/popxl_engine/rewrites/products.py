"""Matrix products with what is added to them: bias, and the scale and mask of attention scores; and
by tiles.
"""

from typing import List

from popxl import dtypes
from popxl.graph import Graph

from popxl_engine.ops.gemm import gemm, gemm_bias, masked_scores
from popxl_engine.rewrites.match import Steps, fused_step, scalar_constant
from popxl_engine.steps import Step

FEWEST, LEAST = 512, 64
"""Rows of a product, and columns or terms of its sums, from which packing the right operand
pays.
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
                found.replace(i, fused_step(gemm_bias, arguments, step.outputs, step.source), made)
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
            found.replace(
                i, fused_step(masked_scores, arguments, step.outputs, step.source), made, times
            )
    return found.result()


def tile_products(steps: List[Step], graph: Graph) -> List[Step]:
    """Products of bfloat16 matrices, with or without bias, that the library's tiles may make:
    `gemm` decides.
    """
    result = []
    for step in steps:
        a, name = step.arguments, step.definition.name
        if name == gemm_bias.name or (name == "matmul" and a["output_type"] is None):
            lhs, rhs = a["lhs"], a["rhs"]
            is_matrix = lhs.rank == rhs.rank == 2 and lhs.dtype is rhs.dtype is dtypes.bfloat16
            if is_matrix and lhs.shape[0] >= FEWEST and min(rhs.shape) >= LEAST:
                arguments = {"lhs": lhs, "rhs": rhs, "bias": a.get("bias")}
                step = fused_step(gemm, arguments, step.outputs, step.source)
        result.append(step)
    return result

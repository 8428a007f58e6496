"""Steps that do nothing, or that another order of the same steps does without a copy."""

from typing import List

from popxl.graph import Graph
from popxl.opdef import OPS

from popxl_engine.rewrites.match import Steps
from popxl_engine.steps import Step


def drop_casts(steps: List[Step], graph: Graph) -> List[Step]:
    """A cast to the type that a tensor has is a copy, which nothing has to make."""
    return [
        Step(OPS["identity"], {"t": s.arguments["t"], "output_name": None}, s.outputs, s.source)
        if s.definition.name == "cast" and s.arguments["t"].dtype is s.outputs[0].dtype
        else s
        for s in steps
    ]


def swap_transposed_products(steps: List[Step], graph: Graph) -> List[Step]:
    """(a^T b)^T is b^T a: the product comes out in the order in which it is used."""
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        if step.definition.name != "transpose" or step.outputs[0].rank != 2:
            continue
        made = found.made_by(step.arguments["t"], "matmul")
        if (
            made is None
            or found.writes_between(made, i)
            or tuple(step.arguments["permutation"] or (1, 0)) != (1, 0)
        ):
            continue
        factors = steps[made].arguments
        if factors["lhs"].rank != 2 or factors["rhs"].rank != 2:
            continue
        lhs, rhs = found.transposed(factors["rhs"], i), found.transposed(factors["lhs"], i)
        arguments = {**factors, "lhs": lhs, "rhs": rhs}
        found.replace(i, Step(steps[made].definition, arguments, step.outputs, step.source), made)
    return found.result()

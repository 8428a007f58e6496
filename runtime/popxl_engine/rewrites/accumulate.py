"""Gradients that go straight into their accumulators: products, and rows of an embedding table."""

from typing import Any, Callable, Dict, List, Optional, Tuple

from popxl.graph import Graph
from popxl.opdef import OpDefinition, flatten
from popxl.values import Tensor

from popxl_engine.ops.accumulate import (
    accumulate_column_sum_,
    accumulate_gather_grad_,
    accumulate_gemm_,
)
from popxl_engine.rewrites.match import Steps, fused_step
from popxl_engine.steps import Step


def _accumulated(found: Steps, index: int, name: str) -> Optional[Tuple[int, Dict[str, Any]]]:
    """(where its value is made by an op of this name, its arguments) for an accumulation that may
    run right there.
    """
    step = found.steps[index]
    if step.definition.name != "accumulate_mean_":
        return None
    a = step.arguments
    made = found.made_by(a["X"], name)
    if made is None or found.writes_between(made, index):
        return None
    if any(
        t in (a["t"], a["step"])
        for i in range(made + 1, index)
        for t in flatten(found.steps[i].arguments.values())
    ):
        return None
    return made, a


Operands = Callable[[Steps, Tensor, Dict[str, Any]], Optional[Dict[str, Any]]]
"""From the accumulator and the arguments of what makes its value: the fused step's other operands;
None: no match.
"""


def _fused_with(
    steps: List[Step], graph: Graph, name: str, definition: OpDefinition, operands: Operands
) -> List[Step]:
    """Each accumulation of what an op of this name makes, with nobody else to use it, as one
    step.
    """
    found = Steps(steps, graph)
    for i, step in enumerate(steps):
        match = _accumulated(found, i, name)
        if match is None:
            continue
        made, a = match
        given = operands(found, a["t"], found.steps[made].arguments)
        if given is not None:
            arguments = {"t": a["t"], **given, "step": a["step"]}
            found.replace(i, fused_step(definition, arguments, step.outputs, step.source), made)
    return found.result()


def fuse_accumulated_products(steps: List[Step], graph: Graph) -> List[Step]:
    """A product of matrices whose only use is accumulate_mean_ into a matrix of its shape."""

    def operands(found: Steps, t: Tensor, product: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        lhs, rhs = product["lhs"], product["rhs"]
        apart = found.origin(t) not in (found.origin(lhs), found.origin(rhs))
        fits = t.rank == lhs.rank == rhs.rank == 2 and product["output_type"] is None
        return {"lhs": lhs, "rhs": rhs} if apart and fits else None

    return _fused_with(steps, graph, "matmul", accumulate_gemm_, operands)


def fuse_accumulated_sums(steps: List[Step], graph: Graph) -> List[Step]:
    """A sum over the rows of a matrix, the gradient of a bias, whose only use is
    accumulate_mean_.
    """

    def operands(found: Steps, t: Tensor, total: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        X = total["t"]
        fits = X.rank == 2 and t.shape == X.shape[1:] and found.origin(t) is not found.origin(X)
        return {"X": X} if fits else None

    return _fused_with(steps, graph, "sum_to", accumulate_column_sum_, operands)


def fuse_accumulated_rows(steps: List[Step], graph: Graph) -> List[Step]:
    """The gradient of a table lookup whose only use is accumulate_mean_ into the table's
    accumulator.
    """

    def operands(found: Steps, t: Tensor, lookup: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        given = {name: lookup[name] for name in ("dy", "indices", "zero_OOR")}
        return given if lookup["axis"] == 0 and t.rank == 2 else None

    return _fused_with(steps, graph, "gather_grad", accumulate_gather_grad_, operands)

"""Gradients that go straight into their accumulators: products, and rows of an embedding table."""

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from popxl.graph import Graph
from popxl.opdef import OpDefinition, flatten
from popxl.values import Tensor

from popxl_engine import native
from popxl_engine.kernels.linalg import prefers_onednn, product
from popxl_engine.kernels.rounding import NARROW
from popxl_engine.kernels.var_updates import shares
from popxl_engine.rewrites.match import Steps, fused, kernel_like
from popxl_engine.steps import Step

ROWS_AT_A_TIME = 2048
"""Rows of a product that are made before they are added to the accumulator (768 to 1280 rows are
slow with AMX).
"""


def accumulate_product_(
    t: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, step: Any
) -> torch.Tensor:
    """t = t * step / (step + 1) + lhs @ rhs / (step + 1), without a temporary of t's size."""
    if native.adds_product(t, lhs, rhs):
        return add_product_(t, lhs, rhs, step)
    mean = kernel_like("accumulate_mean_", t)
    if t.is_cuda or t.dtype in NARROW or not t.is_floating_point():
        return mean(t, product(lhs, rhs, lhs.dtype), step)
    if t.dtype == lhs.dtype == torch.float32 and not prefers_onednn():
        old, new = shares(step)
        return t.addmm_(lhs, rhs, beta=old, alpha=new)
    for start in range(0, t.shape[0], ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        mean(t[rows], product(lhs[rows], rhs, lhs.dtype), step)
    return t


def add_product_(
    t: torch.Tensor,
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    step: Any,
    squares: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """`accumulate_product_` by the library. ``squares``: float32 scalar, becomes the sum of the
    squares of t.
    """
    factors = (lhs, *lhs.stride(), rhs, *rhs.stride())
    native.call(
        "accumulate_product",
        (),
        *factors,
        t,
        t.stride(0),
        *shares(step),
        *t.shape,
        lhs.shape[1],
        squares,
    )
    return t


def accumulate_sum_(t: torch.Tensor, X: torch.Tensor, step: Any) -> torch.Tensor:
    """t = t * step / (step + 1) + X summed over its rows / (step + 1)."""
    if t.dtype == torch.float32 and X.numel() and native.takes(t, X):
        native.call("column_sums", (X.dtype,), X, t, *shares(step), *X.shape)
        return t
    total = kernel_like("sum_to", t)(X, tuple(t.shape), ())
    return kernel_like("accumulate_mean_", t)(t, total, step)


def accumulate_rows_(
    t: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, zero_OOR: bool, step: Any
) -> torch.Tensor:
    """t = t * step / (step + 1), then dy / (step + 1) added to rows by their indices, outside as
    `gather` says.
    """
    flat, rows = rows_by_index(t, dy, indices, zero_OOR)
    if t.is_cuda:  # the count stays where it is
        sums = torch.zeros_like(t).index_add_(0, flat, rows)
        return kernel_like("accumulate_mean_", t)(t, sums, step)
    old, new = shares(step)
    scaled = t.mul_(old) if old else t.zero_()
    return scaled.index_add_(0, flat, rows, alpha=new)


def rows_by_index(
    t: torch.Tensor, dy: torch.Tensor, indices: torch.Tensor, zero_OOR: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(numbers of rows of t, what is added to each, of t's type); with zero_OOR what is outside
    becomes zeros.
    """
    flat = indices.reshape(-1).to(torch.int64)
    rows = dy.reshape(flat.numel(), -1).to(t.dtype)
    inside = flat.clamp(0, t.shape[0] - 1)
    if zero_OOR:
        outside = flat != inside
        if t.is_cuda or outside.any():
            rows = rows.masked_fill(outside[:, None], 0)
    return inside, rows


PRODUCT = fused(accumulate_product_, writes=("t",))
SUM = fused(accumulate_sum_, writes=("t",))
ROWS = fused(accumulate_rows_, writes=("t",))


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
            found.replace(i, Step(definition, arguments, step.outputs, step.source), made)
    return found.result()


def fuse_accumulated_products(steps: List[Step], graph: Graph) -> List[Step]:
    """A product of matrices whose only use is accumulate_mean_ into a matrix of its shape."""

    def operands(found: Steps, t: Tensor, product: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        lhs, rhs = product["lhs"], product["rhs"]
        apart = found.origin(t) not in (found.origin(lhs), found.origin(rhs))
        fits = t.rank == lhs.rank == rhs.rank == 2 and product["output_type"] is None
        return {"lhs": lhs, "rhs": rhs} if apart and fits else None

    return _fused_with(steps, graph, "matmul", PRODUCT, operands)


def fuse_accumulated_sums(steps: List[Step], graph: Graph) -> List[Step]:
    """A sum over the rows of a matrix, the gradient of a bias, whose only use is
    accumulate_mean_.
    """

    def operands(found: Steps, t: Tensor, total: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        X = total["t"]
        fits = X.rank == 2 and t.shape == X.shape[1:] and found.origin(t) is not found.origin(X)
        return {"X": X} if fits else None

    return _fused_with(steps, graph, "sum_to", SUM, operands)


def fuse_accumulated_rows(steps: List[Step], graph: Graph) -> List[Step]:
    """The gradient of a table lookup whose only use is accumulate_mean_ into the table's
    accumulator.
    """

    def operands(found: Steps, t: Tensor, lookup: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        given = {name: lookup[name] for name in ("dy", "indices", "zero_OOR")}
        return given if lookup["axis"] == 0 and t.rank == 2 else None

    return _fused_with(steps, graph, "gather_grad", ROWS, operands)

"""The reductions that collectives do, and the groups that they do them over."""

from enum import Enum
from typing import Literal

from popxl import dtypes
from popxl.errors import DTypeError, GraphError
from popxl.ops.checks import refuse_to_execute
from popxl.replica_grouping import ReplicaGrouping
from popxl.tensor import Tensor

CollectiveOps = Literal["add", "mean", "mul", "min", "max", "and", "or", "square_add"]


class CollectiveOperator(Enum):
    """How a collective combines the members' values, element by element. ``square_add`` sums
    squares.
    """

    add = "add"
    mean = "mean"
    mul = "mul"
    min = "min"
    max = "max"
    logical_and = "and"
    logical_or = "or"
    square_add = "square_add"


def to_collective_op(op: CollectiveOps) -> CollectiveOperator:
    """The operator of that name. ValueError if there is none."""
    try:
        return CollectiveOperator(op)
    except ValueError:
        names = ", ".join(o.value for o in CollectiveOperator)
        raise ValueError(f"to_collective_op: got {op!r}; expected one of {names}.") from None


def check_reduction(name: str, t: Tensor, op: CollectiveOps) -> None:
    """Check that a reduction is defined for a tensor.

    Raises:
        ValueError: for an unknown reduction.
        DTypeError: from sessions, "and" and "or" of something else than bool, a mean of integers,
            the largest of complex numbers, others of bool.
    """
    operator = to_collective_op(op)
    if operator in (CollectiveOperator.logical_and, CollectiveOperator.logical_or):
        fits, expected = t.dtype is dtypes.bool, "bool"
    elif operator is CollectiveOperator.mean:
        fits, expected = t.dtype.is_floating_point, "floating point"
    elif operator in (CollectiveOperator.max, CollectiveOperator.min):
        fits, expected = t.dtype is not dtypes.bool and not t.dtype.is_complex, "real numbers"
    else:
        fits, expected = t.dtype is not dtypes.bool, "numbers"
    if not fits or (t.dtype.is_floating_point and t.dtype.itemsize == 1):
        error = f"{name}: got t {t.spec} for op {op!r}; expected {expected}. Cast it with ops.cast."
        refuse_to_execute(DTypeError(error))


def resolve_group(name: str, t: Tensor, group: ReplicaGrouping | None) -> ReplicaGrouping:
    """The group that a collective is over: all replicas for None.

    Raises:
        TypeError: for something that is no grouping.
        GraphError: a grouping of another Ir.
    """
    if group is None:
        return t.ir.replica_grouping()
    if not isinstance(group, ReplicaGrouping):
        raise TypeError(
            f"{name}: got group = {type(group).__name__}; expected a ReplicaGrouping. Make one "
            "with ir.replica_grouping."
        )
    if group._ir is not t.ir:
        raise GraphError(
            f"{name}: got a group of Ir {group._ir.id}; expected one of Ir {t.ir.id}, which "
            f"holds %{t.name}."
        )
    return group

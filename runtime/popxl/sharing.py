"""What is known of the variable that a tensor stands for, as a shard or as an input of a graph."""

from dataclasses import dataclass
from typing import Any

from popxl.replica_grouping import ReplicaGrouping
from popxl.tensor_methods import TensorMethods


@dataclass(frozen=True)
class Sharing:
    """How replicas share a variable; None where that is not known."""

    grouping: ReplicaGrouping | None = None
    shard_over: int | None = None
    """How many replicas a shard's variable is cut over."""


def sharing_of(t: TensorMethods[Any]) -> Sharing:
    """What is known of the variable that a tensor stands for."""
    return t._sharing or Sharing()


def set_sharing(t: TensorMethods[Any], sharing: Sharing) -> None:
    """Tell of the variable that a tensor stands for."""
    t._sharing = sharing

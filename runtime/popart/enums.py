"""Enumerations and small records that programs mention by name."""

from dataclasses import dataclass
from enum import Enum


class VirtualGraphMode(Enum):
    """How ops are assigned to virtual devices. Placement only."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class ReductionType(Enum):
    """How a loss reduces its rows."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class DataType(Enum):
    """Element types, by the native layer's names."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8_143 = 17
    FLOAT8_152 = 18


class CommGroupType(Enum):
    """How replicas form groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    Ungrouped = 3


class VariableRetrievalMode(Enum):
    """Which replicas' values of a variable the host reads."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


@dataclass(frozen=True)
class VariableSettings:
    """Who shares a variable's value, and which values the host reads."""

    comm_group_type: CommGroupType = CommGroupType.All
    group_size: int = 0
    retrieval_mode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup


class AnchorReturnType(Enum):
    """Which of a tensor's values are returned to the host. ``AnchorReturnType("All")`` and the like
    are accepted.
    """

    Final = "FINAL"
    EveryN = "EVERYN"
    All = "ALL"
    Sum = "SUM"

    @classmethod
    def _missing_(cls, value: object) -> "AnchorReturnType | None":
        return next((m for m in cls if isinstance(value, str) and m.value == value.upper()), None)

"""Enumerations and small records that programs mention by name."""

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class CommGroup:
    """A group of replicas: how groups are formed, and how many replicas are in one."""

    type: CommGroupType = CommGroupType.All
    replicaGroupSize: int = 0  # noqa: N815 - the native layer's name


class VariableRetrievalMode(Enum):
    """Which replicas' values of a variable the host reads."""

    OnePerGroup = 0
    AllReduceReplicas = 1
    AllReplicas = 2


@dataclass(frozen=True)
class VariableSettings:
    """The replicas that share a variable's value, and which values the host reads."""

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


class SubgraphCopyingStrategy(Enum):
    """When the operands of a called graph are copied. Placement only."""

    OnEnterAndExit = 0
    JustInTime = 1


class AccumulateOuterFragmentSchedule(Enum):
    """The order of what follows the accumulation of gradients. Scheduling only."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class TensorStorage(Enum):
    """A place on the device or off it."""

    OnChip = 0
    OffChip = 1


class ReplicatedTensorSharding(Enum):
    """Whether a tensor is split over its replica group."""

    Off = 0
    On = 1


class GradientTensorTrackingMethod(Enum):
    """Which gradients an automatic loss scale looks at."""

    ConvAndMatmulGradients = 0
    AllNonViewChangingGradientTensors = 1
    GradientsOfUserSpecifiedTensors = 2


class PatternsLevel(Enum):
    """How many of the native layer's clean-ups of graphs run."""

    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


# Session options take the records below. They are kept, and have no effect.


@dataclass
class TensorLocation:
    """A storage, and whether the tensor is sharded."""

    storage: TensorStorage = TensorStorage.OnChip
    replicatedTensorSharding: ReplicatedTensorSharding = ReplicatedTensorSharding.Off  # noqa: N815


@dataclass
class TensorLocationSettings:
    """The place where tensors of one kind live, from how many elements on."""

    location: TensorLocation = field(default_factory=TensorLocation)
    minElementsForOffChip: int = 2  # noqa: N815
    minElementsForReplicatedTensorSharding: int = 8192  # noqa: N815


@dataclass
class AccumulateOuterFragmentSettings:
    """A schedule, and the virtual devices that it spares."""

    schedule: AccumulateOuterFragmentSchedule = AccumulateOuterFragmentSchedule.Serial
    excludedVirtualGraphs: list[int] = field(default_factory=list)  # noqa: N815


@dataclass
class AutomaticLossScalingSettings:
    """The native layer's loss scale that follows histograms of gradients."""

    enabled: bool = False
    toTrackTensors: list[str] | None = None  # noqa: N815
    binEdgeLocation: float = 0.125  # noqa: N815
    thresholdUpperCountProportion: float = 1e-7  # noqa: N815
    updatePeriod: int = 1  # noqa: N815
    gradientTensorTrackingMethod: GradientTensorTrackingMethod = (  # noqa: N815
        GradientTensorTrackingMethod.AllNonViewChangingGradientTensors
    )


@dataclass
class Patterns:
    """The native layer's clean-ups of graphs."""

    level: PatternsLevel = PatternsLevel.Default

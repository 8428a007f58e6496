"""The session options of a program, which are among the few internals that programs reach for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from popart import (
    AccumulateOuterFragmentSettings,
    AutomaticLossScalingSettings,
    SubgraphCopyingStrategy,
    TensorLocationSettings,
    VirtualGraphMode,
)

EFFECTIVE = frozenset(
    {
        "enableStochasticRounding",
        "enableEngineCaching",
        "cachePath",
        "numIOTiles",
        "enableInplaceAmbiguityChecking",
    }
)
"""Options that this runtime reads. Every other one is kept and has no effect."""

ENUMERATED = {"partialsTypeMatMuls": ("", "half", "float")}
"""Options whose values have names."""

REPLICATION = ("enableReplicatedGraphs", "replicatedGraphCount")
LAUNCHED = (
    *REPLICATION,
    "enableDistributedReplicatedGraphs",
    "globalReplicationFactor",
    "globalReplicaOffset",
)
"""Options that say which replicas there are. Those of one process follow `REPLICATION`; the
launcher's are fixed.
"""


@dataclass
class SessionOptions:
    """Options of one Ir, freely assignable; `check` looks at them where they are used.

    Those outside `EFFECTIVE` and `REPLICATION` are accepted, kept and change nothing.
    """

    numIOTiles: int = 0
    enableStochasticRounding: bool = False
    enableInplaceAmbiguityChecking: bool = True
    """Whether a Session refuses writes in place whose order nothing fixes, see
    `popxl.transforms.ambiguity`.
    """
    partialsTypeMatMuls: str = ""
    enableEngineCaching: bool = False
    cachePath: str = ""
    enableReplicatedGraphs: bool = False
    replicatedGraphCount: int = 1
    enableDistributedReplicatedGraphs: bool = False
    globalReplicationFactor: int = 1
    globalReplicaOffset: int = 0
    engineOptions: dict[str, str] = field(default_factory=dict)
    convolutionOptions: dict[str, str] = field(default_factory=dict)
    matmulOptions: dict[str, str] = field(default_factory=dict)
    lstmOptions: dict[str, str] = field(default_factory=dict)
    gclOptions: dict[str, str] = field(default_factory=dict)
    reportOptions: dict[str, str] = field(default_factory=dict)
    dotChecks: set[str] = field(default_factory=set)
    logDir: str = ""
    aliasZeroCopy: bool = False
    constantWeights: bool = True
    enableExplicitMainLoops: bool = True
    enableFloatingPointChecks: bool = False
    enableOutlining: bool = True
    explicitRecomputation: bool = True
    useHostCopyOps: bool = True
    virtualGraphMode: VirtualGraphMode = VirtualGraphMode.Manual
    subgraphCopyingStrategy: SubgraphCopyingStrategy = SubgraphCopyingStrategy.OnEnterAndExit
    accumulateOuterFragmentSettings: AccumulateOuterFragmentSettings = field(
        default_factory=AccumulateOuterFragmentSettings
    )
    automaticLossScalingSettings: AutomaticLossScalingSettings = field(
        default_factory=AutomaticLossScalingSettings
    )
    activationTensorLocationSettings: TensorLocationSettings = field(
        default_factory=TensorLocationSettings
    )
    weightTensorLocationSettings: TensorLocationSettings = field(
        default_factory=TensorLocationSettings
    )
    optimizerStateTensorLocationSettings: TensorLocationSettings = field(
        default_factory=TensorLocationSettings
    )
    accumulatorTensorLocationSettings: TensorLocationSettings = field(
        default_factory=TensorLocationSettings
    )

    def check(self) -> None:
        """ValueError for a value that an option does not have."""
        for name, known in ENUMERATED.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"session option {name}: got {value!r}; expected one of "
                    f"{', '.join(map(repr, known))}."
                )
        count = self.replicatedGraphCount
        if not isinstance(count, int) or count < 1:
            raise ValueError(
                f"session option replicatedGraphCount: got {count!r}; expected a positive int."
            )

    def replicas(self) -> int:
        """Replicas in a process that no launcher started."""
        self.check()
        return self.replicatedGraphCount if self.enableReplicatedGraphs else 1

    def ignored(self, launched: Mapping[str, Any] | None = None) -> list[str]:
        """Options that were set and have no effect.

        Args:
            launched: the values of `LAUNCHED` that a launcher's program has, whatever is set
                afterwards.
        """
        expected = {**vars(SessionOptions()), **(launched or {})}
        used = {
            *EFFECTIVE,
            *(REPLICATION if launched is None and self.enableReplicatedGraphs else ()),
        }
        return sorted(
            name
            for name, v in vars(self).items()
            if name not in used and v != expected.get(name, object())
        )

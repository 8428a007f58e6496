"""The few internals of the original that programs reach for: ``ir._pb_ir`` and its session options."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir

logger = logging.getLogger("popxl")

EFFECTIVE = frozenset({"enableStochasticRounding", "enableEngineCaching", "cachePath", "numIOTiles"})
"""Options that this runtime reads. Every other one is kept and has no effect."""


@dataclass
class SessionOptions:
    """Options of one Ir, freely assignable. Those outside `EFFECTIVE` are accepted, kept and change nothing."""

    numIOTiles: int = 0
    enableStochasticRounding: bool = False
    partialsTypeMatMuls: str = ""
    enableEngineCaching: bool = False
    cachePath: str = ""
    enableReplicatedGraphs: bool = False
    replicatedGraphCount: int = 1
    enableDistributedReplicatedGraphs: bool = False
    globalReplicationFactor: int = 1
    globalReplicaOffset: int = 0
    engineOptions: Dict[str, str] = field(default_factory=dict)

    def report_ignored(self) -> None:
        """Log once, at DEBUG, which options were set and have no effect."""
        plain = SessionOptions()
        ignored = sorted(
            name
            for name, value in vars(self).items()
            if name not in EFFECTIVE and not name.startswith(("replicated", "global", "enableRepl", "enableDist"))
            and value != getattr(plain, name, object())
        )  # fmt: skip
        if ignored:
            logger.debug("session options without effect on this runtime: %s", ", ".join(ignored))


class IrInternals:
    """What programs find at ``ir._pb_ir``."""

    def __init__(self, ir: "Ir") -> None:
        self._ir = ir
        self._options = SessionOptions()

    def getSessionOptions(self) -> SessionOptions:  # noqa: N802 - PopART's name
        """The one mutable options object of the Ir."""
        return self._options

    def getAllGraphs(self) -> List["Graph"]:  # noqa: N802
        """Every graph, the main graph included."""
        return list(self._ir.graphs)

    def setPatterns(self, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Accepted; graph clean-up happens in the engine."""

    def applyPreAliasPatterns(self, *args: Any, **kwargs: Any) -> Tuple[()]:  # noqa: N802
        """Accepted; graph clean-up happens in the engine."""
        return ()

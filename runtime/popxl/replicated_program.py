"""A program without its graphs: how many replicas run it, in which groups, and whether it may still
grow.
"""

import itertools
import numbers
import os
from typing import Any, Literal

import popdist
import popdist.popart

from popxl.options import LAUNCHED, SessionOptions
from popxl.replica_grouping import ReplicaGrouping, assignment_from_stride
from popxl.unpicklable import Unpicklable

_ids = itertools.count()


class ReplicatedProgram(Unpicklable):
    """Base of `Ir`: what needs none of its graphs."""

    def __init__(self, replication: int | Literal["popdist"] = 1) -> None:
        self._id = next(_ids)
        self._frozen = False
        self._num_host_transfers = 1
        self._options = SessionOptions()
        self._launched: dict[str, Any] | None = None
        """The session options that say which replicas a launcher has started, None without one."""
        self._fixed_replicas: tuple[int, int] | None = None
        """Replicas over all processes and in this one, where no session option changes them any
        more.
        """
        options = self._options
        if replication == "popdist":
            popdist.popart.configureSessionOptions(options)
            self._launched = {name: getattr(options, name) for name in LAUNCHED}
            self._fixed_replicas = popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()
        elif (
            isinstance(replication, numbers.Integral)
            and not isinstance(replication, bool)
            and replication >= 1
        ):
            options.enableReplicatedGraphs, options.replicatedGraphCount = (
                replication > 1,
                int(replication),
            )
        else:
            raise ValueError(
                f"Ir: got replication {replication!r}; expected a positive int or 'popdist'."
            )
        if cache := os.environ.get("POPXL_CACHE_DIR"):
            options.enableEngineCaching, options.cachePath = True, cache

    @property
    def id(self) -> int:
        """Unique number."""
        return self._id

    @property
    def num_host_transfers(self) -> int:
        """Transfers of each stream in one run: device iterations times accumulation where loads sit
        in repeats.
        """
        return self._num_host_transfers

    @num_host_transfers.setter
    def num_host_transfers(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"num_host_transfers: got {value}; expected at least 1.")
        self._check_open("num_host_transfers")
        self._num_host_transfers = int(value)

    @property
    def replication_factor(self) -> int:
        """Replicas over all processes. Without a launcher the session options say how many, until a
        Session is made.
        """
        return self._fixed_replicas[0] if self._fixed_replicas else self._options.replicas()

    @replication_factor.setter
    def replication_factor(self, value: int) -> None:
        self._check_open("replication_factor")
        options = self._options
        options.enableReplicatedGraphs, options.replicatedGraphCount = int(value) > 1, int(value)
        self._launched = self._fixed_replicas = None

    @property
    def instance_replication_factor(self) -> int:
        """Replicas in this process."""
        return self._fixed_replicas[1] if self._fixed_replicas else self._options.replicas()

    def __eq__(self, value: Any) -> bool:
        if not isinstance(value, ReplicatedProgram):
            raise TypeError(f"Ir: got {type(value).__name__} to compare with; expected an Ir.")
        return self._id == value._id

    def __hash__(self) -> int:
        return hash(self._id)

    # Groupings

    def replica_grouping(self, stride: int = 1, group_size: int | None = None) -> ReplicaGrouping:
        """Groups of ``group_size`` replicas ``stride`` apart; the default size is
        replication_factor // stride.

        Raises:
            ValueError: stride or size outside 1..replicas, or not dividing the replicas.
        """
        n = self.replication_factor
        if not 1 <= stride <= n or n % stride:
            raise ValueError(
                f"replica_grouping: got stride {stride}; expected a divisor of the {n} replicas."
            )
        size = n // stride if group_size is None else group_size
        if not 1 <= size <= n:
            raise ValueError(
                f"replica_grouping: got group_size {size}; expected 1 <= group_size <= {n} "
                "replicas."
            )
        return ReplicaGrouping._from_assignment(
            self, assignment_from_stride(n, 1 if size == 1 else stride, size)
        )

    def replica_grouping_from_assignments(self, assignment: list[int]) -> ReplicaGrouping:
        """The grouping with the given group number per replica. ValueError if the groups are not
        equal and in order.
        """
        return ReplicaGrouping._from_assignment(self, list(assignment))

    # Freezing

    def _check_open(self, what: str) -> None:
        if self._frozen:
            raise RuntimeError(
                f"{what}: got a change to Ir {self._id} after a Session was made of it; "
                "expected none. Build a new Ir."
            )

    def _freeze(self) -> None:
        self._options.check()
        self._fixed_replicas = self.replication_factor, self.instance_replication_factor
        self._frozen = True

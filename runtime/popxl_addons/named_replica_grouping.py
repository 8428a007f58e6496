"""Replica groupings by name, and the parts of a grouping inside one process or link domain."""

import json
import os

import popdist
import popxl
from popxl import ReplicaGrouping

from popxl_addons.dot_tree import DotTree


def fill_none_group(
    rg: ReplicaGrouping | None, none_value: ReplicaGrouping | None
) -> ReplicaGrouping | None:
    """``rg``, or ``none_value`` where it is None."""
    return none_value if rg is None else rg


class NamedReplicaGrouping(DotTree[ReplicaGrouping]):
    """Groupings by name."""

    @classmethod
    def build_groups(cls, names: list[str], value: ReplicaGrouping) -> "NamedReplicaGrouping":
        """The same grouping under every name."""
        return cls.pack(names, [value] * len(names))


def get_instance_replica_grouping(
    replica_grouping: ReplicaGrouping | None = None,
) -> ReplicaGrouping:
    """The part of a grouping (default: all replicas) inside one process. ValueError if processes
    differ in pattern.
    """
    return _inside(replica_grouping, _instance_size(), "get_instance_replica_grouping")


def is_cross_instance(replica_grouping: ReplicaGrouping) -> bool:
    """Whether a group spans processes."""
    return _is_cross(replica_grouping, _instance_size())


def get_ild_size_from_popdist() -> int:
    """Replicas in one link domain, from ``ipuLinkDomainSize`` in $POPLAR_TARGET_OPTIONS; by default
    at most 64.
    """
    options = json.loads(os.environ.get("POPLAR_TARGET_OPTIONS", "{}"))
    devices = options.get("ipuLinkDomainSize")
    if devices is None:
        return min(popxl.gir().replication_factor, 64)
    return max(1, int(devices) // popdist.getNumIpusPerReplica())


def get_ild_replica_grouping(replica_grouping: ReplicaGrouping | None = None) -> ReplicaGrouping:
    """The part of a grouping (default: all) inside one link domain. ValueError if domains differ in
    pattern.
    """
    return _inside(replica_grouping, get_ild_size_from_popdist(), "get_ild_replica_grouping")


def is_cross_ild(replica_grouping: ReplicaGrouping) -> bool:
    """Whether a group spans link domains."""
    return _is_cross(replica_grouping, get_ild_size_from_popdist())


def _instance_size() -> int:
    return popxl.gir().instance_replication_factor


def _is_cross(rg: ReplicaGrouping, size: int) -> bool:
    """Whether a group spans domains of ``size`` replicas."""
    return any(len({replica // size for replica in members}) > 1 for members in rg.groups)


def _inside(rg: ReplicaGrouping | None, size: int, where: str) -> ReplicaGrouping:
    """The coarsest grouping whose groups lie inside one of ``rg``'s groups and one domain of
    ``size`` replicas.
    """
    ir = popxl.gir()
    rg = rg or ir.replica_grouping()
    keys = [(group, replica // size) for replica, group in enumerate(rg.assignment)]
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    try:
        return ir.replica_grouping_from_assignments([order[key] for key in keys])
    except ValueError:
        raise ValueError(
            f"{where}: got {rg}, whose groups are cut into unequal parts; expected the same part "
            "of a group in every domain."
        ) from None

"""Partitions of the replicas into equal groups, and their arithmetic."""

import math
from typing import Any, Protocol

from popxl.unpicklable import Unpicklable


class Replicated(Protocol):
    """A program, as far as the groups of its replicas need it: an `Ir`."""

    @property
    def id(self) -> int:
        """Its number in this process."""

    @property
    def replication_factor(self) -> int:
        """Replicas over all processes."""


def _constant_stride(groups: list[list[int]]) -> int | None:
    """The one stride between consecutive members of every group; 1 for groups of one; None when
    they differ.
    """
    strides = {b - a for members in groups for a, b in zip(members, members[1:])}
    if not strides:
        return 1
    return strides.pop() if len(strides) == 1 else None


def assignment_from_stride(replicas: int, stride: int, group_size: int) -> list[int]:
    """The group number of each replica: a group starts at the lowest free replica and takes every
    ``stride``-th.
    """
    assignment = [-1] * replicas
    group = 0
    for first in range(replicas):
        if assignment[first] >= 0:
            continue
        members = [first + i * stride for i in range(group_size)]
        if members[-1] >= replicas or any(assignment[m] >= 0 for m in members):
            raise ValueError(
                f"replica_grouping: got stride {stride} and group_size {group_size} for "
                f"{replicas} replicas; expected groups that divide the replicas evenly. Choose "
                "stride * group_size to divide the number of replicas."
            )
        for member in members:
            assignment[member] = group
        group += 1
    return assignment


class ReplicaGrouping(Unpicklable):
    """A partition of the replicas into groups of equal size.

    For a collective its groups are the replicas that communicate; for a variable, those that share
    one value. Made by `Ir.replica_grouping` only.
    """

    def __init__(self) -> None:
        raise RuntimeError(
            "ReplicaGrouping: got a constructor call; expected ir.replica_grouping(stride, "
            "group_size)."
        )

    _ir: Replicated
    _assignment: list[int]
    _groups: list[list[int]]
    _stride: int | None
    _shard_groups: dict[int, "ReplicaGrouping"]
    """What `shard_groups` found, by number of pieces."""

    @classmethod
    def _from_assignment(cls, ir: Replicated, assignment: list[int]) -> "ReplicaGrouping":
        members: dict[int, list[int]] = {}
        for replica, number in enumerate(assignment):
            members.setdefault(number, []).append(replica)
        if (
            len(assignment) != ir.replication_factor
            or list(members) != list(range(len(members)))
            or len({len(group) for group in members.values()}) != 1
        ):
            raise ValueError(
                f"replica_grouping: got assignment {assignment} for {ir.replication_factor} "
                "replicas; expected one group number per replica, numbered 0, 1, .. in order of "
                "first appearance, in groups of equal size."
            )
        self = cls.__new__(cls)
        self._ir, self._assignment = ir, list(assignment)
        self._groups = list(members.values())
        self._stride = _constant_stride(self._groups)
        self._shard_groups = {}
        return self

    @property
    def assignment(self) -> list[int]:
        """The group number of each replica."""
        return list(self._assignment)

    @property
    def groups(self) -> list[list[int]]:
        """The members of each group, in increasing order."""
        return [list(members) for members in self._groups]

    @property
    def is_const(self) -> bool:
        """Whether one stride describes every group."""
        return self._stride is not None

    @property
    def stride(self) -> int:
        """Distance between consecutive members of a group; 1 for groups of one."""
        if self._stride is None:
            raise NotImplementedError(
                f"ReplicaGrouping.stride: got assignment {self._assignment}; expected a "
                "constant stride."
            )
        return self._stride

    @property
    def group_size(self) -> int:
        """Replicas in each group."""
        return len(self._groups[0])

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def transpose(self) -> "ReplicaGrouping":
        """The grouping whose k-th group collects the k-th member of every group."""
        position = {r: k for members in self._groups for k, r in enumerate(members)}
        return self._renumbered([position[r] for r in range(len(self._assignment))])

    def _renumbered(self, assignment: list[int]) -> "ReplicaGrouping":
        order = {n: i for i, n in enumerate(dict.fromkeys(assignment))}
        return ReplicaGrouping._from_assignment(self._ir, [order[n] for n in assignment])

    @property
    def const_rg(self) -> "ReplicaGrouping":
        """Itself, or for a non-constant grouping a refinement of it with a constant stride.

        The stride is the smallest between members of any group. Groups are split where their
        members are further apart; the size is the greatest common divisor of the pieces' sizes.
        """
        if self.is_const:
            return self
        stride = min(b - a for members in self._groups for a, b in zip(members, members[1:]))
        sizes: list[int] = []
        for members in self._groups:
            sizes.append(1)
            for before, member in zip(members, members[1:]):
                if member - before > stride:
                    sizes.append(1)
                else:
                    sizes[-1] += 1
        return self._renumbered(
            assignment_from_stride(len(self._assignment), stride, math.gcd(*sizes))
        )

    @property
    def to_device_map(self) -> list[int] | None:
        """This grouping's group that each group of `const_rg` belongs to; None when constant."""
        if self.is_const:
            return None
        return [self._assignment[members[0]] for members in self.const_rg._groups]

    @property
    def to_host_map(self) -> list[int] | None:
        """The first group of `const_rg` inside each group; None when constant."""
        device_map = self.to_device_map
        return None if device_map is None else [device_map.index(g) for g in range(self.num_groups)]

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, ReplicaGrouping):
            raise TypeError(
                f"ReplicaGrouping: got {type(other).__name__} to compare with; expected a "
                "ReplicaGrouping."
            )
        return self._ir is other._ir and self._assignment == other._assignment

    def __hash__(self) -> int:
        return hash((id(self._ir), tuple(self._assignment)))

    def __repr__(self) -> str:
        groups = f"assignment={self._assignment}"
        if self.is_const:
            groups = (
                f"stride={self._stride}, group_size={self.group_size}, num_groups={self.num_groups}"
            )
        return f"ReplicaGrouping(num_replicas={len(self._assignment)}, {groups})"


def shard_groups(grouping: ReplicaGrouping, shard_over: int) -> ReplicaGrouping:
    """The replicas that together hold one copy of a group's value that is cut into ``shard_over``
    pieces.

    Member i of a group of the result holds piece i. A group has several copies when it is larger:
    each run of ``shard_over`` members has one; in a group without a constant stride, each run of
    members of `const_rg`, where those are enough.
    """
    if shard_over == grouping.group_size:
        return grouping
    if shard_over not in grouping._shard_groups:
        const = grouping.const_rg
        base = grouping if const.group_size % shard_over else const
        copies = base.group_size // shard_over
        assignment = [0] * len(grouping._assignment)
        for number, members in enumerate(base._groups):
            for position, replica in enumerate(members):
                assignment[replica] = number * copies + position // shard_over
        grouping._shard_groups[shard_over] = grouping._renumbered(assignment)
    return grouping._shard_groups[shard_over]

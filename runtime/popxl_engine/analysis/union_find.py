"""Classes of things that are joined two at a time."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class UnionFind(Generic[Item]):
    """Each thing is in a class by itself until it is joined with another one."""

    def __init__(self) -> None:
        self._parent: dict[Item, Item] = {}

    def find(self, item: Item) -> Item:
        """The same thing for all of a class: the first one of those joined."""
        root = item
        while root in self._parent:
            root = self._parent[root]
        while item is not root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, one: Item, other: Item) -> None:
        """Make one class of two; it goes by what the first one goes by."""
        first, second = self.find(one), self.find(other)
        if first is not second:
            self._parent[second] = first

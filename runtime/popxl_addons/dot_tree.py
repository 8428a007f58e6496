"""Ordered nested mappings with attribute access: the names of a model's parameters."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from popxl_addons.utils import duplicate_items

L = TypeVar("L")
K = TypeVar("K")
V = TypeVar("V")
CLS = TypeVar("CLS", bound="DotTree[Any]")
Key = str | int


def sanitise(name: str) -> str:
    """Replace every character that cannot be in an identifier by an underscore."""
    return re.sub(r"\W", "_", name)


def to_mapping(key: "DotTree[K]", value: "DotTree[V]") -> dict[K, V]:
    """``{leaf of key: leaf of value}`` for the names that both have."""
    return key.to_mapping(value)


class DotTree(Generic[L]):
    """Ordered nested mapping: ``tree.a.b``, ``tree["a.b"]`` and ``tree.layers[0]`` read it,
    `insert` writes it.

    A negative integer counts from the largest numeric key. Reading an unknown name raises KeyError,
    or AttributeError where it was read as an attribute.
    """

    _map: "OrderedDict[str, Any]"

    def __init__(self, **kwargs: Any) -> None:
        object.__setattr__(self, "_map", OrderedDict())
        for key, value in kwargs.items():
            self.insert(key, value)

    # reading

    def get(self, key: Key) -> Any:
        """Value or subtree under a dotted name or a number. KeyError if there is none."""
        node: Any = self
        for part in self._parts(key):
            if not isinstance(node, DotTree) or part not in node._map:
                raise KeyError(
                    f"{type(self).__name__}: got {key!r}; expected one of {self._known()}."
                )
            node = node._map[part]
        return node

    def __getitem__(self, key: Key) -> Any:
        return self.get(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._map:
            known = "" if name.startswith("_") else f"; expected one of {self._known()}"
            raise AttributeError(f"{type(self).__name__}: got {name!r}{known}.")
        return self._map[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace or add an entry; ``tree.counter += 1`` comes here."""
        self.insert(name, value, overwrite=True)

    def __contains__(self, key: Key) -> bool:
        try:
            self.get(key)
        except KeyError:
            return False
        return True

    __iter__ = None  # integers index numeric keys, so the sequence protocol must not apply

    def keys(self) -> list[str]:
        """Top-level keys, in insertion order."""
        return list(self._map)

    def values(self) -> list[Any]:
        """Top-level values: leaves and subtrees."""
        return list(self._map.values())

    def len(self) -> int:
        """Number of top-level entries."""
        return self._map.__len__()

    def keys_flat(self) -> list[str]:
        """Dotted names of the leaves, in insertion order."""
        return list(self.to_dict())

    def values_flat(self) -> list[L]:
        """Leaves, in insertion order."""
        return list(self.to_dict().values())

    def len_flat(self) -> int:
        """Number of leaves."""
        return self.to_dict().__len__()

    def to_dict(self) -> "OrderedDict[str, L]":
        """Flat ``{dotted name: leaf}``."""
        flat: OrderedDict[str, L] = OrderedDict()
        for key, value in self._map.items():
            if isinstance(value, DotTree):
                flat.update((f"{key}.{name}", leaf) for name, leaf in value.to_dict().items())
            else:
                flat[key] = value
        return flat

    def unpack(self) -> tuple[list[str], list[L]]:
        """(names, leaves) sorted by name; ([], []) when empty."""
        flat = self.to_dict()
        names = sorted(flat)
        return names, [flat[name] for name in names]

    def to_mapping(self, values: "DotTree[V]") -> dict[L, V]:
        """``{my leaf: the other's leaf}`` for the names that both have."""
        other = values.to_dict()
        return {leaf: other[name] for name, leaf in self.to_dict().items() if name in other}

    # writing

    def insert(self, key: Key, value: Any, overwrite: bool = False) -> None:
        """Put a leaf or subtree under a dotted name or a number, making the subtrees on the way.

        Raises:
            ValueError: what the name begins with is there and not ``overwrite``, or the name is
                negative, or is no identifier and no number. With ``overwrite`` an entry is
                replaced, and subtrees on the way keep their others; they are copied, so that other
                trees that share them stay as they are.
        """
        where = f"{type(self).__name__}.insert"
        if isinstance(key, int) and key < 0:
            raise ValueError(f"{where}: got {key}; expected a number from 0 on.")
        first = self._parts(key)[0]
        if first in self._map and not overwrite:
            raise ValueError(
                f"{where}: got {key!r}, of which {first!r} is taken; expected a new name. Pass "
                "overwrite=True to replace it, or to add to it."
            )
        self._put(key, value, overwrite)

    def _put(
        self, key: Key, value: Any, overwrite: bool = False, own: set[int] | None = None
    ) -> None:
        """The same as `insert`, but where no entry is replaced subtrees on the way may be there: a
        tree made name by name.

        Args:
            own: ids of the subtrees that no other tree shares, while the tree is made: they need no
                copy, and those made on the way are added.
        """
        self._check(key, overwrite)
        *path, last = self._parts(key)
        node: DotTree[Any] = self
        for part in path:
            child: Any = node._map.get(part)
            if own is None or id(child) not in own:
                child = child.copy() if isinstance(child, DotTree) else type(self)()
                node._map[part] = child
            if own is not None:
                own.add(id(child))
            node = child
        node._map[last] = value

    def _check(self, key: Key, overwrite: bool) -> None:
        """ValueError if `_put` cannot put something there."""
        where = f"{type(self).__name__}.insert"
        *path, last = self._parts(key)
        for part in (*path, last):
            if not (part.isidentifier() or part.isdecimal()):
                raise ValueError(
                    f"{where}: got {key!r}; expected identifiers or numbers, separated by dots."
                )
        node: Any = self
        for part in path:
            node = node._map.get(part) if isinstance(node, DotTree) else None
            if node is not None and not isinstance(node, DotTree) and not overwrite:
                raise ValueError(
                    f"{where}: got {key!r}, but {part!r} is a leaf; expected a subtree."
                )
        if isinstance(node, DotTree) and last in node._map and not overwrite:
            raise ValueError(
                f"{where}: got {key!r}, which is taken; expected a new name. Pass "
                "overwrite=True to replace."
            )

    def update(self, values: "DotTree[L]", overwrite: bool = False) -> None:
        """Insert every top-level entry of another tree, subtrees copied."""
        for key, value in values._map.items():
            self.insert(key, value.copy() if isinstance(value, DotTree) else value, overwrite)

    def pop(self, key: Key) -> Any:
        """Remove the entry under a dotted name and return it. KeyError if there is none."""
        value = self.get(key)
        *path, last = self._parts(key)
        node: DotTree[Any] = self
        for part in path:
            node._map[part] = node._map[part].copy()
            node = node._map[part]
        del node._map[last]
        return value

    # new trees

    def copy(self: CLS) -> CLS:
        """Copy of the structure; the leaves are shared."""
        return self.map(lambda leaf: leaf)

    def map(self: CLS, fn: Callable[[Any], Any]) -> CLS:
        """New tree with ``fn`` applied to every leaf."""
        new = type(self)()
        for key, value in self._map.items():
            new._map[key] = value.map(fn) if isinstance(value, DotTree) else fn(value)
        return new

    def filter_keys(self: CLS, keys: Iterable[Key]) -> CLS:
        """New tree of these (dotted) names, in this order. ValueError for duplicates, KeyError for
        unknown names.
        """
        keys = list(keys)
        if repeated := duplicate_items(keys):
            raise ValueError(
                f"{type(self).__name__}.filter_keys: got {repeated} more than once; expected "
                "each key once."
            )
        return self.from_dict(OrderedDict((key, self.get(key)) for key in keys))

    @classmethod
    def from_dict(cls: type[CLS], d: Mapping[Any, Any]) -> CLS:
        """Tree of a flat or nested dict. Keys may be numbers and dotted, values may be subtrees."""
        tree = cls()
        own: set[int] = set()
        for key, value in d.items():
            tree._put(key, cls.from_dict(value) if isinstance(value, Mapping) else value, own=own)
        return tree

    @classmethod
    def pack(cls: type[CLS], keys: Iterable[Key], values: Iterable[Any]) -> CLS:
        """Tree of names and their leaves: the inverse of `unpack`."""
        return cls.from_dict(OrderedDict(zip(keys, values)))

    # private

    def _parts(self, key: Key) -> list[str]:
        if isinstance(key, int) and key < 0:
            numbers = [int(k) for k in self._map if k.isdecimal()]
            return [str(max(numbers, default=-1) + 1 + key)]
        return str(key).split(".")

    def _known(self) -> str:
        return ", ".join(self._map) or "none: the tree is empty"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(k for k in self._map if k.isidentifier())]

    def __repr__(self) -> str:
        leaves = ", ".join(f"{name}: {leaf!r}" for name, leaf in self.to_dict().items())
        return f"{type(self).__name__}({leaves})"

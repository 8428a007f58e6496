"""What is known of a tensor before it exists."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from popxl.dtypes import dtype


class TensorSpec(Mapping[str, Any]):
    """Shape, dtype and, for a shard, the unsharded shape. Accepted wherever `Ir.create_graph` takes
    a tensor.
    """

    __slots__ = ("shape", "dtype", "meta_shape")

    def __init__(self, shape: Iterable[int], dtype: dtype, meta_shape: Iterable[int] = ()):
        self.shape: tuple[int, ...] = tuple(map(int, shape))
        self.dtype = dtype
        self.meta_shape: tuple[int, ...] = tuple(map(int, meta_shape))

    @property
    def nelms(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.nelms * self.dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The spec as a dict with keys shape, dtype, meta_shape."""
        return {"shape": self.shape, "dtype": self.dtype, "meta_shape": self.meta_shape}

    def to_tuple(self) -> tuple[tuple[int, ...], dtype, tuple[int, ...]]:
        """(shape, dtype, meta_shape)."""
        return self.shape, self.dtype, self.meta_shape

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("shape", "dtype", "meta_shape"))

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorSpec) and self.to_tuple() == other.to_tuple()

    def __hash__(self) -> int:
        return hash(self.to_tuple())

    def __repr__(self) -> str:
        shard = f" of {list(self.meta_shape)}" if self.meta_shape else ""
        return f"{self.dtype.name}{list(self.shape)}{shard}"

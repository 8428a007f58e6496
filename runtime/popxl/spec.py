"""What is known of a tensor before it exists."""

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from popxl.dtypes import dtype
from popxl.errors import DTypeError, ShapeError


def check_dtype(where: str, given: Any) -> dtype:
    """The element type that is given. DTypeError, which begins with ``where``, for what stands for
    one elsewhere: names, and types of Python, numpy and torch.
    """
    if isinstance(given, dtype):
        return given
    try:
        meant = repr(dtype.as_dtype(given))
    except ValueError:
        meant = "one of the constants, e.g. popxl.float32"
    raise DTypeError(f"{where}: got {reprlib.repr(given)}; expected a popxl.dtype. Pass {meant}.")


def check_sizes(where: str, given: Iterable[Any], least: int = 0) -> tuple[int, ...]:
    """Sizes, or other counts, as Python's ints. ShapeError, which begins with ``where``, for
    fractions and for less than ``least``; TypeError for what holds no numbers.
    """
    try:
        numbers = tuple(given)
        sizes = tuple(map(int, numbers))
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{where}: got {given!r}; expected whole numbers, of a shape in a list or tuple."
        ) from None
    if sizes != numbers or (sizes and min(sizes) < least):
        raise ShapeError(
            f"{where}: got {', '.join(map(str, numbers))}; expected at least {least}, in whole "
            "numbers."
        )
    return sizes


class TensorSpec(Mapping[str, Any]):
    """Shape, dtype and, for a shard, the unsharded shape. Accepted wherever `Ir.create_graph` takes
    a tensor.
    """

    __slots__ = ("shape", "dtype", "meta_shape")

    def __init__(self, shape: Iterable[int], dtype: dtype, meta_shape: Iterable[int] = ()):
        self.shape: tuple[int, ...] = check_sizes("TensorSpec: shape", shape)
        self.dtype = check_dtype("TensorSpec: dtype", dtype)
        self.meta_shape: tuple[int, ...] = check_sizes("TensorSpec: meta_shape", meta_shape)

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

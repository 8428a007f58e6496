"""What a tensor is without its graph: a name, a shape and a dtype, and operators that add ops."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from popxl import dtypes
from popxl.dtypes import dtype
from popxl.spec import TensorSpec
from popxl.unpicklable import Unpicklable
from popxl.utils import host_array, to_numpy

TensorT = TypeVar("TensorT", bound="TensorMethods[Any]")
"""`popxl.Tensor`, which these methods return."""


class OpTable(Protocol):
    """The module `popxl.ops`, as far as tensors use it."""

    def __getattr__(self, name: str) -> Callable[..., Any]: ...


class Operators:
    """The ops that tensor methods and Python operators call; `popxl.ops` fills it in when it is
    imported.
    """

    table: OpTable


def _is_basic_index(key: Any) -> bool:
    """Whether a key chooses positions of one axis by numbers: True and False are none."""
    return isinstance(key, (int, np.integer, slice)) and not isinstance(key, bool)


class TensorMethods(Unpicklable, Generic[TensorT]):
    """Shape, dtype, methods and operators of `popxl.Tensor`, its only direct subclass."""

    _name: str
    _spec: TensorSpec
    _sharing: Any = None

    __array_ufunc__ = None  # numpy's operators defer to ours

    @property
    def id(self) -> str:
        """Unique id in the Ir: the graph's scope and the name."""
        raise NotImplementedError

    def _constant(self, data: np.ndarray, dtype: dtype) -> TensorT:
        """A constant of the graph that is being built."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Unique name in the graph."""
        return self._name

    @property
    def dtype(self) -> dtype:
        """Element type."""
        return self._spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        return self._spec.shape

    @property
    def meta_shape(self) -> tuple[int, ...]:
        """Unsharded shape of a shard, () otherwise."""
        return self._spec.meta_shape

    @property
    def spec(self) -> TensorSpec:
        """Shape, dtype and meta_shape."""
        return self._spec

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nelms(self) -> int:
        """Number of elements."""
        return self._spec.nelms

    def strides(self, shape: Iterable[int] | None = None) -> tuple[int, ...]:
        """Byte strides of a row-major layout of ``shape`` (default: its own)."""
        sizes = list(self.shape if shape is None else shape)
        return tuple(
            self.dtype.itemsize * int(np.prod(sizes[i + 1 :], dtype=np.int64))
            for i in range(len(sizes))
        )

    def _ensure_tensor(
        self, value: Any, dtype: dtypes.dtype | None = None, raise_on_empty: bool = True
    ) -> TensorT:
        """A tensor as it is; a host value as a constant of this tensor's dtype. ValueError for an
        empty value.
        """
        if isinstance(value, TensorMethods):
            return cast(TensorT, value)
        data = host_array(f"operand of %{self.name}: {self.spec}", value, dtype or self.dtype)
        if raise_on_empty and data.size == 0:
            raise ValueError(
                f"%{self.name}: got an empty {type(value).__name__} as operand; expected at "
                "least one element."
            )
        return self._constant(data, dtype or self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise ValueError(
                f"len: got the scalar %{self.name}; expected a tensor with at least one axis."
            )
        return self.shape[0]

    def __iter__(self) -> Any:
        raise TypeError(
            f"iter: got %{self.name}; tensors are not iterable. Use ops.split or indexing."
        )

    def __contains__(self, value: Any) -> bool:
        raise TypeError(
            f"in: got %{self.name}; membership of symbolic tensors is not defined. Use ops.equal."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}[{self.id} {self.dtype!r} {self.shape}]"

    def _apply(self, name: str, *arguments: Any) -> TensorT:
        result: TensorT = getattr(Operators.table, name)(*arguments)
        return result

    # Shape methods

    def transpose(self, permutation: Iterable[int] | None = None) -> TensorT:
        """`ops.transpose`."""
        return self._apply("transpose", self, permutation)

    def transpose_(self, permutation: Iterable[int] | None = None) -> TensorT:
        """`ops.transpose_`."""
        return self._apply("transpose_", self, permutation)

    @property
    def T(self) -> TensorT:  # noqa: N802
        """All axes reversed."""
        return self.transpose()

    @property
    def T_(self) -> TensorT:  # noqa: N802
        """All axes reversed, as a view."""
        return self.transpose_()

    def reshape(self, shape: Iterable[int]) -> TensorT:
        """`ops.reshape`."""
        return self._apply("reshape", self, shape)

    def reshape_(self, shape: Iterable[int]) -> TensorT:
        """`ops.reshape_`."""
        return self._apply("reshape_", self, shape)

    def flatten(self) -> TensorT:
        """One axis."""
        return self._apply("flatten", self)

    def flatten_(self) -> TensorT:
        """One axis, as a view."""
        return self._apply("flatten_", self)

    def detach(self) -> TensorT:
        """`ops.detach`."""
        return self._apply("detach", self)

    def detach_(self) -> TensorT:
        """`ops.detach_`."""
        return self._apply("detach_", self)

    def diag(self) -> TensorT:
        """Diagonal of a matrix. ValueError unless rank 2."""
        if self.rank != 2:
            raise ValueError(f"diag: got %{self.name}: {self.spec}; expected a matrix.")
        n = min(self.shape)
        flat = self[:n, :n].flatten()
        return self._apply(
            "gather", flat, self._constant(np.arange(n, dtype=np.int32) * (n + 1), dtypes.int32)
        )

    def copy_to_ipu(self, destination: int, source: int | None = None) -> TensorT:
        """`ops.ipu_copy`."""
        return self._apply("ipu_copy", self, destination, source)

    # Operators

    def _binary(self, name: str, other: Any, reflected: bool = False) -> TensorT:
        other = self._ensure_tensor(other)
        lhs, rhs = (other, self) if reflected else (self, other)
        return self._apply(name, lhs, rhs)

    def __add__(self, other: Any) -> TensorT:
        return self._binary("add", other)

    def __radd__(self, other: Any) -> TensorT:
        return self._binary("add", other, reflected=True)

    def __iadd__(self, other: Any) -> TensorT:
        self._apply("add_", self, self._ensure_tensor(other))
        return cast(TensorT, self)

    def __sub__(self, other: Any) -> TensorT:
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> TensorT:
        return self._binary("sub", other, reflected=True)

    def __mul__(self, other: Any) -> TensorT:
        return self._binary("mul", other)

    def __rmul__(self, other: Any) -> TensorT:
        return self._binary("mul", other, reflected=True)

    def __truediv__(self, other: Any) -> TensorT:
        return self._binary("div", other)

    def __rtruediv__(self, other: Any) -> TensorT:
        return self._binary("div", other, reflected=True)

    def __mod__(self, other: Any) -> TensorT:
        return self._binary("fmod", other)

    def __rmod__(self, other: Any) -> TensorT:
        return self._binary("fmod", other, reflected=True)

    def __pow__(self, other: Any) -> TensorT:
        return self._apply("pow", self, other)

    def __rpow__(self, other: Any) -> TensorT:
        return self._binary("pow", other, reflected=True)

    def __matmul__(self, other: Any) -> TensorT:
        return self._binary("matmul", other)

    def __rmatmul__(self, other: Any) -> TensorT:
        return self._binary("matmul", other, reflected=True)

    def __and__(self, other: Any) -> TensorT:
        return self._apply("logical_and", self, self._ensure_tensor(other, dtypes.bool))

    def __rand__(self, other: Any) -> TensorT:
        return self._apply("logical_and", self._ensure_tensor(other, dtypes.bool), self)

    def __or__(self, other: Any) -> TensorT:
        return self._apply("logical_or", self, self._ensure_tensor(other, dtypes.bool))

    def __ror__(self, other: Any) -> TensorT:
        return self._apply("logical_or", self._ensure_tensor(other, dtypes.bool), self)

    def __neg__(self) -> TensorT:
        return self._apply("negate", self)

    def __invert__(self) -> TensorT:
        return self._apply("logical_not", self)

    def __getitem__(self, key: Any) -> TensorT:
        if isinstance(key, tuple) or _is_basic_index(key):
            keys = key if isinstance(key, tuple) else (key,)
            for k in keys:
                if not _is_basic_index(k):
                    raise self._wrong_index(f"{type(k).__name__} in a tuple")
            return self._basic_slice(keys)
        if isinstance(key, (TensorMethods, np.ndarray, list)):
            return self._gather_or_mask(key)
        if isinstance(key, (str, bytes, Mapping)) or not isinstance(key, Iterable):
            raise self._wrong_index(type(key).__name__)
        return self._gather_or_mask(key if hasattr(key, "dtype") else list(key))

    def _wrong_index(self, given: str) -> TypeError:
        return TypeError(
            f"index: got {given} for %{self.name}; expected ints, slices, tuples of them, or an "
            "integer or boolean tensor or array."
        )

    def _basic_slice(self, key: tuple[int | slice, ...]) -> TensorT:
        if len(key) > self.rank:
            raise ValueError(
                f"index: got {len(key)} indices for %{self.name}: {self.spec}; expected at "
                f"most {self.rank}."
            )
        bounds: list[tuple[int | None, int | None, int | None]] = []
        for axis, k in enumerate(key):
            if isinstance(k, slice):
                bounds.append((k.start, k.stop, k.step))
                continue
            size = self.shape[axis]
            if not -size <= k < size:
                raise ValueError(
                    f"index: got {k} on axis {axis} of %{self.name}: {self.spec}; expected "
                    f"{-size} <= index < {size}."
                )
            k = int(k) % size
            bounds.append((k, k + 1, 1))
        starts, stops, steps = ([bound[i] for bound in bounds] for i in range(3))
        result = self._apply("slice", self, starts, stops, steps)
        dropped = [axis for axis, k in enumerate(key) if not isinstance(k, slice)]
        return self._apply("squeeze", result, dropped) if dropped else result

    def _gather_or_mask(self, key: Any) -> TensorT:
        if not isinstance(key, TensorMethods):
            try:
                data = to_numpy(key)
                dtype = dtypes.dtype.as_dtype(data.dtype)
            except (TypeError, ValueError):
                raise self._wrong_index(repr(key)) from None
            key = self._constant(data, dtype)
        if key.dtype is dtypes.bool:
            padded = (1,) * (self.rank - key.rank) + key.shape
            if len(padded) != self.rank or any(m not in (1, n) for m, n in zip(padded, self.shape)):
                raise ValueError(
                    f"index: got mask {key.spec} for %{self.name}: {self.spec}; expected one that "
                    "broadcasts to its shape: False positions become zero."
                )
            zero = self._constant(np.zeros((), self.dtype.as_numpy()), self.dtype)
            return self._apply("where", key, self, zero)
        if not key.dtype.is_int:
            raise self._wrong_index(f"%{key.name}: {key.spec}")
        return self._apply("gather", self, key)

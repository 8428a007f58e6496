"""Tensors: one symbolic value in one graph. Users import these from ``popxl.tensor``."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from popxl import dtypes
from popxl.context import get_current_graph
from popxl.dtypes import dtype
from popxl.errors import UndefinedValue
from popxl.placement import DEFAULT_IPU, TileSet
from popxl.spec import TensorSpec
from popxl.utils import HostScalarTensor, to_numpy

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.op_records import Op


class OpTable(Protocol):
    """The module `popxl.ops`, as far as tensors use it."""

    def __getattr__(self, name: str) -> Callable[..., "Tensor"]: ...


class Operators:
    """The ops that tensor methods and Python operators call; `popxl.ops` fills it in when it is
    imported.
    """

    table: OpTable


class Tensor:
    """A symbolic value in one graph. Compared and hashed by identity; RuntimeError on
    construction.
    """

    _graph: "Graph"
    _name: str
    _spec: TensorSpec
    _op: "Op | None"

    __array_ufunc__ = None  # numpy's operators defer to ours
    _remote: Any = None

    def __init__(self) -> None:
        raise RuntimeError(
            "Tensor: got a constructor call; expected popxl.variable, popxl.constant, "
            "graph_input or an op."
        )

    @classmethod
    def _make(cls, graph: "Graph", name: str, spec: TensorSpec, op: "Op | None") -> Any:
        self = cls.__new__(cls)
        self._graph, self._name, self._spec, self._op = graph, name, spec, op
        return self

    @property
    def id(self) -> str:
        """Unique id in the Ir: the graph's scope and the name."""
        return f"{self.scope}/{self._name}" if self.scope else self._name

    @property
    def name(self) -> str:
        """Unique name in the graph."""
        return self._name

    @property
    def scope(self) -> str:
        """The graph's part of the id."""
        return self._graph._scope

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

    @property
    def ir(self) -> "Ir":
        """Owning Ir."""
        return self._graph.ir

    @property
    def location_info(self) -> Any:
        """Where the tensor lives; remote placement for remote variables, None otherwise."""
        return self._remote

    @property
    def ipu(self) -> int:
        """Virtual device: of the op that made it, 0 outside `popxl.ipu`; else of the first op that
        uses it.

        UndefinedValue if neither an op made it nor one uses it.
        """
        ipu = self._device()
        if ipu is None:
            raise UndefinedValue(
                f"Tensor.ipu: got %{self.name}, which no op made and none uses; expected a "
                "known device."
            )
        return ipu

    def _device(self) -> int | None:
        """Where it is made, else where the first op that uses it takes it; None if neither."""
        if self._op is not None:
            return self._op.place_of(self).ipu
        user = next((op for op in self._graph._ops if self in op.inputs), None)
        if user is None:
            return None
        if user.definition.name == "ipu_copy":
            return int(user.arguments["source"])
        return DEFAULT_IPU if user.ipu is None else user.ipu

    @property
    def tile_set(self) -> TileSet:
        """Tile set of the op that made it. UndefinedValue if unknown."""
        tile_set = None if self._op is None else self._op.place_of(self).tile_set
        if tile_set is None:
            raise UndefinedValue(
                f"Tensor.tile_set: got %{self.name}, which no op made; expected a known tile set."
            )
        return tile_set

    @property
    def in_sync_with_ipu(self) -> bool:
        """For variables: whether the host's copy is current."""
        return True

    def strides(self, shape: Iterable[int] | None = None) -> tuple[int, ...]:
        """Byte strides of a row-major layout of ``shape`` (default: its own)."""
        sizes = list(self.shape if shape is None else shape)
        return tuple(
            self.dtype.itemsize * int(np.prod(sizes[i + 1 :], dtype=np.int64))
            for i in range(len(sizes))
        )

    def _ensure_tensor(
        self, value: Any, dtype: dtypes.dtype | None = None, raise_on_empty: bool = True
    ) -> "Tensor":
        """A tensor as it is; a host value as a constant of this tensor's dtype. ValueError for an
        empty value.
        """
        if isinstance(value, Tensor):
            return value
        data = to_numpy(value, dtype or self.dtype)
        if raise_on_empty and data.size == 0:
            raise ValueError(
                f"%{self.name}: got an empty {type(value).__name__} as operand; expected at "
                "least one element."
            )
        return make_constant(data, dtype or self.dtype, None)

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

    # Shape methods

    def transpose(self, permutation: Iterable[int] | None = None) -> "Tensor":
        """`ops.transpose`."""
        return Operators.table.transpose(self, permutation)

    def transpose_(self, permutation: Iterable[int] | None = None) -> "Tensor":
        """`ops.transpose_`."""
        return Operators.table.transpose_(self, permutation)

    @property
    def T(self) -> "Tensor":  # noqa: N802
        """All axes reversed."""
        return self.transpose()

    @property
    def T_(self) -> "Tensor":  # noqa: N802
        """All axes reversed, as a view."""
        return self.transpose_()

    def reshape(self, shape: Iterable[int]) -> "Tensor":
        """`ops.reshape`."""
        return Operators.table.reshape(self, shape)

    def reshape_(self, shape: Iterable[int]) -> "Tensor":
        """`ops.reshape_`."""
        return Operators.table.reshape_(self, shape)

    def flatten(self) -> "Tensor":
        """One axis."""
        return Operators.table.flatten(self)

    def flatten_(self) -> "Tensor":
        """One axis, as a view."""
        return Operators.table.flatten_(self)

    def detach(self) -> "Tensor":
        """`ops.detach`."""
        return Operators.table.detach(self)

    def detach_(self) -> "Tensor":
        """`ops.detach_`."""
        return Operators.table.detach_(self)

    def diag(self) -> "Tensor":
        """Diagonal of a matrix. ValueError unless rank 2."""
        if self.rank != 2:
            raise ValueError(f"diag: got %{self.name}: {self.spec}; expected a matrix.")
        n = min(self.shape)
        flat = self[:n, :n].flatten()
        return Operators.table.gather(
            flat, make_constant(np.arange(n, dtype=np.int32) * (n + 1), dtypes.int32, None)
        )

    def copy_to_ipu(self, destination: int, source: int | None = None) -> "Tensor":
        """`ops.ipu_copy`."""
        return Operators.table.ipu_copy(self, destination, source)

    # Operators

    def _binary(self, name: str, other: Any, reflected: bool = False) -> "Tensor":
        other = self._ensure_tensor(other)
        lhs, rhs = (other, self) if reflected else (self, other)
        result: Tensor = getattr(Operators.table, name)(lhs, rhs)
        return result

    def __add__(self, other: Any) -> "Tensor":
        return self._binary("add", other)

    def __radd__(self, other: Any) -> "Tensor":
        return self._binary("add", other, reflected=True)

    def __iadd__(self, other: Any) -> "Tensor":
        Operators.table.add_(self, self._ensure_tensor(other))
        return self

    def __sub__(self, other: Any) -> "Tensor":
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> "Tensor":
        return self._binary("sub", other, reflected=True)

    def __mul__(self, other: Any) -> "Tensor":
        return self._binary("mul", other)

    def __rmul__(self, other: Any) -> "Tensor":
        return self._binary("mul", other, reflected=True)

    def __truediv__(self, other: Any) -> "Tensor":
        return self._binary("div", other)

    def __rtruediv__(self, other: Any) -> "Tensor":
        return self._binary("div", other, reflected=True)

    def __mod__(self, other: Any) -> "Tensor":
        return self._binary("fmod", other)

    def __rmod__(self, other: Any) -> "Tensor":
        return self._binary("fmod", other, reflected=True)

    def __pow__(self, other: Any) -> "Tensor":
        return Operators.table.pow(self, other)

    def __rpow__(self, other: Any) -> "Tensor":
        return self._binary("pow", other, reflected=True)

    def __matmul__(self, other: Any) -> "Tensor":
        return self._binary("matmul", other)

    def __rmatmul__(self, other: Any) -> "Tensor":
        return self._binary("matmul", other, reflected=True)

    def __and__(self, other: Any) -> "Tensor":
        return Operators.table.logical_and(self, self._ensure_tensor(other, dtypes.bool))

    def __rand__(self, other: Any) -> "Tensor":
        return Operators.table.logical_and(self._ensure_tensor(other, dtypes.bool), self)

    def __or__(self, other: Any) -> "Tensor":
        return Operators.table.logical_or(self, self._ensure_tensor(other, dtypes.bool))

    def __ror__(self, other: Any) -> "Tensor":
        return Operators.table.logical_or(self._ensure_tensor(other, dtypes.bool), self)

    def __neg__(self) -> "Tensor":
        return Operators.table.negate(self)

    def __invert__(self) -> "Tensor":
        return Operators.table.logical_not(self)

    def __getitem__(self, key: Any) -> "Tensor":
        if isinstance(key, (int, np.integer, slice)) and not isinstance(key, bool):
            key = (key,)
        if isinstance(key, tuple) and all(isinstance(k, (int, np.integer, slice)) for k in key):
            return self._basic_slice(key)
        if isinstance(key, (str, bool, type(None))) or not isinstance(
            key, (Tensor, np.ndarray, list, tuple)
        ):
            raise self._wrong_index(type(key).__name__)
        return self._gather_or_mask(key)

    def _wrong_index(self, given: str) -> TypeError:
        return TypeError(
            f"index: got {given} for %{self.name}; expected ints, slices, tuples of them, or an "
            "integer or boolean tensor or array."
        )

    def _basic_slice(self, key: tuple[int | slice, ...]) -> "Tensor":
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
        result = Operators.table.slice(self, starts, stops, steps)
        dropped = [axis for axis, k in enumerate(key) if not isinstance(k, slice)]
        return Operators.table.squeeze(result, dropped) if dropped else result

    def _gather_or_mask(self, key: Any) -> "Tensor":
        if not isinstance(key, Tensor):
            try:
                data = to_numpy(key)
                dtype = dtypes.dtype.as_dtype(data.dtype)
            except (TypeError, ValueError):
                raise self._wrong_index(repr(key)) from None
            key = make_constant(data, dtype, None)
        if key.dtype is dtypes.bool:
            padded = (1,) * (self.rank - key.rank) + key.shape
            if len(padded) != self.rank or any(m not in (1, n) for m, n in zip(padded, self.shape)):
                raise ValueError(
                    f"index: got mask {key.spec} for %{self.name}: {self.spec}; expected one that "
                    "broadcasts to its shape: False positions become zero."
                )
            zero = make_constant(np.zeros((), self.dtype.as_numpy()), self.dtype, None)
            return Operators.table.where(key, self, zero)
        if not key.dtype.is_int:
            raise self._wrong_index(f"%{key.name}: {key.spec}")
        return Operators.table.gather(self, key)


class Constant(Tensor):
    """A tensor with a fixed value in its graph."""

    host_value: np.ndarray

    def copy_to_ipu(self, dst: int, src: int) -> Tensor:  # type: ignore[override]
        """`ops.ipu_copy` with an explicit source."""
        return Operators.table.ipu_copy(self, dst, src)


def make_constant(data: np.ndarray, dtype: dtype, name: str | None) -> Constant:
    """A constant of the current graph from an array of the right numpy type."""
    graph = get_current_graph()
    graph._check_open("constant")
    tensor: Constant = graph._new_tensor(TensorSpec(data.shape, dtype), name or "t", kind=Constant)
    tensor.host_value = data
    graph._constants.append(tensor)
    return tensor


TensorLike = Tensor | HostScalarTensor

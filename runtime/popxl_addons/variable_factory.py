"""How one parameter comes to life: as the input of a graph, and as any number of variables with
fresh data.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat, starmap
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import popdist
import popxl
from popdist import exchange
from popxl import ReplicaGrouping, Tensor, ops
from popxl.sharing import Sharing, set_sharing
from popxl.spec import check_dtype
from popxl.tensor import HostTensor, Variable
from popxl.utils import host_array, is_uniform, to_host_value

from popxl_addons.dot_tree import DotTree
from popxl_addons.memmap_files import is_there, make_file, map_file
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors

DataSource = Callable[[], HostTensor] | Iterable[HostTensor]
_FILES: "WeakKeyDictionary[popxl.Ir, set[Path]]" = WeakKeyDictionary()
"""The files that the variables of a program are in."""


class _Peekable(Iterator[HostTensor]):
    """An iterator over host data whose next item can be looked at without taking it."""

    def __init__(self, source: DataSource) -> None:
        if callable(source):
            source()  # a trial call: programs that seed numpy rely on this draw
            self._items: Iterator[HostTensor] = starmap(source, repeat(()))
        else:
            self._items = iter(source)
        self._next: list[HostTensor] = []

    def peek(self) -> HostTensor:
        """The next item, which stays. StopIteration when there is none."""
        if not self._next:
            self._next.append(next(self._items))
        return self._next[0]

    def __next__(self) -> HostTensor:
        return self._next.pop() if self._next else next(self._items)


def _as_item(data: HostTensor, dtype: popxl.dtype | None, name: str | None) -> np.ndarray:
    what = f"variable '{name}'" if name else "variable"
    if not isinstance(data, np.ndarray) or not is_uniform(data):
        return host_array(what, data, dtype, copy=False)
    # also where types round
    is_zero = not any(data.flat[0].tobytes())
    is_kept = dtype is not None and dtype.as_numpy() == data.dtype and is_zero
    return data if is_kept else to_host_value(what, data, dtype)


class VariableFactory:
    """Makes graph inputs and variables for one named parameter.

    Args:
        data_iter: function that gives one group's host data at each call, or an iterable with one
            item per variable and group. The first item is looked at here, for shape and dtype, and
            used by the first variable.
        dtype: element type; by default the data's, with 64 bits narrowed to 32.
        by_ref: whether the graph input is by reference.
        replica_grouping: replicas that share one value; default: all of the current Ir.
        shard_over: replicas over which a value is cut; the shape is then 1-D, and ``meta_shape``
            the whole shape.
    Raises:
        ValueError: ``data_iter`` fails, is no iterable, or gives no array.
        RuntimeError: no grouping, and no graph that is entered.
    """

    def __init__(
        self,
        data_iter: DataSource,
        dtype: popxl.dtype | None = None,
        name: str | None = None,
        by_ref: bool = False,
        replica_grouping: ReplicaGrouping | None = None,
        shard_over: int = 1,
    ) -> None:
        if dtype is not None:
            check_dtype(f"variable '{name}': dtype", dtype)
        try:
            self.data_iter = _Peekable(data_iter)
            first = _as_item(self.data_iter.peek(), dtype, name)
        except Exception as error:
            raise ValueError(
                f"variable '{name}': got a data source that fails ({type(error).__name__}: "
                f"{error}); expected a function that returns an array, or an iterable of arrays."
            ) from error
        self.name = name
        self.dtype = dtype or popxl.dtype.as_dtype(first.dtype)
        self.by_ref = by_ref
        self._ir = popxl.gir() if replica_grouping is None else None
        self._grouping = replica_grouping
        if shard_over > 1:
            self._grouping = self.replica_grouping  # the pieces are those of its size
        self.shard_over = shard_over
        self._seen: tuple[np.ndarray, Any, np.ndarray] | None = None
        """The last data that were one number seen everywhere, the number, and what they became."""
        self._whole_shape: tuple[int, ...] = tuple(first.shape)
        self.meta_shape: tuple[int, ...] = self._whole_shape if shard_over > 1 else ()
        self.shape: tuple[int, ...] = (
            (-(-first.size // shard_over),) if shard_over > 1 else self._whole_shape
        )

    @property
    def replica_grouping(self) -> ReplicaGrouping:
        """Replicas that share one value: by default all, however many the Ir gets."""
        if self._grouping is None:
            assert self._ir is not None
            return self._ir.replica_grouping()
        return self._grouping

    @property
    def replica_sharded(self) -> bool:
        """Whether the input is one replica's shard."""
        return self.shard_over > 1

    @property
    def shape_on_host(self) -> tuple[int, ...]:
        """Shape of a variable's host data: unsharded, the groups in front when there are
        several.
        """
        groups = self.replica_grouping.num_groups
        return (groups, *self._whole_shape) if groups > 1 else self._whole_shape

    def create_input(self, prefix: str | None = None) -> Tensor:
        """A new input of the current graph for this parameter."""
        t = popxl.graph_input(
            self.shape, self.dtype, _join(prefix, self.name), self.by_ref, self.meta_shape
        )
        set_sharing(t, Sharing(self._grouping, self.shard_over if self.replica_sharded else None))
        return t

    def create_tensor(
        self,
        name: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> Tensor:
        """A variable of the main graph with the next data; for a sharded parameter, this replica's
        shard of it.
        """
        name = name or self.name
        data = self._data(name, empty, memmap_dir, read_only_if_exists)
        if self.replica_sharded:
            return popxl.replica_sharded_variable(
                data,
                self.dtype,
                name,
                replica_grouping=self._grouping,
                shard_over=self.shard_over,
            )[1]
        return popxl.variable(data, self.dtype, name, replica_grouping=self._grouping)

    def create_remote_tensor(
        self,
        buffer: popxl.RemoteBuffer,
        entry: int,
        name: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> Variable:
        """A remote variable in slot ``entry`` with the next data; sharded if the buffer is."""
        name = name or self.name
        data = self._data(name, empty, memmap_dir, read_only_if_exists)
        make = popxl.remote_replica_sharded_variable if buffer.meta_shape else popxl.remote_variable
        return make(data, buffer, entry, self.dtype, name, replica_grouping=self._grouping)

    def next_data(self, empty: bool = False) -> np.ndarray:
        """Host data of the next variable: one item per group, stacked if there are several;
        arbitrary if ``empty``.
        """
        shape = self.shape_on_host
        if empty:
            return np.empty(shape, self.dtype.as_numpy())
        if shape == self._whole_shape:
            return self._next_item()
        items = [self._next_item() for _ in range(shape[0])]
        first = items[0]
        if is_uniform(first) and (
            len(set(map(id, items))) == 1
            or all(is_uniform(i) and i.flat[0] == first.flat[0] for i in items)
        ):
            return np.broadcast_to(first, shape)
        return np.stack(items)

    def next_memmap(
        self, memmap_dir: str, name: str, empty: bool = False, read_only_if_exists: bool = False
    ) -> np.memmap:
        """The same as the raw file ``<name>.npy`` in a directory, mapped into memory.

        A file that is there already keeps its values, and nothing is taken from the data source for
        it: any number of programs may map it, and each sees what the others write. It has no
        header, so that only its size tells whether it is this variable's. A new file has its name
        once its data are complete. In a program of several instances
        they all map one file, which instance 0 writes: the directory must be one that all of them
            see.

        Args:
            read_only_if_exists: map a file that is there already read-only.
        Raises:
            ValueError: a file of another size, which stays as it is.
            RemoteMemoryError: a directory that does not take the file, a file that cannot be
                mapped, or one of both that another user can write to: the numbers would be theirs.
                The space is reserved at once, for a disk that is full when a page is written would
                end the process.
        """
        path, shape, dtype = (
            Path(memmap_dir) / f"{name}.npy",
            self.shape_on_host,
            self.dtype.as_numpy(),
        )
        size = max(1, math.prod(shape) * dtype.itemsize)  # a file of no bytes cannot be mapped
        mode: Literal["r", "r+"] = "r+"
        if not exchange.gather_patiently(is_there(path))[0]:
            # on every instance: later variables take the items after these
            data = None if empty else self.next_data()
            if popdist.getInstanceIndex() == 0:
                make_file(path, dtype, shape, size, data)
            exchange.barrier(f"waiting for {path}")
        elif read_only_if_exists:
            mode = "r"
        try:
            return map_file(path, dtype, shape, size, mode)
        except ValueError as error:
            raise ValueError(f"variable '{self.name}': {error}") from error

    def _next_item(self) -> np.ndarray:
        data = next(self.data_iter, None)
        if data is None:
            raise ValueError(
                f"variable '{self.name}': got no more items; expected one for each variable and "
                "group. Give a function, or a longer iterable."
            )
        if self._seen is not None and data is self._seen[0] and data.item(0) == self._seen[1]:
            return self._seen[2]
        item = _as_item(data, self.dtype, self.name)
        if item.shape != self._whole_shape:
            raise ValueError(
                f"variable '{self.name}': got data of shape {list(item.shape)}; expected "
                f"{list(self._whole_shape)}, as at first."
            )
        if isinstance(data, np.ndarray) and is_uniform(data):
            self._seen = data, data.item(0), item
        return item

    def _data(
        self, name: str | None, empty: bool, memmap_dir: str | None, read_only: bool
    ) -> np.ndarray:
        """Data of a variable of the current Ir, which no other one has if they are in a file."""
        if memmap_dir is None:
            return self.next_data(empty)
        files = _FILES.setdefault(popxl.gir(), set())
        path = Path(memmap_dir).resolve() / f"{name}.npy"
        if path in files:
            raise ValueError(
                f"variable '{name}': got {path}, which another variable of the program is in; "
                "expected a file for each. Pass a prefix."
            )
        data = self.next_memmap(memmap_dir, str(name), empty, read_only)
        files.add(path)
        return data


def _join(prefix: str | None, name: str | None) -> str | None:
    return f"{prefix}.{name}" if prefix else name


class NamedVariableFactories(DotTree[VariableFactory]):
    """Factories by name."""

    def init(
        self,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """Variables for all, made in sorted name order."""
        return self._make(
            lambda name, f: f.create_tensor(
                _join(prefix, name), empty, memmap_dir, read_only_if_exists
            )
        )

    def init_remote(
        self,
        buffers: DotTree[popxl.RemoteBuffer],
        entry: int = 0,
        prefix: str | None = None,
        empty: bool = False,
        memmap_dir: str | None = None,
        read_only_if_exists: bool = False,
    ) -> NamedTensors:
        """Remote variables for all, in slot ``entry`` of the buffer of the same name, made in
        sorted name order.
        """
        return self._make(
            lambda name, f: f.create_remote_tensor(
                buffers.get(name),
                entry,
                _join(prefix, name),
                empty,
                memmap_dir,
                read_only_if_exists,
            )
        )

    def init_zero(self) -> NamedTensors:
        """Zeros made in the current graph at every execution."""
        return self._make(
            lambda name, f: ops.init(f.shape, f.dtype, name, "zero", f.meta_shape or None)
        )

    def init_undef(self) -> NamedTensors:
        """Tensors of undefined contents, made in the current graph at every execution."""
        return self._make(
            lambda name, f: ops.init(f.shape, f.dtype, name, "undef", f.meta_shape or None)
        )

    @property
    def replica_groupings(self) -> NamedReplicaGrouping:
        """The groupings by name."""
        return NamedReplicaGrouping.from_dict(
            {name: f.replica_grouping for name, f in self.to_dict().items()}
        )

    def _make(self, make: Callable[[str, VariableFactory], Any]) -> NamedTensors:
        names, factories = self.unpack()
        return NamedTensors.pack(
            names, [make(name, factory) for name, factory in zip(names, factories)]
        )


def add_variable_input(
    name: str,
    data_iter: DataSource,
    dtype: popxl.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: ReplicaGrouping | None = None,
) -> tuple[Tensor, VariableFactory]:
    """A new input of the current graph and the factory of its variables."""
    factory = VariableFactory(data_iter, dtype, name, by_ref, replica_grouping)
    return factory.create_input(), factory


def add_replica_sharded_variable_input(
    name: str,
    data_iter: DataSource,
    dtype: popxl.dtype | None = None,
    by_ref: bool = False,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
) -> tuple[Tensor, VariableFactory]:
    """The same for one replica's shard; ``shard_over`` defaults to the size of the group."""
    if shard_over is None:
        shard_over = (replica_grouping or popxl.gir().replica_grouping()).group_size
    factory = VariableFactory(data_iter, dtype, name, by_ref, replica_grouping, shard_over)
    return factory.create_input(), factory

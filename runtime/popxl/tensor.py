"""Tensors, and everything that makes one without an op: variables, constants, graph inputs and
outputs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from popxl import dtypes
from popxl.context import get_current_graph, get_ir, get_main_graph
from popxl.dtypes import dtype
from popxl.errors import DTypeError, GraphError
from popxl.program import (
    Constant,
    RetrievalMode,
    Tensor,
    TensorByRef,
    Variable,
    make_constant,
)
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.sharing import Sharing, set_sharing
from popxl.spec import TensorSpec, check_sizes
from popxl.utils import HostScalarTensor, HostTensor, ScalarType, host_array, to_host_value

__all__ = [
    "Constant",
    "HostScalarTensor",
    "HostTensor",
    "RemotePlacement",
    "ScalarType",
    "Tensor",
    "TensorByRef",
    "TensorLike",
    "TensorSpec",
    "Variable",
    "constant",
    "graph_input",
    "graph_output",
    "make_constant",
    "remote_replica_sharded_variable",
    "remote_variable",
    "replica_sharded_buffer",
    "replica_sharded_variable",
    "variable",
]

TensorLike = Tensor | HostScalarTensor


@dataclass(frozen=True)
class RemotePlacement:
    """The place of a remote variable's value. ``shard_over`` replicas of a group hold one piece
    each (1: whole).

    The elements fill the slots in their order, whatever the shapes; what is left of the last slot
    is zeros.
    """

    buffer: RemoteBuffer
    offset: int
    shard_over: int = 1

    @property
    def room(self) -> int:
        """Elements that the pieces' slots hold together."""
        return self.shard_over * math.prod(self.buffer.tensor_shape)

    def check(self, variable: Variable) -> None:
        """ValueError unless the slots have room for the variable's value, and its dtype."""
        where = f"Session: got remote variable %{variable.name}: {variable.spec} in a buffer with "
        slot = f"slots of {self.buffer.tensor_dtype.name}{list(self.buffer.tensor_shape)}"
        if self.buffer.tensor_dtype is not variable.dtype:
            raise GraphError(
                f"{where}{slot}; expected a value of the slot's dtype. Make the buffer with the "
                "value's, or pass dtype=."
            )
        if variable.nelms > self.room:
            pieces = (
                f", of which {self.shard_over} hold a piece each" if self.shard_over > 1 else ""
            )
            make = "replica_sharded_buffer" if self.shard_over > 1 else "remote_buffer"
            raise GraphError(
                f"{where}{slot}{pieces}; expected at most {self.room} elements. Make the buffer "
                f"with the value's shape: {make}."
            )


def _make_variable(
    data: HostScalarTensor,
    dtype: dtype | None,
    name: str | None,
    downcast: bool,
    grouping: ReplicaGrouping | None,
    retrieval: RetrievalMode | None,
    log2_scale: int | None,
    nan_on_overflow: bool | None,
) -> Variable:
    graph = get_main_graph()
    if get_current_graph() is not graph:
        raise ValueError(
            f"variable: got a call in graph '{get_current_graph().name}'; expected the main "
            "graph. Make the variable there and pass it in as a graph input."
        )
    if retrieval not in (None, "one_per_group", "all_replicas"):
        raise ValueError(
            f"variable: got retrieval_mode {retrieval!r}; expected 'one_per_group' or "
            "'all_replicas'."
        )
    graph._check_open("variable")
    dtype = dtype or _dtype_of(data)
    what = f"variable '{name}'" if name else "variable"
    array = to_host_value(what, data, dtype, downcast, log2_scale, nan_on_overflow)
    shape = array.shape
    if grouping is not None and grouping.num_groups > 1:
        if not shape or shape[0] != grouping.num_groups:
            raise ValueError(
                f"variable {name or ''}: got data of shape {list(shape)} for "
                f"{grouping.num_groups} groups of replicas; expected [{grouping.num_groups}, "
                "...]: one value per group in front."
            )
        shape = shape[1:]
    spec = TensorSpec(shape, dtype or dtypes.dtype.as_dtype(array.dtype))
    tensor: Variable = graph._new_tensor(spec, name or "t", kind=Variable)
    tensor.host_value, tensor._grouping, tensor._retrieval = (
        array,
        grouping,
        retrieval or "one_per_group",
    )
    graph._variables.append(tensor)
    return tensor


def variable(
    data: HostScalarTensor,
    dtype: dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = None,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """A new variable of the main graph.

    Args:
        data: initial value; with a grouping of several groups one value per group, stacked in
            front.
        dtype: None infers it from the data, 64-bit elements narrowed unless ``downcast`` is False.
        replica_grouping: replicas that share one value; default: all of them.
        retrieval_mode: what the host reads back: "one_per_group" (default) or "all_replicas".
        log2_scale, nan_on_overflow: for numbers that become float8, as for `popxl.utils.to_numpy`.
    Raises:
        ValueError: outside the main graph, or data whose first axis is not the number of groups.
        TypeError, RuntimeError: for float8 as `popxl.utils.to_numpy`.
    """
    return _make_variable(
        data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow
    )


def remote_variable(
    data: HostScalarTensor,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """A variable whose value lives in slot ``offset`` of a remote buffer. Only remote loads and
    stores reach it.

    Its elements fill the slot in their order, whatever its shape; after fewer than the slot's come
    zeros. More than a slot holds, and another dtype, are refused when a Session is made.
    """
    result = _make_variable(
        data, dtype, name, downcast, replica_grouping, retrieval_mode, log2_scale, nan_on_overflow
    )
    _place(result, remote_buffer, offset, 1)
    return result


def _place(variable: Variable, buffer: RemoteBuffer, offset: int, shard_over: int) -> None:
    if offset < 0:
        raise ValueError(
            f"remote variable %{variable.name}: got offset {offset}; expected a slot's number, at "
            "least 0."
        )
    variable._remote = RemotePlacement(buffer, offset, shard_over)
    if buffer.entries <= offset:
        buffer.entries = offset + 1


def remote_replica_sharded_variable(
    data: HostScalarTensor,
    remote_buffer: RemoteBuffer,
    offset: int = 0,
    dtype: dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """The same as `remote_variable`, but each group's value is split over its replicas: an equal
    cut of it fills a slot.

    Raises:
        ValueError: with fewer than two replicas, or a buffer whose meta_shape is set to something
            else.
    """
    if get_ir().replication_factor <= 1:
        raise ValueError(
            "remote_replica_sharded_variable: got 1 replica; expected at least 2. Use "
            "remote_variable."
        )
    grouping = replica_grouping or get_ir().replica_grouping()
    result = _make_variable(
        data, dtype, name, downcast, grouping, retrieval_mode, log2_scale, nan_on_overflow
    )
    meta_shape = remote_buffer.meta_shape
    if meta_shape not in ((), result.shape):
        raise ValueError(
            f"remote_replica_sharded_variable: got data of shape {list(result.shape)}; expected "
            f"the buffer's meta_shape {list(meta_shape)}."
        )
    remote_buffer.meta_shape = result.shape
    _place(result, remote_buffer, offset, _pieces(result, remote_buffer))
    return result


def _pieces(variable: Variable, buffer: RemoteBuffer) -> int:
    """Replicas that hold a piece each: those that the buffer was made for, else as many as fill its
    slots, else the whole group.
    """
    size, slot = (
        variable.replica_grouping.group_size,
        math.prod(buffer.tensor_shape),
    )
    made_for = [buffer._shard_over] if buffer._shard_over else range(size, 0, -1)
    fits = (n for n in made_for if size % n == 0 and -(-variable.nelms // n) == slot)
    return next(fits, size)


def replica_sharded_buffer(
    shape: tuple[int, ...],
    dtype: dtype,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
    entries: int = 1,
) -> RemoteBuffer:
    """A remote buffer of 1-D shards: ceil(elements / shard_over) per slot, ``meta_shape`` the
    unsharded shape.

    Args:
        shape: unsharded shape, with the number of groups in front when the grouping has several.
        shard_over: replicas that share one value; default: the whole group.
    Raises:
        ValueError: shard_over larger than the group or not dividing it.
    """
    grouping = replica_grouping or get_ir().replica_grouping()
    size = grouping.group_size
    shard_over = size if shard_over is None else shard_over
    if not 1 <= shard_over <= size or size % shard_over:
        raise ValueError(
            f"replica_sharded_buffer: got shard_over {shard_over}; expected a divisor of the "
            f"group size {size}."
        )
    sizes = check_sizes("replica_sharded_buffer: shape", shape)
    whole = sizes[1:] if grouping.num_groups > 1 else sizes
    nelms = math.prod(whole)
    buffer = RemoteBuffer((-(-nelms // shard_over),), dtype, entries)
    buffer.meta_shape, buffer._shard_over = whole, shard_over
    return buffer


def replica_sharded_variable(
    data: HostScalarTensor,
    dtype: dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: ReplicaGrouping | None = None,
    shard_over: int | None = None,
    retrieval_mode: RetrievalMode | None = "one_per_group",
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> tuple[Variable, Tensor]:
    """(variable for the host, this replica's 1-D shard of it on the device).

    The shard is filled from and flushed to the host value together with the other variables.
    """
    grouping = replica_grouping or get_ir().replica_grouping()
    whole = _make_variable(
        data, dtype, name, downcast, grouping, retrieval_mode, log2_scale, nan_on_overflow
    )
    size = grouping.group_size
    shard_over = size if shard_over is None else shard_over
    if not 1 <= shard_over <= size or size % shard_over:
        raise ValueError(
            f"replica_sharded_variable: got shard_over {shard_over}; expected a divisor of "
            f"the group size {size}."
        )
    spec = TensorSpec((-(-whole.nelms // shard_over),), whole.dtype, whole.shape)
    whole.shard = get_main_graph()._new_tensor(spec, f"{whole.name}_shard")
    whole.shard_over = shard_over
    set_sharing(whole.shard, Sharing(replica_grouping, shard_over))
    return whole, whole.shard


def _dtype_of(data: HostScalarTensor) -> dtype | None:
    """The type of data whose host array has another."""
    is_bfloat16 = str(getattr(data, "dtype", None)) == "torch.bfloat16"
    return dtypes.bfloat16 if is_bfloat16 else None


def constant(
    data: HostScalarTensor,
    dtype: dtype | None = None,
    name: str | None = None,
    downcast: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Constant:
    """A constant of the current graph; arguments as for `variable`. TypeError for float8 codes
    without dtype.
    """
    dtype = dtype or _dtype_of(data)
    what = f"constant '{name}'" if name else "constant"
    array = host_array(what, data, dtype, downcast, True, log2_scale, nan_on_overflow)
    if dtype is None and array.dtype.names:
        raise DTypeError(
            f"constant: got {array.dtype} data and no dtype; expected float8_143 or "
            "float8_152. Pass it."
        )
    return make_constant(array, dtype or dtypes.dtype.as_dtype(array.dtype), name)


def graph_input(
    shape: Iterable[int],
    dtype: dtype,
    name: str | None = None,
    by_ref: bool = False,
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """A new input of the current graph, after those it has. With ``by_ref`` writes inside reach the
    caller's tensor.

    The main graph takes inputs, too, but nothing gives them a value: its program can be built and
    read, not run.
    """
    return get_current_graph()._add_input(
        TensorSpec(shape, dtype, meta_shape or ()), name or "t", by_ref
    )


def graph_output(t: Tensor) -> None:
    """Mark a tensor of the current graph as its next output. ValueError if it is of another
    graph.
    """
    get_current_graph()._add_output(t)

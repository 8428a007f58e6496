"""Transfers between remote buffers and the device."""

from popxl import dtypes
from popxl.errors import DTypeError, GraphError, ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import refuse_to_execute
from popxl.remote_buffer import RemoteBuffer
from popxl.tensor import Tensor, TensorSpec

Offset = int | Tensor


def check_offset(name: str, remote_buffer: RemoteBuffer, offset: Offset) -> None:
    """Check a slot's number.

    Raises:
        TypeError: for something that is no remote buffer, or an offset that is neither an int nor a
            tensor; from sessions, for a tensor that is not int32 or uint32.
        ShapeError: for a tensor of more than one element.
        ValueError: for a negative int. (Buffers may still grow, so an int beyond the end is found
            when the program is prepared.)
    """
    if not isinstance(remote_buffer, RemoteBuffer):
        raise TypeError(
            f"{name}: got remote_buffer = {type(remote_buffer).__name__}; expected a "
            "RemoteBuffer. Make one with popxl.remote_buffer."
        )
    if isinstance(offset, Tensor):
        if offset.dtype not in (dtypes.int32, dtypes.uint32):
            error = (
                f"{name}: got offset {offset.spec}; expected an int, or an int32 or uint32 "
                "tensor. Cast it."
            )
            refuse_to_execute(DTypeError(error))
        if offset.nelms != 1:
            raise ShapeError(
                f"{name}: got offset {offset.spec}; expected one number. Load one slot per op."
            )
    elif isinstance(offset, bool) or not hasattr(offset, "__index__"):
        raise TypeError(
            f"{name}: got offset = {type(offset).__name__}; expected an int, or an int32 or "
            "uint32 tensor."
        )
    elif offset < 0:
        raise GraphError(f"{name}: got offset {offset}; expected at least 0.")


@op(
    effects=("remote",),
    differentiable=False,
    names=lambda remote_buffer, offset, name: [
        name or f"remote_buffer_{remote_buffer.remote_buffer_id}"
    ],
)
def remote_load(
    remote_buffer: RemoteBuffer, offset: int | Tensor, name: str | None = None
) -> TensorSpec:
    """A copy of one slot of a remote buffer: a later store to the slot does not change it.

    Shapes: offset [] or [1], int32 or uint32 -> the buffer's shape, dtype and meta_shape.
    Args:
        offset: the slot, an int or a tensor.
        name: of the result; default: from the buffer's number.
    Raises:
        TypeError: for another kind of offset.
        ShapeError: for an offset of several elements.
    """
    check_offset("remote_load", remote_buffer, offset)
    return TensorSpec(
        remote_buffer.tensor_shape, remote_buffer.tensor_dtype, remote_buffer.meta_shape
    )


@op(effects=("remote",), writes=("t",), differentiable=False)
def remote_load_(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> TensorSpec:
    """Load a slot into an existing tensor, and return it.

    Shapes: offset [] or [1], int32 or uint32; t: the buffer's shape and dtype -> t's spec.
    Raises:
        TypeError: for another kind of offset.
        ValueError: if t has another shape or dtype than the buffer, or for an offset of several
            elements.
    """
    check_offset("remote_load_", remote_buffer, offset)
    remote_buffer.validate_tensor_matches_buffer(t)
    return t.spec


@op(effects=("remote",), differentiable=False)
def remote_store(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> None:
    """Write a tensor to one slot of a remote buffer.

    Shapes: offset [] or [1], int32 or uint32; t: the buffer's shape and dtype.
    Raises:
        TypeError: for another kind of offset.
        ValueError: if t has another shape or dtype than the buffer, or for an offset of several
            elements.
    """
    check_offset("remote_store", remote_buffer, offset)
    remote_buffer.validate_tensor_matches_buffer(t)


@remote_load.cost
def remote_load_cost(
    y: Tensor, remote_buffer: RemoteBuffer, offset: Offset, name: str | None
) -> Cost:
    """Bytes that come from remote memory."""
    return Cost(bytes=y.spec.nbytes)


@remote_load_.cost
def remote_load_into_cost(
    y: Tensor, remote_buffer: RemoteBuffer, offset: Offset, t: Tensor
) -> Cost:
    """Bytes that come from remote memory."""
    return Cost(bytes=t.spec.nbytes)


@remote_store.cost
def remote_store_cost(y: object, remote_buffer: RemoteBuffer, offset: Offset, t: Tensor) -> Cost:
    """Bytes that go to remote memory."""
    return Cost(bytes=t.spec.nbytes)

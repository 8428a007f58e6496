"""Remote memory: arrays of equal slots beside the device, in host RAM or in files."""

from collections.abc import Iterable
from typing import Any

from popxl.dtypes import dtype
from popxl.spec import check_dtype, check_sizes
from popxl.tensor_methods import TensorMethods
from popxl.tracing import CONTEXT
from popxl.unpicklable import Unpicklable


class RemoteBuffer(Unpicklable):
    """Off-device array of ``entries`` slots of one tensor shape and dtype, with separate contents
    on every replica.

    ``entries`` may be raised until a Session is made; transforms do so. Slots that were never
    written are undefined.
    """

    def __init__(self, tensor_shape: tuple[int, ...], tensor_dtype: dtype, entries: int) -> None:
        self._ir = CONTEXT.ir
        self._meta_shape: tuple[int, ...] = ()
        self.set_remote_buffer_info(tensor_dtype, tensor_shape, entries)
        self._id = self._ir._register_buffer(self)

    def set_remote_buffer_info(
        self, tensor_dtype: dtype, tensor_shape: tuple[int, ...], entries: int
    ) -> None:
        """Redefine dtype, shape of a slot, and number of slots. ValueError when entries < 1."""
        self._dtype = check_dtype("RemoteBuffer: tensor_dtype", tensor_dtype)
        self._shape = check_sizes("RemoteBuffer: tensor_shape", tensor_shape)
        self._shard_over: int | None = None
        """Replicas that share one value, where the maker of a sharded buffer has said so."""
        self.entries = entries

    @property
    def remote_buffer_id(self) -> int:
        """Unique number within the Ir, from 1."""
        return self._id

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one slot (of the shard, when sharded)."""
        return self._shape

    @property
    def tensor_dtype(self) -> dtype:
        """Element type."""
        return self._dtype

    @property
    def entries(self) -> int:
        """Number of slots."""
        return self._entries

    @entries.setter
    def entries(self, value: int) -> None:
        (entries,) = check_sizes("RemoteBuffer.entries", (value,), least=1)
        self._ir._check_open("RemoteBuffer.entries")
        self._entries = entries

    @property
    def meta_shape(self) -> tuple[int, ...]:
        """Unsharded shape for a sharded buffer, () otherwise."""
        return self._meta_shape

    @meta_shape.setter
    def meta_shape(self, value: Iterable[int]) -> None:
        self._meta_shape = check_sizes("RemoteBuffer.meta_shape", value)

    def validate_tensor_matches_buffer(self, t: TensorMethods[Any], num_shards: int = 1) -> None:
        """ValueError unless the tensor's shape and dtype match a slot's; when num_shards is not 1,
        unless the tensor, a shard or the whole value, has the buffer's unsharded shape.
        """
        if num_shards == 1:
            fits, expected = t.shape == self._shape, list(self._shape)
        else:
            whole = self._meta_shape or self._shape
            fits, expected = whole in (t.shape, t.meta_shape), list(whole)
        if not fits or t.dtype is not self._dtype:
            what = "" if num_shards == 1 else ", or a shard of it"
            raise ValueError(
                f"remote buffer {self._id}: got %{t.name}: {t.spec}; expected "
                f"{self._dtype.name}{expected}{what}. Make the buffer with the tensor's shape and "
                "dtype, or cast the tensor."
            )

    def __repr__(self) -> str:
        return f"RemoteBuffer({self._id}: {self._entries} x {self._dtype.name}{list(self._shape)})"


def remote_buffer(
    tensor_shape: tuple[int, ...], tensor_dtype: dtype, entries: int = 1
) -> RemoteBuffer:
    """A new `RemoteBuffer` of the current Ir."""
    return RemoteBuffer(tensor_shape, tensor_dtype, entries)

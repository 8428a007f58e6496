"""Streams between host and device: one array slot for each transfer of each replica."""

from collections.abc import Iterable
from typing import Any

from popxl.dtypes import dtype
from popxl.spec import TensorSpec, check_dtype, check_sizes
from popxl.tensor_methods import TensorMethods
from popxl.tracing import CONTEXT
from popxl.unpicklable import Unpicklable


class Stream(Unpicklable):
    """Base of the two kinds of stream. NotImplementedError on construction."""

    _tensor: TensorMethods[Any]

    def __init__(self) -> None:
        raise NotImplementedError(
            "Stream: got a constructor call; expected popxl.h2d_stream(...) or "
            "popxl.d2h_stream(...)."
        )

    @classmethod
    def _make(cls, shape: Iterable[int], dtype: dtype, name: str) -> Any:
        self = cls.__new__(cls)
        spec = TensorSpec(
            check_sizes(f"{cls.__name__}: shape", shape),
            check_dtype(f"{cls.__name__}: dtype", dtype),
        )
        self._tensor = CONTEXT.main_graph._new_tensor(spec, name, scoped=False)
        return self

    @property
    def dtype(self) -> dtype:
        """Element type of one transfer."""
        return self._tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one transfer on one replica."""
        return self._tensor.shape

    @property
    def spec(self) -> TensorSpec:
        """Spec of one transfer."""
        return self._tensor.spec

    @property
    def tensor_id(self) -> str:
        """Unique id, derived from the name."""
        return self._tensor.id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tensor_id}: {self.spec})"


class HostToDeviceStream(Stream):
    """Input stream."""


class DeviceToHostStream(Stream):
    """Output stream."""


def h2d_stream(shape: Iterable[int], dtype: dtype, name: str | None = None) -> HostToDeviceStream:
    """A new input stream of the current Ir; its name is made unique."""
    stream: HostToDeviceStream = HostToDeviceStream._make(shape, dtype, name or "h2d_stream")
    return stream


def d2h_stream(shape: Iterable[int], dtype: dtype, name: str | None = None) -> DeviceToHostStream:
    """A new output stream of the current Ir; its name is made unique."""
    stream: DeviceToHostStream = DeviceToHostStream._make(shape, dtype, name or "d2h_stream")
    return stream

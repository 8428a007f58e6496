"""A stream and its transfer in one step."""

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream, Tensor, ops
from popxl.tensor import HostTensor
from popxl.utils import host_array


def host_load(
    t: HostTensor, dtype: popxl.dtype, name: str
) -> tuple[HostTensor, HostToDeviceStream, Tensor]:
    """Values from sample data of one replica: (the data as ``dtype``, a new stream of its shape,
    the loaded tensor).

    The tensor has the name; the stream, which is of the main graph, too, is ``<name>_stream``.
    """
    data = host_array(f"host_load '{name}'", t, dtype)
    stream = popxl.h2d_stream(data.shape, dtype, f"{name}_stream")
    return data, stream, ops.host_load(stream, name)


def host_store(t: Tensor) -> DeviceToHostStream:
    """Store ``t`` to a new stream ``<t>_stream``; returns the stream."""
    stream = popxl.d2h_stream(t.shape, t.dtype, f"{t.name}_stream")
    ops.host_store(stream, t)
    return stream

"""Transfers between host and device, over streams, and what the host learns beside them."""

from popxl.errors import ShapeError
from popxl.opdef import Cost, op
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from popxl.tensor import Tensor, TensorSpec


@op(
    effects=("host",),
    differentiable=False,
    names=lambda h2d_stream, name: [name or f"{h2d_stream.tensor_id}_host_load"],
)
def host_load(h2d_stream: HostToDeviceStream, name: str | None = None) -> TensorSpec:
    """The next element of an input stream: each execution takes this replica's next one.

    Shapes: -> the stream's shape and dtype.
    Args:
        name: of the result; default: the stream's name followed by "_host_load".
    Raises:
        TypeError: if h2d_stream is no input stream.
    """
    if not isinstance(h2d_stream, HostToDeviceStream):
        raise TypeError(
            f"host_load: got {type(h2d_stream).__name__}; expected a HostToDeviceStream. Make one "
            "with popxl.h2d_stream."
        )
    return h2d_stream.spec


@op(effects=("host",), differentiable=False)
def host_store(d2h_stream: DeviceToHostStream, t: Tensor) -> None:
    """Write a tensor to the next element of an output stream.

    Shapes: t of the stream's shape and dtype -> nothing.
    Raises:
        TypeError: if d2h_stream is no output stream.
        ValueError: if t has another shape or dtype than the stream.
    """
    if not isinstance(d2h_stream, DeviceToHostStream):
        raise TypeError(
            f"host_store: got {type(d2h_stream).__name__}; expected a DeviceToHostStream. Make "
            "one with popxl.d2h_stream."
        )
    if t.shape != d2h_stream.shape or t.dtype is not d2h_stream.dtype:
        raise ShapeError(
            f"host_store: got t {t.spec} for stream {d2h_stream.tensor_id}: {d2h_stream.spec}; "
            "expected the stream's shape and dtype. Reshape or cast t, or make the stream of t's "
            "spec."
        )


@host_load.cost
def host_load_cost(y: Tensor, h2d_stream: HostToDeviceStream, name: str | None) -> Cost:
    """Bytes that come from the host."""
    return Cost(bytes=y.spec.nbytes)


@host_store.cost
def host_store_cost(y: object, d2h_stream: DeviceToHostStream, t: Tensor) -> Cost:
    """Bytes that go to the host."""
    return Cost(bytes=t.spec.nbytes)


@op(effects=("clock",), differentiable=False)
def begin_lap(label: str) -> None:
    """Count the time of a run to a label, from here on until another lap begins.

    Each replica has its own laps. `popxl.extensions.run_times` tells of them after a run. Programs
    call it by `popxl.extensions`.
    """


@begin_lap.cost
def begin_lap_cost(y: object, label: str) -> Cost:
    """Nothing."""
    return Cost()

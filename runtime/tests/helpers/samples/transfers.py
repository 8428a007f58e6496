"""Samples of host streams and remote memory. Slot i of a sample's input stream holds i + 1
everywhere.
"""

import numpy as np
import popxl
from popxl import extensions, ops
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample


def load_twice(shape, dtype):
    stream = popxl.h2d_stream(shape, dtype, "numbers")
    return ops.host_load(stream), ops.host_load(stream, "second")


def load_from(stream):
    return ops.host_load(stream())


def store(t):
    ops.host_store(popxl.d2h_stream(t.shape, t.dtype, "results"), t)


def store_in(t, shape, dtype):
    ops.host_store(popxl.d2h_stream(shape, dtype), t)


def in_laps(t):
    extensions.begin_lap("double")
    doubled = t * 2
    extensions.begin_lap("rest")
    return doubled


def through_buffer(t, offset, entries=3):
    """Store and load again, with a second store after the load: the loaded value must not
    change.
    """
    buffer = popxl.remote_buffer(t.shape, t.dtype, entries)
    ops.remote_store(buffer, offset, t)
    loaded = ops.remote_load(buffer, offset, "loaded")
    ops.remote_store(buffer, offset, ops.init(t.shape, t.dtype))
    return loaded


def into_tensor(t, values):
    buffer = popxl.remote_buffer(t.shape, t.dtype)
    ops.remote_store(buffer, 0, values)
    return ops.remote_load_(buffer, 0, t)


def slot(t, offset):
    buffer = popxl.remote_buffer((2,), popxl.float32)
    ops.remote_store(buffer, offset, t)


def load_into(t, shape=(2,), offset=0):
    return ops.remote_load_(popxl.remote_buffer(shape, popxl.float32), offset, t)


def ones_and_twos(shape, dtype):
    return np.full(shape, 1), np.full(shape, 2)


SAMPLES = [
    Sample("host_load", attrs={"shape": (2, 3), "dtype": popxl.float32}, build=load_twice, oracle=ones_and_twos,
           in_16_bits=False),  # its dtype is the stream's
    Sample("host_load", attrs={"shape": (), "dtype": popxl.int32}, build=load_twice, oracle=ones_and_twos,
           dtype=popxl.int32),
    Sample("host_store", operands=((2, 3),), build=store, oracle=lambda t: t),
    Sample("host_store", operands=(Operand((2, 3), layout="transposed"),), build=store, oracle=lambda t: t),
    Sample("begin_lap", operands=((2, 3),), build=in_laps, oracle=lambda t: 2 * t),
    Sample("remote_load", operands=((2, 3),), attrs={"offset": 2}, build=through_buffer, oracle=lambda t, offset: t,
           grads=None),
    Sample("remote_load", operands=((5,), np.array(1, np.uint32)), build=through_buffer, oracle=lambda t, offset: t,
           grads=None),
    Sample("remote_load_", operands={"t": (4,), "values": (4,)}, build=into_tensor, oracle=lambda t, values: values),
    Sample("remote_store", operands=((2, 3), np.array([2], np.int32)), build=through_buffer, oracle=lambda t,
           offset: t, grads=None),
]  # fmt: skip

REFUSALS = [
    Refusal("host_load", attrs={"stream": lambda: popxl.d2h_stream((2,), popxl.float32)}, build=load_from,
            error=TypeError,
            says="expected a HostToDeviceStream"),
    Refusal("host_store", attrs={"shape": (3,), "dtype": popxl.float32}, operands=((2,),), build=store_in,
            error=ValueError,
            says="the stream's shape and dtype"),
    Refusal("host_store", attrs={"shape": (2,), "dtype": popxl.int32}, operands=((2,),), build=store_in,
            error=ValueError,
            says="the stream's shape and dtype"),
    Refusal("host_store", attrs={"d2h_stream": 3}, operands={"t": (2,)}, error=TypeError,
            says="expected a DeviceToHostStream"),
    Refusal("remote_load", attrs={"remote_buffer": 3, "offset": 0}, error=TypeError, says="expected a RemoteBuffer"),
    Refusal("remote_store", operands=((2,), Operand((), popxl.float32)), build=slot, error=DTypeError,
            says="int32 or uint32"),
    Refusal("remote_store", operands=((2,), Operand((2,), popxl.int32)), build=slot, error=ShapeError,
            says="expected one number"),
    Refusal("remote_store", operands=((2,),), attrs={"offset": -1}, build=slot, error=ValueError, says="at least 0"),
    Refusal("remote_store", operands=((2,),), attrs={"offset": 0.5}, build=slot, error=TypeError,
            says="got offset = float"),
    Refusal("remote_store", operands=((3,),), attrs={"offset": 0}, build=slot, error=ValueError,
            says=r"expected float32\[2\]"),
    Refusal("remote_load_", operands=((3,),), build=load_into, error=ValueError, says=r"expected float32\[2\]"),
]  # fmt: skip

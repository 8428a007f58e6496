"""Samples of tensors from nothing, copies between places, and printing."""

import numpy as np
import popxl
from popxl import ops

from .sample import Refusal, Sample


def build_ipu_copy(t, destination, source):
    return ops.ipu_copy(t, destination, source)


def build_print(t, **attrs):
    return ops.print_tensor(t, **attrs)


SAMPLES = [
    Sample("init", attrs={"shape": (2, 3), "dtype": popxl.float32, "name": "new"},
           # its dtype is an attribute
           oracle=lambda shape, dtype, name: np.zeros(shape), in_16_bits=False),
    Sample("init", attrs={"shape": (4,), "dtype": popxl.uint32}, oracle=lambda shape, dtype: np.zeros(shape),
           dtype=popxl.uint32),
    Sample("init", attrs={"shape": (6,), "dtype": popxl.float16, "meta_shape": (2, 3)},
           oracle=lambda shape, dtype, meta_shape: np.zeros(shape), dtype=popxl.float16),
    Sample("io_tile_copy", operands=((2, 3),), oracle=lambda t: t),
    Sample("ipu_copy", operands=((2, 3),), attrs={"destination": 1, "source": 0}, build=build_ipu_copy,
           oracle=lambda t, destination, source: t),
    Sample("print_tensor", operands=((2, 3),), attrs={"title": "values", "print_self": False}, build=build_print,
           oracle=lambda t, title, print_self: t),
]  # fmt: skip

REFUSALS = [
    Refusal("init", attrs={"shape": (2,), "dtype": popxl.float32, "init_type": "ones"}, error=ValueError,
            says="'zero' or 'undef'"),
    Refusal("ipu_copy", operands=((2, 3),), attrs={"destination": 1}, error=ValueError, says="Pass source="),
    Refusal("print_tensor", operands=((2,),), attrs={"separator": ", "}, error=ValueError,
            says="separator ', '; expected one character"),
    Refusal("print_tensor", operands=((2,),), attrs={"open_bracket": ""}, error=ValueError,
            says="open_bracket ''; expected one character"),
    Refusal("print_tensor", operands=((2,),), attrs={"float_format": "hex"}, error=ValueError,
            says="got float_format 'hex'"),
]  # fmt: skip

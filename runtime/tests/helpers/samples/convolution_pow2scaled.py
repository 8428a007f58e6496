"""Samples of convolutions of float8 tensors."""

import numpy as np
import popxl
from popxl.errors import DTypeError, ShapeError

from .convolution import SAME, torch_conv, torch_conv_transpose
from .sample import Operand, Refusal, Sample

FLOAT8 = (popxl.float8_143, popxl.float8_152)
HINTS = {"available_memory_proportions": [0.4], "enable_conv_dithering": [1]}


def without_hints(attrs):
    return {name: value for name, value in attrs.items() if name not in HINTS}


def forward(t, weight, log2_scale, types=(FLOAT8[0], FLOAT8[0]), **attrs):
    def oracle(t, weight, log2_scale, **attrs):
        return torch_conv(t, weight, **without_hints(attrs)) * 2.0**log2_scale

    return sample("conv_pow2scaled", oracle, t, weight, log2_scale, types, attrs)


def backward(t, weight, log2_scale, types=(FLOAT8[0], FLOAT8[0]), **attrs):
    def oracle(t, weight, log2_scale, **attrs):
        return torch_conv_transpose(t, weight, **without_hints(attrs)) * 2.0**log2_scale

    return sample("conv_transpose_pow2scaled", oracle, t, weight, log2_scale, types, attrs)


def sample(op, oracle, t, weight, log2_scale, types, attrs):
    operands = (Operand(t, types[0]), Operand(weight, types[1]), np.array(log2_scale, np.int32))
    # Operands and result have types of their own. Sums differ from exact ones where torch convolves
    # by a transform, and the result then by a unit in float16's last place.
    return Sample(
        op, operands=operands, attrs=attrs, oracle=oracle, in_16_bits=False, rtol=1e-3, atol=1e-5
    )


SAMPLES = [
    forward((2, 3, 5, 4), (4, 3, 3, 2), 0),
    *(
        forward((1, 2, 4, 4), (2, 2, 2, 2), by, (t, w))
        for t in FLOAT8
        for w in FLOAT8
        for by in (-7, 4)
    ),
    forward((1, 2, 5, 6), (2, 2, 2, 2), 1, stride=(2, 1), padding=(1, 0, 2, 1), dilation=(1, 2)),
    forward((2, 4, 4, 3), (6, 2, 2, 2), -3, groups=2, **HINTS),
    *(forward((1, 2, 5, 4), (2, 2, 2, 3), 2, stride=(2, 3), pad_type=p) for p in (*SAME, "valid")),
    forward((2, 3, 7), (2, 3, 3), 0, stride=(2,), padding=(1, 2), dilation=(2,)),
    backward((2, 3, 3, 4), (3, 2, 3, 2), 0),
    *(
        backward((1, 2, 3, 3), (2, 2, 2, 2), by, (t, w))
        for t in FLOAT8
        for w in FLOAT8
        for by in (-7, 4)
    ),
    backward(
        (1, 2, 3, 2), (2, 2, 3, 3), 1, stride=(2, 2), padding=(1, 1, 1, 1), output_padding=(1, 0)
    ),
    backward((2, 4, 2, 3), (4, 3, 2, 2), -3, stride=(2, 1), groups=2, **HINTS),
    *(backward((1, 2, 3, 2), (2, 1, 4, 3), 2, stride=(2, 1), pad_type=p) for p in (*SAME, "valid")),
    backward((1, 1, 3, 3), (1, 1, 3, 3), 0, stride=(2, 2), output_shape=(1, 1, 6, 9)),
]

REFUSALS = [
    Refusal(op, operands=(t, weight, by), error=error, says=says)
    for op in ("conv_pow2scaled", "conv_transpose_pow2scaled")
    for t, weight, by, error, says in (
        (
            Operand((1, 2, 3, 3)),
            Operand((2, 2, 2, 2), FLOAT8[0]),
            np.array(0, np.int32),
            DTypeError,
            "got t float32",
        ),
        (
            Operand((1, 2, 3, 3), FLOAT8[0]),
            Operand((2, 2, 2, 2)),
            np.array(0, np.int32),
            DTypeError,
            "got weight float32.*expected float8_143 or float8_152",
        ),
        (
            Operand((1, 2, 3, 3), FLOAT8[0]),
            Operand((2, 2, 2, 2), FLOAT8[1]),
            (),
            DTypeError,
            "expected int32",
        ),
        (
            Operand((1, 2, 3, 3), FLOAT8[0]),
            Operand((2, 2, 2, 2), FLOAT8[1]),
            np.array([0], np.int32),
            ShapeError,
            "expected a scalar",
        ),
        (
            Operand((1, 2, 3, 3), FLOAT8[0]),
            Operand((3, 3, 2, 2), FLOAT8[1]),
            np.array(0, np.int32),
            ShapeError,
            r"_pow2scaled: got weight .* expected weight \[",
        ),
    )
]

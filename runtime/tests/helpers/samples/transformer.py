"""Samples of what transformer layers compute beside attention."""

import math

import numpy as np
import popxl
import torch
from popxl.errors import DTypeError, ShapeError

from .sample import Operand, Refusal, Sample


def swiglu(t):
    gate, values = t[:, : t.shape[1] // 2], t[:, t.shape[1] // 2 :]
    return gate / (1 + torch.exp(-gate)) * values


def geglu(t):
    gate, values = t[:, : t.shape[1] // 2], t[:, t.shape[1] // 2 :]
    return gate * torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)) * values


def gradient_of(function):
    def gradient(dy, t):
        leaf = torch.from_numpy(t).requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, torch.from_numpy(dy))

    return gradient


def rotary(t, sin, cos, inverse=False, size=None):
    """Pairs as complex numbers, head by head and row by row."""
    (positions, pairs), rows = sin.shape, []
    for r, row in enumerate(t):
        turn = torch.complex(
            cos[r % positions], -sin[r % positions] if inverse else sin[r % positions]
        )
        heads = []
        for head in row.reshape(-1, size or 2 * pairs):
            turned = torch.complex(head[:pairs], head[pairs : 2 * pairs]) * turn
            heads += [turned.real, turned.imag, head[2 * pairs :]]
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def softcap(t, cap):
    e = torch.exp(2 * t / cap)
    return cap * (e - 1) / (e + 1)


def short_convolution(t, weight, positions, transposed=False):
    """Row by row; transposed by autograd."""
    if transposed:
        return torch.autograd.functional.vjp(
            lambda x: short_convolution(x, weight, positions), torch.zeros_like(t), t, True
        )[1]
    rows = []
    for r, row in enumerate(t):
        before = range(1, min(len(weight), int(positions[r]), r) + 1)
        rows.append(row + sum(weight[i - 1] * t[r - i] for i in before))
    return torch.stack(rows)


def short_convolution_weight_grad(dy, t, positions, size):
    leaf = torch.zeros(size, t.shape[1], dtype=torch.float64, requires_grad=True)
    y = short_convolution(torch.from_numpy(t), leaf, positions)
    return torch.autograd.grad(y, leaf, torch.from_numpy(dy))


POSITIONS = np.array([0, 1, 2, 3, 4, 0, 1, 0, 9], np.int32)
TABLES = {"sin": (3, 2), "cos": (3, 2)}
SAMPLES = [
    *(
        sample
        for name, function in (("swiglu", swiglu), ("geglu", geglu))
        for sample in (
            Sample(name, operands=((3, 8),), autograd=function),
            Sample(name, operands=(Operand((4, 6), layout="transposed"),), autograd=function),
            Sample(f"{name}_grad", operands=((3, 4), (3, 8)), oracle=gradient_of(function)),
        )
    ),
    Sample("softcap", operands=((3, 4),), attrs={"cap": 0.75}, autograd=softcap),
    Sample(
        "softcap",
        operands=(Operand((4, 3), layout="transposed", low=-9.0, high=9.0),),
        attrs={"cap": 4.0},
        autograd=softcap,
    ),
    Sample(
        "softcap_grad",
        operands=((3, 4), (3, 4)),
        attrs={"cap": 2.0},
        oracle=lambda dy, y, cap: dy * (1 - (y / cap) ** 2),
    ),
    Sample("rotary", operands={"t": (3, 4), **TABLES}, autograd=rotary),
    *(
        Sample(
            "short_convolution",
            operands={
                "t": Operand((9, 5), layout=layout),
                "weight": (size, 5),
                "positions": POSITIONS,
            },
            attrs={"transposed": transposed},
            autograd=short_convolution,
        )
        for size, transposed, layout in (
            (3, False, "contiguous"),
            (3, True, "strided"),
            (12, False, "transposed"),
        )
    ),
    *(
        Sample(
            "short_convolution_weight_grad",
            operands=((9, 5), (9, 5), POSITIONS),
            attrs={"size": size},
            oracle=short_convolution_weight_grad,
        )
        for size in (2, 12)
    ),
    Sample(
        "rotary",
        operands={"t": Operand((6, 12), layout="strided"), **TABLES},
        attrs={"inverse": True},
        autograd=rotary,
    ),
    *(
        Sample(
            "rotary",
            operands={"t": Operand((6, 14), layout=layout), **TABLES},
            attrs={"inverse": inverse, "size": 7},
            autograd=rotary,
        )
        for inverse, layout in ((False, "contiguous"), (True, "transposed"))
    ),
]
REFUSALS = [
    *(
        Refusal("short_convolution", operands=operands, error=ShapeError, says="[n, c], [k, c]")
        for operands in (
            ((4, 3), (2, 2), Operand((4,), dtype=popxl.int32)),
            ((4, 3), (2, 3), Operand((3,), dtype=popxl.int32)),
            ((4, 3), (3,), Operand((4,), dtype=popxl.int32)),
        )
    ),
    Refusal(
        "short_convolution",
        operands=((4, 3), (2, 3), Operand((4,), dtype=popxl.uint32)),
        error=DTypeError,
        says="expected int32",
    ),
    Refusal("softcap", operands=((3,),), attrs={"cap": 0.0}, error=ValueError, says="above 0"),
    Refusal("swiglu", operands=((3, 5),), error=ShapeError, says="a gate and as many values"),
    Refusal("swiglu", operands=((2, 3, 4),), error=ShapeError, says="a gate and as many values"),
    Refusal(
        "swiglu",
        operands=(Operand((3, 4), dtype=popxl.int32),),
        error=DTypeError,
        says="expected floating point",
    ),
    *(
        Refusal("rotary", operands=operands, error=ShapeError, says="where s divides n")
        for operands in (
            {"t": (4, 4), **TABLES},
            {"t": (3, 6), **TABLES},
            {"t": (3, 4), "sin": (3, 2), "cos": (3, 1)},
        )
    ),
    Refusal(
        "rotary",
        operands={"t": (3, 6), **TABLES},
        attrs={"size": 3},
        error=ShapeError,
        says=r"got size 3 and sin .*; expected 2 \* 2 features",
    ),
]

"""Samples of elementwise functions and activations."""

import popxl
import torch
from popxl.errors import DTypeError

from .sample import Operand, Refusal, Sample

PLAIN = {"low": -2.0, "high": 2.0}
POSITIVE = {"low": 0.2, "high": 4.0}
NO_ZERO = {"away_from": (0.0,)}
NO_INTEGERS = {"away_from": (-2.0, -1.0, 0.0, 1.0, 2.0), "low": -1.8, "high": 1.8}

FUNCTIONS = {
    "exp": (torch.exp, PLAIN),
    "log": (torch.log, POSITIVE),
    "log2": (torch.log2, POSITIVE),
    "sqrt": (torch.sqrt, POSITIVE),
    "sin": (torch.sin, PLAIN),
    "cos": (torch.cos, PLAIN),
    "tanh": (torch.tanh, PLAIN),
    "ceil": (torch.ceil, NO_INTEGERS),
    "floor": (torch.floor, NO_INTEGERS),
    "relu": (torch.relu, NO_ZERO),
    "relu2": (lambda t: torch.where(t > 0, t * t, 0), NO_ZERO),
    # The textbook formulas, not torch's fused functions.
    "gelu": (
        lambda t: 0.5 * t * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))),
        PLAIN,
    ),
    "geluerf": (lambda t: 0.5 * t * (1 + torch.erf(t / 2**0.5)), PLAIN),
    "swish": (lambda t: t * torch.sigmoid(t), PLAIN),
}
IN_PLACE = ("exp", "relu", "gelu", "geluerf", "swish")


def derivative(fn):
    """The gradient by torch through the textbook formula; ``at`` is the operand."""

    def oracle(dy, at):
        at = at.detach().requires_grad_()
        return torch.autograd.grad(fn(at), at, dy)[0]

    return oracle


def samples_of(name, fn, values):
    shapes = [Operand((3, 4), **values)]
    shapes += [
        Operand((3, 4), layout=layout, **values) for layout in ("transposed", "strided", "expanded")
    ]
    shapes += [Operand((), **values), Operand((0, 2), **values)]
    found = [Sample(name, operands=(shape,), autograd=fn) for shape in shapes]
    return [
        *found,
        Sample(name, operands=(Operand((2, 70), **values),), autograd=fn, dtype=popxl.float64),
    ]


SAMPLES = [
    *(
        sample
        for name, (fn, values) in FUNCTIONS.items()
        for sample in samples_of(name, fn, values)
    ),
    *(
        Sample(
            f"{name}_",
            operands=(Operand((3, 4), layout=layout),),
            oracle=lambda t, fn=FUNCTIONS[name][0]: fn(torch.from_numpy(t)),
        )
        for name in IN_PLACE
        for layout in ("contiguous", "transposed", "strided")
    ),
    # Large operands, where a formula with exponentials might overflow.
    *(
        Sample(name, operands=(Operand((9,), low=-60.0, high=60.0),), autograd=FUNCTIONS[name][0])
        for name in ("tanh", "gelu", "geluerf", "swish")
    ),
    *(
        Sample(
            f"{name}_grad",
            operands=((3, 4), (3, 4)),
            oracle=lambda dy, at, fn=derivative(FUNCTIONS[name][0]): fn(
                torch.from_numpy(dy), torch.from_numpy(at)
            ),
        )
        for name in ("gelu", "geluerf", "swish")
    ),
    Sample("relu_grad", operands=((3, 4), (3, 4)), oracle=lambda dy, at: dy * (at > 0)),
    Sample("relu2_grad", operands=((3, 4), (3, 4)), oracle=lambda dy, at: 2 * dy * at * (at > 0)),
    Sample(
        "tanh_grad",
        operands=((3, 4), Operand((3, 4), low=-1.0, high=1.0)),
        oracle=lambda dy, at: dy * (1 - at**2),
    ),
]

REFUSALS = [
    Refusal(
        name,
        operands=(Operand((3,), dtype=popxl.int32),),
        error=DTypeError,
        says="expected floating point",
    )
    for name in (*FUNCTIONS, *(f"{name}_" for name in IN_PLACE))
]

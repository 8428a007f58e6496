"""Samples of broadcasting and its inverse."""

import numpy as np
from popxl.errors import ShapeError

from .sample import Operand, Refusal, Sample

SAMPLES = [
    Sample(
        "broadcast_to",
        operands=((4,),),
        attrs={"shape": (3, 4)},
        autograd=lambda t, shape: t.expand(shape),
    ),
    Sample(
        "broadcast_to",
        operands=((3, 1),),
        attrs={"shape": (2, 3, 4)},
        autograd=lambda t, shape: t.expand(shape),
    ),
    Sample(
        "broadcast_to",
        operands=((3,),),
        attrs={"shape": (3, 4, 2), "new_axes": (1, 2)},
        autograd=lambda t, shape, new_axes: t[:, None, None].expand(shape),
    ),
    Sample(
        "broadcast_to",
        operands=((),),
        attrs={"shape": (3, 2)},
        autograd=lambda t, shape: t.expand(shape),
    ),
    Sample(
        "broadcast_to", operands=((2, 3),), attrs={"shape": (2, 3)}, autograd=lambda t, shape: t
    ),
    Sample(
        "broadcast_to",
        operands=(Operand((3, 2), layout="transposed"),),
        attrs={"shape": (4, 3, 2)},
        autograd=lambda t, shape: t.expand(shape),
    ),
    Sample(
        "broadcast_to",
        operands=(np.array([[1], [2]], np.uint32),),
        attrs={"shape": (2, 3)},
        oracle=np.broadcast_to,
    ),
    Sample("sum_to", operands=((3, 4),), attrs={"shape": (4,)}, autograd=lambda t, shape: t.sum(0)),
    Sample(
        "sum_to",
        operands=((2, 3, 4),),
        attrs={"shape": (3, 1)},
        autograd=lambda t, shape: t.sum((0, 2))[:, None],
    ),
    Sample("sum_to", operands=((3, 4),), attrs={"shape": ()}, autograd=lambda t, shape: t.sum()),
    Sample(
        "sum_to",
        operands=((4, 4),),
        attrs={"shape": (4,), "dropped": (1,)},
        autograd=lambda t, shape, dropped: t.sum(1),
    ),
    Sample(
        "sum_to",
        operands=(Operand((3, 4, 2), layout="transposed"),),
        attrs={"shape": (3,), "dropped": (1, 2)},
        autograd=lambda t, shape, dropped: t.sum((1, 2)),
    ),
    Sample(
        "sum_to",
        operands=(np.array([[1, 2], [3, 4]], np.uint32),),
        attrs={"shape": (1, 2)},
        oracle=lambda t, shape: np.array([[4, 6]], np.uint32),
    ),
    # 4096 terms of about one: a sum that is kept in 16 bits would stop growing at 256 or 2048.
    Sample(
        "sum_to",
        operands=(Operand((4096,), low=0.5, high=1.5),),
        attrs={"shape": ()},
        oracle=lambda t, shape: t.sum(),
        grads=None,
    ),
]

REFUSALS = [
    Refusal(
        "broadcast_to",
        operands=((3,),),
        attrs={"shape": (3, 4)},
        error=ShapeError,
        says="expected t to broadcast to that shape",
    ),
    Refusal(
        "broadcast_to",
        operands=((3, 4),),
        attrs={"shape": (4,)},
        error=ShapeError,
        says="expected t to broadcast to that shape",
    ),
]

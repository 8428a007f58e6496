"""How the sample tables describe uses of ops. `test_ops.py` checks every op in `popxl.opdef.OPS`
against its samples.

A family file ``samples/<family>.py`` holds two lists, ``SAMPLES`` and ``REFUSALS``, and is found by
its name alone.

    # random operands, numpy oracle
    Sample("matmul", operands=((3, 4), (4, 5)), oracle=np.matmul)
    # torch: values and gradients
    Sample("sum", operands=((3, 4),), attrs={"axis": 1}, autograd=torch.sum)
    Sample("gather", operands=((5, 3), np.array([0, 4, 4])), oracle=np.take, attrs={"axis": 0})
    Sample("concat", operands=([(2, 3), (4, 3)],), oracle=lambda ts, axis=0: np.concatenate(ts, axis))
    # the same tensor twice
    Sample("add", operands=((3,), Same(0)), oracle=np.add)
    Sample("mul", operands=(Operand((3, 4), layout="transposed"), (4,)), oracle=np.multiply)
    Sample("scaled_add_", operands={"X": (3,), "Y": (3,)}, attrs={"a": 0.5},
           oracle=lambda X, Y, a: a * X + Y)
    Refusal("matmul", operands=((3, 4), (3, 4)), error=ShapeError, says="second-to-last")
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import popxl


@dataclass(frozen=True)
class Operand:
    """A random tensor operand. A plain tuple of ints as operand means ``Operand(shape)``.

    Floating point: uniform in [low, high). Integers: uniform in [int(low), int(high)). bool: fair
    coins.
    """

    shape: tuple[int, ...]
    dtype: popxl.dtype | None = None
    """None: the sample's dtype (and float64 in gradient checks)."""
    low: float = -2.0
    high: float = 2.0
    distinct: bool = False
    """Values at least 0.05 apart, for maxima, medians and sorting, whose gradients jump where two
    values meet.
    """
    away_from: tuple[float, ...] = ()
    """Points (kinks of the op) from which values keep a distance of 0.05."""
    layout: Literal["contiguous", "transposed", "strided", "expanded"] = "contiguous"
    """Memory layout given to the kernel: axes reversed in memory, every second element, or first
    axis of stride 0.
    """


@dataclass(frozen=True)
class Same:
    """The very tensor of another operand: its index in flat order, counting the members of list
    operands.
    """

    index: int


Operands = Sequence[Any] | Mapping[str, Any]
"""Tensor arguments, in order or by parameter name. Each is a shape, an `Operand`, a `Same`, a numpy
array (explicit values; the array's dtype unless it is floating point: then the sample's), or a list
of these for a list parameter."""


@dataclass(frozen=True)
class Sample:
    """One use of an op, and what must come out.

    The oracle is called as ``oracle(*operands, **attrs)`` (or with operands by name if they are
    given so) with the operands as the kernel sees them: floating point as float64. It
    returns one array, or a list or tuple of them, one for each output.
    """

    op: str
    operands: Operands = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments by name. A `Built` value is made where the op is added, e.g. a remote
    buffer or a replica grouping."""
    oracle: Callable[..., Any] | None = None
    """The oracle on numpy arrays."""
    autograd: Callable[..., Any] | None = None
    """The oracle on torch tensors: of values, and by torch's autograd of gradients."""
    check: Callable[..., None] | None = None
    """``check(results, *operands, **attrs)`` on numpy arrays: asserts a property, where there is no
    oracle (random ops)."""
    dtype: popxl.dtype = popxl.float32
    grads: Literal["auto"] | tuple[str, ...] | None = "auto"
    """Parameters with a gradient; the others must get none. "auto": all floating-point ones, if the
    op is differentiable. None: not compared (no floating-point operand or result, or a point where
    the op has no derivative: say why beside it)."""
    in_16_bits: bool = True
    """Whether a float32 sample is also run in float16 and bfloat16. Say why not beside it."""
    build: Callable[..., Any] | None = None
    """``build(*operands, **attrs)`` on popxl tensors: adds the op and returns its results, where
    the op's own call does not do (calls of graphs, remote memory). The op must be in the graph
    afterwards."""
    rtol: float | None = None
    """Instead of the dtype's tolerance. Say why beside it."""
    atol: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.oracle is None and self.autograd is None and self.check is None:
            raise ValueError(
                f"Sample({self.op!r}): got no oracle; expected oracle=, autograd= or check=."
            )


@dataclass(frozen=True)
class Built:
    """An attribute that needs an Ir to exist: ``make()`` is called with the graph that will hold
    the op open.
    """

    make: Callable[[], Any]


@dataclass(frozen=True)
class Refusal:
    """Arguments that are refused with ``error`` and words that match ``says``, when the op is added
    or by sessions.

    Numbers that the op cannot compute with are refused by sessions alone.
    """

    op: str
    operands: Operands = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Also for tensor parameters that are given something else than a tensor."""
    error: type[Exception] = ValueError
    says: str = ""
    """Regular expression, matched anywhere in the message."""
    dtype: popxl.dtype = popxl.float32
    build: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not self.says:
            raise ValueError(
                f"Refusal({self.op!r}): got no words; expected part of the message in says=."
            )


Samples = Sequence[Sample]
Refusals = Sequence[Refusal]
Arguments = dict[str, Any]

"""Random ops: pure functions of a (2,) uint32 seed tensor, by the generator in `popxl.generator`.

Beyond PopXL, dropout and the ops that make seeds take stacked seeds, uint32 [n, 2]: see
`popxl.extensions.stack_seeds`.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from popxl import dtypes, generator
from popxl.dtypes import dtype
from popxl.errors import DTypeError, ShapeError
from popxl.opdef import Cost, op
from popxl.ops.checks import check_floating, refuse_to_execute
from popxl.spec import check_dtype
from popxl.tensor import Tensor, TensorSpec

INTEGER_OPERATIONS_PER_DRAW = 13
"""Half of Squares64's 26 operations: one evaluation gives two draws."""


def check_seed(name: str, parameter: str, seed: Tensor) -> None:
    """ShapeError (a ValueError) unless ``seed`` is uint32 [2]."""
    if seed.shape != (2,) or seed.dtype is not dtypes.uint32:
        raise ShapeError(
            f"{name}: got {parameter} {seed.spec}; expected uint32[2]. Make seeds with "
            "popxl.create_seeds, and split them with ops.split_random_seed."
        )


def check_seeds(name: str, parameter: str, seeds: Tensor) -> None:
    """ShapeError (a ValueError) unless ``seeds`` is one seed or stacked seeds: uint32 [2] or [n,
    2].
    """
    if (
        len(seeds.shape) != 2
        or seeds.shape[1] != 2
        or not seeds.shape[0]
        or seeds.dtype is not dtypes.uint32
    ):
        check_seed(name, parameter, seeds)


def check_rate(name: str, parameter: str, rate: float) -> None:
    """ValueError unless a rate is a share of elements that may be dropped."""
    if not 0 <= rate < 1:
        raise ValueError(
            f"{name}: got {parameter} {rate}; expected 0 <= {parameter} < 1, the share of "
            "elements to drop."
        )


@op(random=True)
def dropout(t: Tensor, seed_tensor: Tensor, p: float) -> TensorSpec:
    """Zero elements with probability p and multiply the others by 1 / (1 - p).

    An element stays when its 32-bit draw, read as an int32, is at least p * 2**32 - 2**31, rounded
    to an integer. The draw depends on the seed and the element's row-major index alone, so the same
    seed drops the same elements again. Of stacked seeds each drops its own of n equal parts of t's
    first axis, as if that part were the whole tensor.

    Shapes: t [a], floating point; seed_tensor [2] or [n, 2], uint32 -> [a], t's dtype.
    Raises:
        ValueError: p outside [0, 1), a seed of another shape or dtype, or more seeds than equal
            parts.
        DTypeError: from sessions, if t is not floating point.
    """
    check_floating("dropout", t=t)
    check_seeds("dropout", "seed_tensor", seed_tensor)
    parts = seed_tensor.nelms // 2
    if len(seed_tensor.shape) == 2 and (not t.shape or t.shape[0] % parts):
        raise ShapeError(
            f"dropout: got t {t.spec} and {parts} stacked seeds; expected a first axis of t that "
            f"is a multiple of {parts}. Give one seed for each of its equal parts."
        )
    check_rate("dropout", "p", p)
    return t.spec


@dropout.vjp
def dropout_vjp(
    dy: Tensor, y: Tensor, t: Tensor, seed_tensor: Tensor, p: float
) -> tuple[Tensor, None]:
    """Drop the same elements of the gradient: the mask is made again from the seed."""
    return dropout(dy, seed_tensor, p), None


@dropout.cost
def dropout_cost(y: Tensor, t: Tensor, seed_tensor: Tensor, p: float) -> Cost:
    """A draw, a comparison and a product per element."""
    return Cost(flops=(INTEGER_OPERATIONS_PER_DRAW + 2) * y.nelms)


@op(random=True)
def shaped_dropout(
    t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float
) -> TensorSpec:
    """Dropout with a mask of ``shape`` that broadcasts to t: elements that share a mask element
    stay or go together.

    Shapes: t [a], floating point; seed_tensor [2], uint32 -> [a], t's dtype.
    Raises:
        ValueError: ratio outside [0, 1), a seed of another shape or dtype, or a shape that does not
            broadcast to t's.
        DTypeError: from sessions, if t is not floating point.
    """
    check_floating("shaped_dropout", t=t)
    check_seed("shaped_dropout", "seed_tensor", seed_tensor)
    check_rate("shaped_dropout", "ratio", ratio)
    try:
        fits = np.broadcast_shapes(tuple(shape), t.shape) == t.shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            f"shaped_dropout: got shape {list(shape)} for t {t.spec}; expected a shape that "
            "broadcasts to t's."
        )
    return t.spec


@shaped_dropout.vjp
def shaped_dropout_vjp(
    dy: Tensor, y: Tensor, t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float
) -> tuple[Tensor, None]:
    """The same mask on the gradient."""
    return shaped_dropout(dy, seed_tensor, shape, ratio), None


@shaped_dropout.cost
def shaped_dropout_cost(
    y: Tensor, t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float
) -> Cost:
    """A draw and a comparison per mask element, a product per element."""
    return Cost(flops=(INTEGER_OPERATIONS_PER_DRAW + 1) * math.prod(shape) + y.nelms)


def _check_drawn(name: str, seed_tensor: Tensor, data_type: dtype) -> None:
    check_seed(name, "seed_tensor", seed_tensor)
    check_dtype(f"{name}: dtype", data_type)
    if not data_type.is_floating_point or data_type.itemsize == 1:
        error = (
            f"{name}: got dtype {data_type.name}; expected floating point of 16 bits or more. "
            "Cast the result."
        )
        refuse_to_execute(DTypeError(error))


@op(random=True, differentiable=False)
def random_uniform(
    seed_tensor: Tensor,
    shape: tuple[int, ...],
    low: float = 0.0,
    high: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> TensorSpec:
    """Draw from the uniform distribution on [low, high), in steps of (high - low) / 2**24.

    Shapes: seed_tensor [2], uint32 -> shape, of dtype.
    Raises:
        ValueError: low not below high, or a seed of another shape or dtype.
        DTypeError: from sessions, for a dtype that is not floating point.
    """
    _check_drawn("random_uniform", seed_tensor, dtype)
    if not low < high:
        raise ValueError(f"random_uniform: got low {low} and high {high}; expected low < high.")
    return TensorSpec(shape, dtype)


@op(random=True, differentiable=False)
def random_normal(
    seed_tensor: Tensor,
    shape: tuple[int, ...],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> TensorSpec:
    """Draw from the normal distribution with this mean and standard deviation.

    Box and Muller's transform (1958, doi:10.1214/aoms/1177706645) of the draws of elements 2i and
    2i + 1, in float64; no value is further than 6.7 standard deviations from the mean.

    Shapes: seed_tensor [2], uint32 -> shape, of dtype.
    Raises:
        ValueError: a negative std, or a seed of another shape or dtype.
        DTypeError: from sessions, for a dtype that is not floating point.
    """
    _check_drawn("random_normal", seed_tensor, dtype)
    if not std >= 0:
        raise ValueError(f"random_normal: got std {std}; expected a number >= 0.")
    return TensorSpec(shape, dtype)


@random_uniform.cost
def random_uniform_cost(y: Tensor, *arguments: Any) -> Cost:
    """A draw and a scaling per element."""
    return Cost(flops=(INTEGER_OPERATIONS_PER_DRAW + 2) * y.nelms)


@random_normal.cost
def random_normal_cost(y: Tensor, *arguments: Any) -> Cost:
    """A draw and about ten operations per element."""
    return Cost(flops=(INTEGER_OPERATIONS_PER_DRAW + 10) * y.nelms)


@op(differentiable=False, host=generator.child_seed)
def create_random_seed(seed: Tensor, modifier: Tensor) -> TensorSpec:
    """A new seed from a seed and an integer: the first word is kept, the second is pseudo-random.

    Different modifiers of one seed always give different seeds. Of stacked seeds each is modified.

    Shapes: seed [2] or [n, 2], uint32; modifier [] or [1], an integer (taken modulo 2**32) ->
        seed's.
    Raises:
        ValueError: a seed of another shape or dtype, or a modifier that is not one integer.
    """
    check_seeds("create_random_seed", "seed", seed)
    if modifier.nelms != 1 or not modifier.dtype.is_int:
        raise ShapeError(f"create_random_seed: got modifier {modifier.spec}; expected one integer.")
    return seed.spec


def _split_on_host(seed: np.ndarray, n: int) -> tuple[np.ndarray, ...]:
    return tuple(generator.child_seed(seed, i) for i in range(n))


@op(differentiable=False, host=_split_on_host)
def split_random_seed(seed: Tensor, n: int = 2) -> tuple[TensorSpec, ...]:
    """Make n seeds of one: those that `create_random_seed` gives for the modifiers 0 .. n - 1.

    Shapes: seed [2], uint32 -> n times [2], uint32; stacked seeds [m, 2] -> n times [m, 2].
    Raises:
        ValueError: n < 1, or a seed of another shape or dtype.
    """
    check_seeds("split_random_seed", "seed", seed)
    if n < 1:
        raise ValueError(f"split_random_seed: got n {n}; expected at least 1.")
    return (seed.spec,) * n


@op(differentiable=False, host=generator.jumped_seed)
def jump_seed(seed: Tensor, count: Tensor) -> TensorSpec:
    """The seed that is left after so many others were split off: `_, seed =
    ops.split_random_seed(seed)`, `count` times.

    Shapes: seed [2], uint32, and count, one integer of 0 or more -> [2], uint32.
    Raises:
        ValueError: a seed of another shape or dtype, or a count that is not one integer.
    """
    check_seeds("jump_seed", "seed", seed)
    if count.nelms != 1 or not count.dtype.is_int:
        raise ShapeError(f"jump_seed: got count {count.spec}; expected one integer.")
    return seed.spec


@jump_seed.cost
def jump_seed_cost(y: Tensor, seed: Tensor, count: Tensor) -> Cost:
    """Negligible."""
    return Cost()


@create_random_seed.cost
def create_random_seed_cost(y: Tensor, seed: Tensor, modifier: Tensor) -> Cost:
    """Negligible."""
    return Cost()


@split_random_seed.cost
def split_random_seed_cost(y: Any | None, seed: Tensor, n: int) -> Cost:
    """Negligible."""
    return Cost()

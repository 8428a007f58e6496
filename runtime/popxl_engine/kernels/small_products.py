"""Small products of matrices: one native kernel, of one thread.

Sums are taken in the order of the shared axis alone. So a row of a result has the same bits however
many rows there are, however operands lie, and whatever is multiplied beside them.
"""

import ctypes
import functools
import itertools
import math
from typing import Any

import numpy as np
import torch

from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES
from popxl_engine.native import library as native

SMALL = 2**18
"""Multiply-adds of a product, at most. Of more, several threads are faster."""
TYPES = (torch.float32, *TORCH_HALF_DTYPES)


class Plan:
    """How operands of a type and some shapes and strides are multiplied."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], numbers: list[int]):
        has_kernel = dtype in native.SUFFIXES
        self.function = native.function("multiply_small", dtype) if has_kernel else None
        self.shape, self.strides = shape, torch.empty(shape, device="meta").stride()
        self._numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self.address = ctypes.addressof(self._numbers)


def multiplies_small(lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    """Whether `small_product` multiplies these."""
    return _plan_of(lhs, rhs) is not None


def small_product(
    lhs: torch.Tensor, rhs: torch.Tensor, result: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """lhs @ rhs + bias as `torch.matmul` has them, added up in float32 and rounded once; None where
    it is not small, or there is no such kernel for it.
    """
    plan = _plan_of(lhs, rhs)
    if plan is None:
        return None
    if lhs.dtype != result or plan.function is None:
        wide = torch.float32
        operands = (lhs.to(wide), rhs.to(wide), wide, None if bias is None else bias.to(wide))
        product = small_product(*operands)
        assert product is not None, "shapes are the same"
        return product.to(result)
    y = lhs.new_empty_strided(plan.shape, plan.strides)  # takes half of the time of `torch.empty`
    if not lhs.is_meta:
        added = None if bias is None else bias.contiguous()  # stays until the kernel has read it
        addend = None if added is None else added.data_ptr()
        plan.function(lhs.data_ptr(), rhs.data_ptr(), addend, y.data_ptr(), plan.address, 1)
    return y


def _plan_of(lhs: torch.Tensor, rhs: torch.Tensor) -> Plan | None:
    right, dtype = rhs.shape, lhs.dtype
    if (
        lhs.numel() * (right[-1] if len(right) > 1 else 1) > SMALL
        or dtype not in TYPES
        or rhs.dtype != dtype
        or not (lhs.is_cpu and rhs.is_cpu or native.is_here(lhs.device))
    ):
        return None
    return _plan(native.library(), dtype, lhs.shape, lhs.stride(), right, rhs.stride())


@functools.lru_cache(1 << 12)
def _plan(
    library: ctypes.CDLL | None,
    dtype: torch.dtype,
    left: tuple[int, ...],
    left_strides: tuple[int, ...],
    right: tuple[int, ...],
    right_strides: tuple[int, ...],
) -> Plan | None:
    """None where there are too many numbers, or none, or there is no library."""
    if library is None:
        return None
    vectors = len(left) == 1, len(right) == 1
    if vectors[0]:
        left, left_strides = (1, *left), (0, *left_strides)
    if vectors[1]:
        right, right_strides = (*right, 1), (*right_strides, 0)
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    rows, terms, columns = left[-2], left[-1], right[-1]
    if not 0 < math.prod(batch) * rows * terms * columns <= SMALL:
        return None
    axes = _merged(
        zip(
            batch,
            _spread(batch, left[:-2], left_strides[:-2]),
            _spread(batch, right[:-2], right_strides[:-2]),
        )
    )
    if axes and axes[-1][2] == 0 and (rows == 1 or axes[-1][1] == rows * left_strides[-2]):
        size, stride, _ = axes.pop()  # more rows for the same right operand
        rows, left_strides = (
            rows * size,
            (*left_strides[:-2], stride if rows == 1 else left_strides[-2], left_strides[-1]),
        )
    numbers = [rows, columns, terms, *left_strides[-2:], *reversed(right_strides[-2:]), len(axes)]
    matrix = left[-2 : -2 + (not vectors[0])], right[-1:] if not vectors[1] else ()
    shape = (*batch, *matrix[0], *matrix[1])
    return Plan(dtype, shape, [*numbers, *itertools.chain(*axes)])


def _spread(
    batch: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, ...]:
    """Strides of axes that are broadcast: zero where there is one for all."""
    missing = len(batch) - len(shape)
    own = (0 if size == 1 else stride for size, stride in zip(shape, strides))
    return (*(0 for _ in range(missing)), *own)


def _merged(axes: Any) -> list[tuple[int, int, int]]:
    """(size, stride of the left, of the right operand) of axes, those that follow each other as
    one.
    """
    found: list[tuple[int, int, int]] = []
    for size, left, right in axes:
        if size == 1:
            continue
        if found and found[-1][1:] == (size * left, size * right):
            found[-1] = (found[-1][0] * size, left, right)
        else:
            found.append((size, left, right))
    return found

"""Matrix products. 16-bit types accumulate in float32."""

import functools

import torch
from popxl import dtypes

from popxl_engine.kernels.casting import power_of_two
from popxl_engine.kernels.dtypes import LIMITED, torch_dtype
from popxl_engine.kernels.registry import kernel
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES
from popxl_engine.kernels.small_products import small_product
from popxl_engine.native import instruction_sets
from popxl_engine.native import library as native


@functools.cache
def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a 16-bit type as fast as float32; else torch falls
    back to slow loops.
    """
    if dtype == torch.bfloat16:
        is_supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return bool(is_supported) and instruction_sets.may_use("avx512f")
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()) and instruction_sets.may_use(
        "avx512_fp16"
    )


def multiplies_halves(t: torch.Tensor) -> bool:
    """Whether matrices of a 16-bit tensor's type are multiplied as they are where it is: a GPU's,
    or what stands for one in a plan, on any.
    """
    return not native.is_here(t.device) or multiplies_natively(t.dtype)


@functools.cache
def prefers_onednn() -> bool:
    """Whether float32 products of matrices are faster in oneDNN than in torch.mm.

    MKL leaves AVX-512 alone on AMD's CPUs. Decided by the kind of CPU, not by measuring, so that
    the same machine gives the same bits. oneDNN is twice as fast there (docs/architecture.md).
    """
    return (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and instruction_sets.may_use("avx512f")
        and instruction_sets.is_amd()
    )


SMALL = 4096
"""Elements of a right operand below which oneDNN's preparations take longer than MKL's product of a
few rows. The rows do not count: they may come in several parts, of the same bits."""


def dense(t: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows or columns lie side by side: oneDNN multiplies by others a thousand times
    slower.
    """
    return (
        t
        if t.is_contiguous() or t.stride() == (1, t.shape[0]) or t.t().is_contiguous()
        else t.contiguous()
    )


BOUNDARY, WIDE = 16, 1024
"""Bytes on which rows of a GPU's matrices of so many columns begin: its products read and write so
much at once. Of a size of so many that is no multiple, such as 50257 classes, cuBLAS chooses
kernels that are five to seven times slower.
"""


def rows_on_boundaries(
    rows: int, columns: int, like: torch.Tensor, boundary: int = BOUNDARY
) -> torch.Tensor:
    """Memory for a matrix that products write or read so many bytes at a time, such as logits of
    50257 classes.
    """
    unit = boundary // like.element_size() if columns >= WIDE else 1
    # a view would have two owners
    return like.new_empty_strided((rows, columns), (-(-columns // unit) * unit, 1))


def matrix_product(
    lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """lhs @ rhs + bias for floating-point matrices of one type: [m, k], [k, n], [n] -> [m, n]."""
    if (small := small_product(lhs, rhs, lhs.dtype, bias)) is not None:
        return small
    if native.multiplies_few(lhs, rhs):
        return few_rows(lhs, rhs, bias)
    if lhs.is_cuda:
        return aligned_product(lhs, rhs, bias)
    if lhs.dtype == torch.float32 and native.multiplies(lhs, rhs):
        return multiplied(lhs, rhs, bias, lhs.new_empty(lhs.shape[0], rhs.shape[1]))
    rhs = dense(rhs)
    if lhs.dtype == torch.float32 and prefers_onednn() and lhs.numel() and rhs.numel() >= SMALL:
        lhs = lhs.contiguous()  # oneDNN would do it inside, where plans of memory do not see it
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            lhs, rhs.t(), bias, "none", [], ""
        )
        return result
    return torch.mm(lhs, rhs) if bias is None else torch.addmm(bias, lhs, rhs)


def multiplied(
    lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> torch.Tensor:
    """lhs @ rhs + bias, in y, of matrices that the library `multiplies`."""
    (rows, inner), columns = lhs.shape, rhs.shape[1]
    added = None if bias is None else bias.contiguous()
    factors = (lhs, *lhs.stride(), rhs, *rhs.stride())
    native.call("multiply_add", (lhs.dtype,), *factors, added, y, y.stride(0), rows, columns, inner)
    return y


def aligned_product(
    lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`matrix_product` on a GPU: what lies beyond the last boundary of a side is multiplied on its
    own. Still every number is rounded once.
    """
    (rows, inner), columns = lhs.shape, rhs.shape[1]
    unit = BOUNDARY // lhs.element_size()
    m, k, n = (size - size % unit if size >= WIDE else size for size in (rows, inner, columns))
    if k < inner and lhs.dtype in TORCH_HALF_DTYPES:
        wide = torch.mm(lhs[:, :k], rhs[:k], out_dtype=torch.float32)
        wide.addmm_(lhs[:, k:].to(torch.float32), rhs[k:].to(torch.float32))
        return (wide if bias is None else wide.add_(bias)).to(lhs.dtype)
    if (m, n) == (rows, columns):
        return torch.mm(lhs, rhs) if bias is None else torch.addmm(bias, lhs, rhs)
    y = rows_on_boundaries(rows, columns, lhs)
    for r in parts_of(rows, m):
        for c in parts_of(columns, n):
            if bias is None:
                torch.mm(lhs[r], rhs[:, c], out=y[r, c])
            else:
                torch.addmm(bias[c], lhs[r], rhs[:, c], out=y[r, c])
    return y


def parts_of(size: int, end: int) -> list[slice]:
    """What comes before ``end``, and what is left of ``size``, if anything is."""
    return [slice(0, end)] if end == size else [slice(0, end), slice(end, size)]


def few_rows(lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`matrix_product` of matrices that the library `multiplies_few` of."""
    (rows, inner), columns = lhs.shape, rhs.shape[1]
    y = lhs.new_empty(rows, columns)
    added = None if bias is None else bias.contiguous()
    factors = (lhs, lhs.stride(0), rhs, *rhs.stride())
    native.call("multiply_few", (lhs.dtype,), *factors, added, y, rows, columns, inner)
    return y


def product(lhs: torch.Tensor, rhs: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """lhs @ rhs, accumulated in float32 or wider and rounded once to ``result``."""
    if (small := small_product(lhs, rhs, result)) is not None:
        return small
    if lhs.dim() == rhs.dim() == 2 and result == lhs.dtype and native.multiplies_few(lhs, rhs):
        return few_rows(lhs, rhs, None)
    if lhs.dtype in TORCH_HALF_DTYPES and (result != lhs.dtype or not multiplies_halves(lhs)):
        return product(lhs.to(torch.float32), rhs.to(torch.float32), torch.float32).to(result)
    is_integer = not (lhs.is_floating_point() or lhs.is_complex())
    # CUDA has no integer matrix product; float64 is exact up to 2**53
    if is_integer and lhs.is_cuda:
        wide = torch.matmul(
            lhs.to(torch.int64).to(torch.float64), rhs.to(torch.int64).to(torch.float64)
        )
        return wide.to(torch.int64).to(result)
    if lhs.dtype in LIMITED:
        return torch.matmul(lhs.to(torch.int64), rhs.to(torch.int64)).to(result)
    if lhs.dim() == rhs.dim() == 2 and lhs.is_floating_point():
        return matrix_product(lhs, rhs).to(result)
    return torch.matmul(lhs, rhs).to(result)


@kernel("matmul")
def matmul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    available_memory_proportion: float | None,
    output_type: dtypes.dtype | None,
    partials_type: dtypes.dtype | None,
) -> torch.Tensor:
    """lhs @ rhs."""
    return product(lhs, rhs, lhs.dtype if output_type is None else torch_dtype(output_type))


@kernel("matmul_pow2scaled")
def matmul_pow2scaled(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    log2_scale: torch.Tensor,
    available_memory_proportion: float | None,
) -> torch.Tensor:
    """(lhs @ rhs) * 2**log2_scale in float32, where products of float8 are exact."""
    wide = product(lhs.to(torch.float32), rhs.to(torch.float32), torch.float32)
    return wide.mul_(power_of_two(log2_scale)).to(torch.float16)

"""Matrix products go to the fastest library on this CPU; whatever the operands' strides, numbers
and speed stay.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.fused_programs import check, fused_steps, observe
from helpers.products import needs_tiles
from helpers.quick import cases
from popxl_engine.kernels.accumulate import accumulate_gemm_
from popxl_engine.kernels.gemm import gemm, gemm_bias
from popxl_engine.kernels.linalg import matrix_product, product
from popxl_engine.kernels.native import newton_schulz
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.native import library as native

WIDE = torch.randn(512, 1536, generator=torch.Generator().manual_seed(0))
OPERANDS = {
    "contiguous": WIDE[:, :512].contiguous(),
    "transposed": WIDE[:, :512].contiguous().t(),
    "columns of a wider one": WIDE[:, 512:1024],
    "transposed columns of a wider one": WIDE[:, 512:1024].t(),
    "every third column": WIDE[:, ::3],
    "one row expanded": WIDE[:1, :512].expand(512, 512),
    "one column expanded": WIDE[:, :1].expand(512, 512),
}


@pytest.mark.parametrize(
    "lhs", cases(OPERANDS, lambda name: name in ("contiguous", "columns of a wider one"))
)
@pytest.mark.parametrize("rhs", OPERANDS)
def test_products_of_views_equal_products_of_copies_and_are_not_slow(lhs, rhs):
    bias = WIDE[0, :512]
    start = time.process_time()
    result = matrix_product(OPERANDS[lhs], OPERANDS[rhs], bias)
    seconds = time.process_time() - start
    expected = OPERANDS[lhs].double() @ OPERANDS[rhs].double() + bias.double()
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-3)
    assert seconds < 0.5, "a thousandfold slower reference loop took over"


# By tiles


def narrow(
    rows: int, columns: int, seed: int, is_transposed: bool = False, extra: int = 0
) -> torch.Tensor:
    """A bfloat16 matrix; `extra` elements lie between its rows, or its columns if it is
    transposed.
    """
    shape = (columns, rows) if is_transposed else (rows, columns)
    whole = torch.randn(
        shape[0], shape[1] + extra, generator=torch.Generator().manual_seed(seed)
    ).to(torch.bfloat16)
    t = whole[:, : shape[1]]
    return t.t() if is_transposed else t


def by_tiles(
    lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `tile_gemm` makes by the library."""
    assert native.multiplies(lhs, rhs)
    return gemm(lhs, rhs, bias)


SIZES = [
    (1, 1, 1),
    (33, 70, 17),
    (5, 2047, 40),
    (64, 32, 64),
    (96, 2080, 40),
    (200, 1030, 31),
    (32, 96, 1700),
]
"""Rows, terms, columns: edges of tiles, rows that tiles are loaded from as they lie, several
chunks, many columns.
"""
QUICK = ((33, 70, 17), (64, 32, 64), (96, 2080, 40))


@needs_tiles
@pytest.mark.parametrize("extra", cases([0, 5, 32], lambda extra: extra == 5))
@pytest.mark.parametrize("is_rhs_transposed", [False, True])
@pytest.mark.parametrize("is_lhs_transposed", [False, True])
@pytest.mark.parametrize(
    "rows, inner, columns",
    [pytest.param(*size, marks=[pytest.mark.slow] * (size not in QUICK)) for size in SIZES],
)
def test_products_by_tiles_are_those_in_float64_rounded_once_for_any_threads(
    rows: int, inner: int, columns: int, is_lhs_transposed: bool, is_rhs_transposed: bool, extra: int,
    threads: Any,
) -> None:  # fmt: skip
    lhs, rhs = (
        narrow(rows, inner, 1, is_lhs_transposed, extra),
        narrow(inner, columns, 2, is_rhs_transposed, extra),
    )
    for bias in (None, narrow(1, 2 * columns, 3)[0, ::2]):
        results: list[torch.Tensor] = []
        for count in (1, 2, 3):
            threads(count)
            results.append(by_tiles(lhs, rhs, bias))
        exact = lhs.double() @ rhs.double() + (0.0 if bias is None else bias.double())
        error = (results[0].double() - exact).abs()
        assert (error <= exact.abs() * 2**-8 + 1e-6 * inner**0.5).all(), error.max()
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@needs_tiles
@pytest.mark.parametrize("way", cases(["AMX", "dot products"], lambda way: False))
@pytest.mark.parametrize("rows, inner, columns", SIZES)
def test_tiles_are_multiplied_by_amx_and_by_dot_products(
    rows: int, inner: int, columns: int, way: str, threads: Any, by: Any
) -> None:
    by(way)
    for is_transposed in (False, True):
        lhs, rhs = (
            narrow(rows, inner, 1, is_transposed, 32),
            narrow(inner, columns, 2, is_transposed, 5),
        )
        exact, total = lhs.double() @ rhs.double(), torch.full((rows, columns), float("nan"))
        for count in (1, 2):
            threads(count)
            y, sums = by_tiles(lhs, rhs), accumulate_gemm_(total, lhs, rhs, 0.0)
            assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6 * inner**0.5).all()
            torch.testing.assert_close(
                sums.double(), exact, rtol=1e-5, atol=1e-6 * inner**0.5 + 1e-6
            )


@needs_tiles
@pytest.mark.parametrize("way", cases(["AMX", "dot products"], lambda way: False))
def test_newton_schulz_is_that_of_plain_products(way: str, threads: Any, by: Any) -> None:
    by(way)
    for rows, columns in ((5, 3), (64, 96), (97, 200)):
        matrices = narrow(2 * rows, columns, 1).reshape(2, rows, columns)
        given = matrices, (3.4445, -4.7750, 2.0315), 3, 1e-7
        plain = KERNELS["newton_schulz"](*given)
        for count in (1, 2):
            threads(count)
            assert (newton_schulz(*given) - plain).norm() < 2.0**-9 * plain.norm()


@needs_tiles
@pytest.mark.parametrize("inner", [96, 1056])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_other_rows(inner: int) -> None:
    lhs, rhs, bias = narrow(160, inner, 1), narrow(inner, 48, 2), narrow(1, 48, 3)[0]
    whole = by_tiles(lhs, rhs, bias)
    for first, end in ((0, 32), (32, 160), (7, 60), (159, 160)):
        assert torch.equal(by_tiles(lhs[first:end], rhs, bias), whole[first:end])
        assert torch.equal(
            by_tiles(lhs[first:end].t().contiguous().t(), rhs, bias), whole[first:end]
        )


@needs_tiles
def test_what_is_beside_an_operand_and_what_a_result_held_before_does_not_matter() -> None:
    whole = torch.full((70, 101), float("nan"), dtype=torch.bfloat16)
    lhs = whole[1:40, 3:70]
    lhs.copy_(narrow(39, 67, 1))
    rhs = whole[:67, 71:90]
    rhs.copy_(narrow(67, 19, 2))
    assert torch.equal(by_tiles(lhs, rhs), by_tiles(lhs.contiguous(), rhs.contiguous()))
    assert torch.equal(by_tiles(lhs, rhs).isnan(), torch.zeros(39, 19, dtype=torch.bool))
    lhs[5, 7], lhs[6, 8] = float("inf"), float("nan")
    y = by_tiles(lhs, rhs)
    assert (
        y[6].isnan().all()
        and not y[5].isfinite().any()
        and y[[*range(5), *range(7, 39)]].isfinite().all()
    )


@needs_tiles
@pytest.mark.parametrize("inner", [67, 1100, 2048 + 40])
def test_rows_on_boundaries_may_end_within_a_tile(inner: int, threads: Any) -> None:
    stride = -(-inner // 32) * 32
    aligned = torch.full((64, stride), float("nan"), dtype=torch.bfloat16)[:, :inner]
    aligned.copy_(narrow(64, inner, 3))
    rhs = narrow(inner, 50, 4)
    for count in (1, 2):
        threads(count)
        assert torch.equal(by_tiles(aligned, rhs), by_tiles(aligned.t().contiguous().t(), rhs))


@needs_tiles
@pytest.mark.parametrize(
    "rows, columns", [(40, 70001), pytest.param(70001, 40, marks=pytest.mark.slow)]
)
def test_sums_of_several_chunks_are_held_in_parts(rows: int, columns: int, threads: Any) -> None:
    inner = 1030
    lhs, rhs, bias = narrow(rows, inner, 1), narrow(inner, columns, 2), narrow(1, columns, 3)[0]
    for count in (1, 2):
        threads(count)
        y = by_tiles(lhs, rhs, bias)
        for first, end in ((0, 40), (30000, 60000), (69000, 70001)):
            part = (
                (slice(first, end), slice(None))
                if rows > columns
                else (slice(None), slice(first, end))
            )
            assert torch.equal(y[part], by_tiles(lhs[part[0]], rhs[:, part[1]], bias[part[1]]))


@needs_tiles
@pytest.mark.parametrize("columns, stride", [(1030, 1056), (1056, 1056), (70, 70)])
def test_wide_results_begin_their_rows_where_rows_of_tiles_may(columns: int, stride: int) -> None:
    y = by_tiles(narrow(33, 64, 1), narrow(64, columns, 2))
    assert y.stride() == (stride, 1) and y.data_ptr() % 64 == 0
    if columns == 1030:
        again = by_tiles(y, narrow(columns, 40, 3))
        assert torch.equal(again, by_tiles(y.contiguous(), narrow(columns, 40, 3)))


@needs_tiles
@pytest.mark.parametrize(
    "rows, inner, columns, is_rhs_transposed",
    [pytest.param(1024, 40, 8201, True, marks=pytest.mark.slow), (8193, 33, 1030, False)],
)
def test_large_results_are_rounded_once_at_any_alignment(
    rows: int, inner: int, columns: int, is_rhs_transposed: bool, threads: Any
) -> None:
    lhs, rhs = narrow(rows, inner, 1), narrow(inner, columns, 2, is_rhs_transposed)
    exact = lhs.float() @ rhs.float()
    for count in (1, 2):
        threads(count)
        y = by_tiles(lhs, rhs)
        assert ((y.float() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


@needs_tiles
@pytest.mark.parametrize("columns", cases([1024, 1010], lambda columns: columns == 1010))
def test_a_large_total_that_is_written_once_is_the_product(columns: int, threads: Any) -> None:
    rows, inner = 4160, 40
    lhs, rhs = narrow(rows, inner, 1, is_transposed=True), narrow(inner, columns, 2)
    for count in (1, 2):
        threads(count)
        whole = torch.full((rows, 1024), float("nan"))
        total = whole[:, :columns]
        assert native.adds_product(total, lhs, rhs)
        factors = (lhs, *lhs.stride(), rhs, *rhs.stride())
        native.call(
            "accumulate_product",
            (lhs.dtype,),
            *factors,
            total,
            1024,
            0.0,
            0.5,
            rows,
            columns,
            inner,
            None,
        )
        torch.testing.assert_close(total, 0.5 * (lhs.float() @ rhs.float()), rtol=1e-5, atol=1e-5)
        assert whole[:, columns:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_tiles_do_not_make_go_to_the_library_for_this_cpu(dtype: torch.dtype) -> None:
    wide, rhs, bias = WIDE[:, :20].to(dtype), WIDE[:10, :7].to(dtype), WIDE[0, :7].to(dtype)
    lhs = wide[:, ::2]
    assert not native.multiplies(lhs, rhs)
    assert torch.equal(gemm(lhs, rhs, None), product(lhs, rhs, dtype))
    assert torch.equal(gemm(lhs, rhs, bias), gemm_bias(lhs, rhs, bias))
    # oneDNN or MKL, by the kind of CPU
    torch.testing.assert_close(gemm(lhs, rhs, None), lhs @ rhs)
    assert gemm(lhs[:0], rhs, bias).shape == (0, 7)


# In programs


def layer(
    rows: int, dtype: popxl.dtype = popxl.bfloat16
) -> Callable[[popxl.Ir], Sequence[popxl.Tensor]]:
    """A product with a bias, and one with a transposed matrix."""

    def build(ir: popxl.Ir) -> Sequence[popxl.Tensor]:
        x, w, v, b = (
            popxl.variable(
                np.random.default_rng(i).normal(size=s).astype(np.float32), dtype, name=n
            )
            for i, (n, s) in enumerate(
                {"x": (rows, 64), "w": (64, 96), "v": (80, 64), "b": (96,)}.items()
            )
        )
        return [x @ w + b, x @ v.T]

    return build


def test_a_program_multiplies_many_rows_of_bfloat16_by_tiles() -> None:
    assert check(layer(512), popxl.bfloat16, scale=4) == {"gemm"}


@pytest.mark.parametrize("rows, dtype", [(511, popxl.bfloat16), (512, popxl.float32)])
def test_a_program_leaves_few_rows_and_other_types_to_torch(rows: int, dtype: popxl.dtype) -> None:
    assert fused_steps(observe(layer(rows, dtype), False)[1]) == {"gemm_bias"}


def test_products_by_tiles_are_switched_off_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_PASSES", "-tile_gemm")
    assert fused_steps(observe(layer(512), False)[1]) == {"gemm_bias"}
    monkeypatch.setenv("POPXL_PASSES", "-fuse_gemm_bias")
    assert fused_steps(observe(layer(512), False)[1]) == {"gemm"}

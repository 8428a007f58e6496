"""Whole products of float32 matrices by the library: the numbers, and bits that depend on nothing
but a row and the right operand.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.matrices import random
from helpers.surrounded import surrounded
from popxl_engine.kernels import linalg
from popxl_engine.kernels.accumulate import accumulate_gemm_, accumulate_gemm_sumsq_
from popxl_engine.kernels.gemm import gemm_bias
from popxl_engine.kernels.linalg import matrix_product
from popxl_engine.kernels.newton_schulz import symmetric_product
from popxl_engine.kernels.small_products import small_product
from popxl_engine.native import instruction_sets
from popxl_engine.native import library as native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
SIZES = [
    (1, 1, 1),
    (13, 385, 35),
    (7, 200, 17),
    (150, 1000, 40),
    (300, 64, 1100),
    (3000, 5, 700),
    (9, 20, 5000),
]
"""Rows, terms, columns: edges of blocks, several parts of sums, of rows and of columns."""
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: t,
    "columns": lambda t: t.t().contiguous().t(),
    "of more": lambda t: torch.nn.functional.pad(t, (3, 5))[:, 3:-5],
}


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library multiplies, whatever is fastest here."""
    monkeypatch.setattr(native, "outpaces_mkl", lambda: True)
    monkeypatch.setattr(native, "LARGE_OPERAND", 0)


def by_library(
    lhs: torch.Tensor, rhs: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    assert native.multiplies(lhs, rhs)
    with surrounded():
        return linalg.multiplied(lhs, rhs, bias, lhs.new_empty(lhs.shape[0], rhs.shape[1]))


def bound(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """The largest error of sums of 384 terms, and of their sums."""
    terms = min(lhs.shape[1], 384 + lhs.shape[1] // 384) + 3
    return terms * 2.0**-24 * (lhs.double().abs() @ rhs.double().abs()) + 1e-6


@pytest.mark.parametrize("rows, terms, columns", SIZES)
def test_products_are_those_in_float64_and_alike_in_every_layout_and_for_any_threads(
    rows: int, terms: int, columns: int, threads: Any
) -> None:
    lhs, rhs, bias = random(rows, terms), random(terms, columns), random(columns)
    exact, first = lhs.double() @ rhs.double(), None
    for by_left in LAYOUTS.values():
        for by_right in LAYOUTS.values():
            for count in (1, 3):
                threads(count)
                y = by_library(by_left(lhs), by_right(rhs))
                first = y if first is None else first
                assert torch.equal(y, first)
    assert first is not None and ((first - exact).abs() <= bound(lhs, rhs)).all()
    assert torch.equal(by_library(lhs, rhs, torch.stack([bias, bias + 1], 1)[:, 0]), first + bias)


def test_a_row_has_the_same_bits_however_many_there_are() -> None:
    lhs, rhs = random(500, 777), random(777, 301)
    whole = by_library(lhs, rhs)
    for count in (1, 7, 150):
        parts = [by_library(part, rhs) for part in lhs.split(count)]
        assert torch.equal(torch.cat(parts), whole)
        parts = [by_library(lhs, part) for part in rhs.split(count, 1)]
        assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(small_product(lhs[:1], rhs, torch.float32), whole[:1])
    assert torch.equal(linalg.few_rows(lhs[:8], rhs, None), whole[:8])


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows, terms, columns", SIZES)
def test_a_total_is_the_mean_with_its_squares_summed(
    rows: int, terms: int, columns: int, is_transposed: bool, threads: Any
) -> None:
    lhs, rhs = random(rows, terms), random(terms, columns)
    lhs = lhs.t().contiguous().t() if is_transposed else lhs
    before = random(rows, columns + 2)[:, :columns]
    found = []
    for count in (1, 2):
        threads(count)
        total = torch.nn.functional.pad(before, (0, 2))[:, :columns]
        with surrounded():
            assert native.adds_product(total, lhs, rhs)
            _, squares = accumulate_gemm_sumsq_(total, lhs, rhs, torch.tensor(2.0))
        plain = before.clone()
        assert torch.equal(accumulate_gemm_(plain, lhs, rhs, torch.tensor(2.0)), total)
        found.append((total, squares))
    (total, squares), (again, squares_again) = found
    exact = before.double() * (2 / 3) + (lhs.double() @ rhs.double()) / 3
    assert ((total - exact).abs() <= bound(lhs, rhs) + 2.0**-22 * before.abs()).all()
    torch.testing.assert_close(squares.double(), total.double().square().sum(), rtol=1e-6, atol=0)
    assert torch.equal(total, again) and torch.equal(squares, squares_again)


def test_what_was_in_a_total_that_is_written_first_does_not_count() -> None:
    lhs, rhs = random(20, 400), random(400, 30)
    total = torch.full((20, 30), torch.nan)
    accumulate_gemm_(total, lhs, rhs, torch.tensor(0.0))
    assert torch.equal(total, by_library(lhs, rhs))


def test_what_is_no_number_stays_in_its_row_and_column() -> None:
    lhs, rhs = random(20, 400), random(400, 40)
    lhs[3, 399], rhs[0, 17] = torch.inf, torch.nan
    y = by_library(lhs, rhs)
    assert y[3].isfinite().sum() == 0 and y[:, 17].isnan().all()
    others = [i for i in range(20) if i != 3]
    assert y[others][:, [j for j in range(40) if j != 17]].isfinite().all()


def test_ops_multiply_by_the_library() -> None:
    lhs, rhs, bias = random(700, 80), random(80, 90), random(90)
    assert torch.equal(matrix_product(lhs, rhs), by_library(lhs, rhs))
    assert torch.equal(gemm_bias(lhs, rhs, bias), by_library(lhs, rhs, bias))
    stack = random(2, 384, 500)
    square = symmetric_product(stack, stack.mT)
    assert torch.equal(square[1], by_library(stack[1], stack[1].t()))


def test_the_library_multiplies_float32_on_cpus_of_amd_without_avx512(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    sets = {each.name: each for each in instruction_sets.SETS}
    for name, is_amd, expected in [
        ("avx2", True, True),
        ("avx2", False, False),
        ("avx512", True, False),
        ("sse2", True, False),
    ]:
        monkeypatch.setattr(instruction_sets, "in_use", lambda level=sets[name]: level)
        monkeypatch.setattr(instruction_sets, "is_amd", lambda is_amd=is_amd: is_amd)
        native.outpaces_mkl.cache_clear()
        large, small = random(128, 128), random(4, 8)
        assert native.multiplies(random(4, 128), large) == expected
        assert not native.multiplies(random(300, 4), small)
        assert not native.multiplies(large.double(), large.double())
        assert not native.multiplies(large[:0], large) and not native.multiplies(
            large[::2, ::2], large
        )
    native.outpaces_mkl.cache_clear()

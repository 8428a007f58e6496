"""Products of a few rows with a large matrix: the numbers, the bits, and who takes them."""

import pytest
import torch
from helpers.matrices import random
from popxl_engine.kernels.gemm import gemm_bias
from popxl_engine.kernels.linalg import few_rows, product
from popxl_engine.native import library as native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
both_types = pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)], ids=["float32", "bfloat16"]
)
SIZES = [(256, 256), (301, 1031), (1030, 67), (3, 30000)]
"""Summed numbers and columns: whole vectors, and what is left over of them."""


def matrix(inner, columns, dtype, is_transposed):
    if is_transposed:
        return random(columns, inner, dtype=dtype, seed=2).t()
    return random(inner, columns, dtype=dtype, seed=2)


@pytest.mark.quick_every(5)
@both_types
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", range(1, 9))
def test_products_are_those_of_float64(rows, is_transposed, dtype, tolerance):
    for inner, columns in SIZES:
        x, w = (
            random(rows, inner, dtype=dtype, seed=1),
            matrix(inner, columns, dtype, is_transposed),
        )
        bias = random(columns, dtype=dtype, seed=3)
        assert native.multiplies_few(x, w)
        exact = x.double() @ w.double()
        for added in (None, bias):
            expected = exact if added is None else exact + added.double()
            got = few_rows(x, w, added).double()
            assert (got - expected).abs().max() < tolerance * expected.abs().max()


@both_types
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_row_has_the_same_bits_with_any_threads_and_other_rows(is_transposed, dtype, tolerance):
    x, w = random(8, 999, dtype=dtype, seed=1), matrix(999, 1031, dtype, is_transposed)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [few_rows(x, w, None), torch.cat([few_rows(row[None], w, None) for row in x])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_rows_may_be_apart():
    x, w = random(6, 1031, seed=1)[::2, :301], matrix(301, 1031, torch.float32, False)
    assert torch.equal(few_rows(x, w, None), few_rows(x.contiguous(), w, None))


def test_products_and_those_with_bias_of_few_rows_take_it_and_others_do_not():
    x, w, bias = random(8, 301), matrix(301, 1031, torch.float32, False), random(1031)
    assert torch.equal(product(x, w, x.dtype), few_rows(x, w, None))
    assert torch.equal(gemm_bias(x, w, bias), few_rows(x, w, bias))
    assert not native.multiplies_few(random(9, 301), w)
    assert not native.multiplies_few(x[:, :30], w[:30, :30])
    assert not native.multiplies_few(x.double(), w.double())
    assert not native.multiplies_few(x.half(), w.half())

"""Small products: the numbers, and bits that do not depend on what is multiplied beside a row."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import popxl
import pytest
import torch
from helpers.matrices import random
from helpers.surrounded import Surrounded
from popxl import ops
from popxl_engine.kernels import small_products
from popxl_engine.kernels.accumulate import accumulate_gemm_
from popxl_engine.kernels.attention import attention, attention_grad
from popxl_engine.kernels.gemm import gemm_bias, masked_scores
from popxl_engine.kernels.linalg import few_rows, product
from popxl_engine.kernels.small_products import SMALL, multiplies_small, small_product
from popxl_engine.native import library as native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The error of the one rounding at the end; numbers are not subnormal."""
types = pytest.mark.parametrize("dtype", ROUNDING, ids=["float32", "bfloat16", "float16"])
SHAPES = [
    ((12, 64), (64, 64)),
    ((4, 3, 8), (8, 16)),
    *(((9, terms), (terms, 37)) for terms in (1, 2, 15, 17, 383, 384, 385, 777)),
    *(((2, 61), (61, columns)) for columns in (1, 7, 16, 31, 128, 131, 300)),
    *(((rows, 50), (50, 5)) for rows in (1, 2, 15, 16, 33, 300)),
    ((1, 7000), (7000, 1)),
    ((3, 20000), (20000, 4)),
    ((1, 512), (512, 512)),
    ((2, 1000), (1000, 130)),
    ((70,), (70, 9)),
    ((3, 9, 70), (70,)),
    ((70,), (70,)),
    ((2, 5, 21), (2, 21, 19)),
    ((2, 1, 5, 21), (3, 21, 19)),
    ((5, 21), (2, 3, 21, 19)),
    ((2, 1, 2, 1, 3, 4), (1, 2, 1, 3, 4, 5)),
]
"""Shapes of the operands: vectors filled and not, parts of sums, few sums of many terms, batches.
"""
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: t,
    "columns": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "apart": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "of more": lambda t: torch.nn.functional.pad(t, (3, 5))[..., 3:-5],
}


def operands(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    return [random(*left, dtype=dtype, seed=1), random(*right, dtype=dtype, seed=2)]


@types
@pytest.mark.parametrize("left, right", SHAPES)
def test_products_are_those_of_float64_in_every_layout(left, right, dtype):
    lhs, rhs = operands(left, right, dtype)
    exact = np.matmul(lhs.double().numpy(), rhs.double().numpy())
    size = np.matmul(lhs.double().abs().numpy(), rhs.double().abs().numpy())
    bound = min(left[-1], 384 + left[-1] // 384) * 2.0**-24 * size + ROUNDING[dtype] * abs(exact)
    first = product(lhs, rhs, dtype)
    assert first.dtype == dtype and first.shape == exact.shape
    assert (abs(first.double().numpy() - exact) <= bound * 1.001).all()
    for by_left in LAYOUTS.values():
        for by_right in LAYOUTS.values():
            y = small_product(by_left(lhs), by_right(rhs), dtype)
            assert y is not None and torch.equal(y, first)


@types
@pytest.mark.parametrize("rows, terms, columns", [(12, 64, 64), (17, 401, 19), (16, 1000, 3)])
def test_parts_of_a_product_have_the_bits_of_the_whole(rows, terms, columns, dtype):
    lhs, rhs = operands((rows, terms), (terms, columns), dtype)
    whole = product(lhs, rhs, dtype)
    for count in (1, 3, 5):
        parts = [product(part, rhs, dtype) for part in lhs.split(count)]
        assert torch.equal(torch.cat(parts), whole)
        parts = [product(lhs, part, dtype) for part in rhs.split(count, 1)]
        assert torch.equal(torch.cat(parts, 1), whole)
    stacked = product(lhs[None].expand(2, -1, -1), rhs, dtype)
    assert torch.equal(stacked, whole.expand(2, -1, -1))
    beside = product(torch.stack([lhs + 1, lhs]), torch.stack([rhs + 1, rhs]), dtype)
    assert torch.equal(beside[1], whole)


def test_the_ops_that_multiply_have_the_same_bits_for_rows_alone():
    lhs, rhs = operands((12, 64), (64, 64), torch.float32)
    bias, mask = random(64), random(12, 64)
    apart = torch.stack([bias, bias + 1], 1).flatten()
    stacked, others = lhs.expand(2, -1, -1), rhs.expand(2, -1, -1)
    whole = gemm_bias(lhs, rhs, bias), masked_scores(stacked, others, mask, 0.3)[0]
    total = accumulate_gemm_(torch.ones(12, 64), lhs, rhs, 1.0)
    for i in range(12):
        row = slice(i, i + 1)
        assert torch.equal(gemm_bias(lhs[row], rhs, apart[::2]), whole[0][row])
        assert torch.equal(masked_scores(stacked[:, row], others, mask[row], 0.3)[1], whole[1][row])
        assert torch.equal(accumulate_gemm_(torch.ones(1, 64), lhs[row], rhs, 1.0), total[row])
    assert torch.equal(whole[0], product(lhs, rhs, torch.float32) + bias)


def test_a_large_product_of_few_rows_has_the_bits_of_its_small_rows():
    lhs, rhs = operands((8, 777), (777, 301), torch.float32)
    assert not multiplies_small(lhs, rhs) and multiplies_small(lhs[:1], rhs)
    assert torch.equal(
        few_rows(lhs, rhs, None), torch.cat([product(row[None], rhs, row.dtype) for row in lhs])
    )


def test_which_products_are_small():
    rows = SMALL // (64 * 64)
    lhs, rhs = random(rows + 1, 64), random(64, 64)
    assert multiplies_small(lhs[:rows], rhs) and not multiplies_small(lhs, rhs)
    assert not multiplies_small(lhs[:2].expand(rows, 2, 64), rhs)
    assert multiplies_small(lhs[:2].expand(rows // 2, 2, 64), rhs)
    assert not multiplies_small(lhs[:0], rhs) and not multiplies_small(lhs[:, :0], rhs[:0])
    assert not multiplies_small(lhs[:2].double(), rhs.double())
    assert small_product(lhs[:2].to("meta"), rhs.to("meta"), torch.float32).shape == (2, 64)


def run(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x @ w and its gradient for x, as a program has them."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        rows, weight = popxl.variable(x), popxl.variable(w)
        graph = ir.create_graph(lambda a, b: ops.matmul(a, b), rows, weight)
        info = ops.call_with_info(graph, rows, weight)
        gradient = popxl.transforms.autodiff(graph)
        (dx, *_) = ops.call(
            gradient.graph, popxl.variable(dy), inputs_dict=gradient.inputs_dict(info)
        )
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in (info.outputs[0], dx)]
        for stream, t in zip(streams, (info.outputs[0], dx)):
            ops.host_store(stream, t)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    return found[streams[0]], found[streams[1]]


@pytest.mark.parametrize("left, right", [((12, 64), (64, 64)), ((4, 3, 8), (8, 16))])
def test_a_program_has_the_rows_and_gradients_of_its_batch_in_any_number(left, right):
    x, w = (t.numpy() for t in operands(left, right, torch.float32))
    dy = random(*left[:-1], right[-1], seed=5).numpy()
    whole = run(x, w, dy)
    parts = [run(x[i : i + 1], w, dy[i : i + 1]) for i in range(len(x))]
    for result, of_parts in zip(whole, zip(*parts)):
        np.testing.assert_array_equal(result, np.concatenate(of_parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "left, right", [((5, 801), (801, 19)), ((1, 33), (33, 129)), ((40, 9), (9, 3))]
)
def test_operands_alone_are_read_and_the_result_alone_is_written(left, right, dtype):
    for by_left in LAYOUTS.values():
        for by_right in LAYOUTS.values():
            lhs, rhs = operands(left, right, dtype)
            lhs, rhs, y, bias = (
                Surrounded(t)
                for t in (by_left(lhs), by_right(rhs), lhs.new_empty(left[0], right[1]), rhs[0] * 2)
            )
            plan = small_products._plan_of(lhs.copy, rhs.copy)
            pointers = [t.copy.data_ptr() for t in (lhs, rhs, bias, y)]
            native.function("multiply_small", dtype)(*pointers, plan.address, 1)
            y.give_back()
            assert torch.equal(y.given, small_product(lhs.given, rhs.given, dtype, bias.given))
            assert y.given.isfinite().all()


def attended(queries: int) -> torch.Tensor:
    """Attention of queries to as many keys, and its gradients."""
    q, k, v = (random(1, 2, queries, 16, seed=seed) for seed in range(3))
    mask, factors = torch.zeros(queries, queries), (None, 0.0)
    probs, y = attention(q, k.mT, v, mask, 0.3, *factors)
    attention_grad(y, q.mT, k, v.mT, probs, probs, 0.3, *factors)
    return y


@pytest.mark.parametrize(
    "work, is_small",
    [
        pytest.param(
            lambda: product(random(64, 64), random(64, 64), torch.float32), True, id="product"
        ),
        pytest.param(lambda: attended(16), True, id="attention"),
        pytest.param(
            lambda: product(random(512, 64), random(64, 64), torch.float32), False, id="more"
        ),
        pytest.param(lambda: attended(256), False, id="more attention"),
    ],
)
def test_what_is_small_takes_one_thread(work, is_small):
    """Each thread that begins one has others of its own: OpenMP starts them when it needs them."""

    def started() -> int:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            threads = set(os.listdir("/proc/self/task"))
            work()
            return len(set(os.listdir("/proc/self/task")) - threads)
        finally:
            torch.set_num_threads(before)

    with ThreadPoolExecutor(1) as pool:
        assert (pool.submit(started).result() == 0) == is_small

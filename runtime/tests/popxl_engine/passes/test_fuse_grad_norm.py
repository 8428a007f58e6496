"""Squares summed up where a product stores its gradient: exact numbers, and only those of the last
write.
"""

from collections.abc import Sequence
from typing import Any

import popxl
import pytest
import torch
from helpers.fused_programs import both_types, check, fused_steps, normal, observe
from helpers.matrices import NATIVE, matrix, random
from helpers.products import needs_tiles
from popxl import TensorByRef as Ref
from popxl import ops
from popxl.ops import var_updates
from popxl.tensor import Tensor
from popxl_engine.kernels.accumulate import accumulate_gemm_, accumulate_gemm_sumsq_
from popxl_engine.native import library as native

FUSED = "accumulate_gemm_sumsq"


# Numbers


@needs_tiles
@pytest.mark.parametrize("step", [2.0, 0.0])
@pytest.mark.parametrize(
    "rows, inner, columns",
    [
        *((1, 1, 1), (33, 70, 17), (64, 1025, 65)),
        *(
            pytest.param(*size, marks=pytest.mark.slow)
            for size in ((31, 2047, 40), (200, 3, 96), (700, 40, 900))
        ),
    ],
)
def test_squares_of_what_tiles_store_are_those_in_float64_for_any_threads(
    rows: int,
    inner: int,
    columns: int,
    step: float,
    threads: Any,
) -> None:
    lhs, rhs = matrix(rows, inner, True, 1), matrix(inner, columns, False, 2)
    before = random(rows, columns + 3) if step else torch.full((rows, columns + 3), float("nan"))
    alone = accumulate_gemm_(before.clone()[:, 1:-2], lhs, rhs, step)
    results = []
    for count in (1, 2, 3):
        threads(count)
        total = before.clone()[:, 1:-2]
        assert native.adds_product(total, lhs, rhs)
        stored, squares = accumulate_gemm_sumsq_(total, lhs, rhs, step)
        assert stored is total and torch.equal(total, alone)
        results.append(squares)
    exact = alone.double().square().sum()
    assert (results[0].double() - exact).abs() <= exact * 2**-23
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@needs_tiles
@pytest.mark.parametrize(
    "rows, inner, columns",
    [
        (40, 40, 64),
        (40, 1056, 64),
        (4160, 40, 1024),
        pytest.param(4160, 40, 1010, marks=pytest.mark.slow),
    ],
)
def test_a_total_that_passes_the_caches_where_it_may_is_the_same(
    rows: int,
    inner: int,
    columns: int,
    threads: Any,
) -> None:
    lhs, rhs = matrix(rows, inner, True, 1), matrix(inner, columns, False, 2)
    for step, before in (
        (0.0, torch.full((rows, columns + 3), float("nan"))),
        (1.0, random(rows, columns + 3)),
    ):
        # at addresses that must not
        alone = accumulate_gemm_(before.clone()[:, 1:-2], lhs, rhs, step)
        for count in (1, 2):
            threads(count)
            total, squares = accumulate_gemm_sumsq_(before[:, 1:-2].clone(), lhs, rhs, step)
            assert torch.equal(total, alone)
            exact = total.double().square().sum()
            assert (squares.double() - exact).abs() <= exact * 2**-23


@needs_tiles
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_squares_overflow_like_the_total_and_know_nothing_of_what_is_beside_it(
    value: float,
) -> None:
    lhs, rhs = matrix(40, 33, True, 1).abs(), matrix(33, 17, False, 2).abs()
    whole = torch.full((40, 64), float("nan"))
    _, squares = accumulate_gemm_sumsq_(whole[:, 3:20], lhs, rhs, 0.0)
    assert squares.isfinite()
    lhs[7, 5] = value  # times a zero that fills a tile up it is NaN
    _, squares = accumulate_gemm_sumsq_(whole[:, 3:20], lhs, rhs, 0.0)
    assert torch.equal(squares, torch.tensor(value).square()) or squares.isnan() and value != value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_of_products_that_tiles_do_not_take_are_those_of_the_result(
    dtype: torch.dtype,
) -> None:
    lhs, rhs = random(6, 40, dtype=dtype)[:, ::2], random(20, 5, dtype=dtype, seed=1)
    assert not native.adds_product(torch.zeros(6, 5), lhs, rhs)
    total, squares = accumulate_gemm_sumsq_(torch.zeros(6, 5), lhs, rhs, 0.0)
    assert torch.equal(total, accumulate_gemm_(torch.zeros(6, 5), lhs, rhs, 0.0))
    assert torch.equal(squares, NATIVE["sumsquare"](total, None, False))


# In programs


def norm(twist: str = "", dtype: popxl.dtype = popxl.float32, times: int = 1) -> Any:
    """A gradient's mean over runs of a loop, and the sum of its squares; with a twist that the rule
    must see.
    """
    wide = dtype if twist == "narrow" else popxl.float32

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x, dy = (popxl.variable(normal(5, n, seed=n), dtype, name=f"v{n}") for n in (6, 4))
        total, count = (
            popxl.variable(normal(6, 4), wide, name="total"),
            popxl.variable(2.0, name="count"),
        )

        def body(total: Ref, count: Ref, x: Tensor, dy: Tensor) -> list[Tensor]:
            var_updates.accumulate_mean_(total, x.T @ dy, count)
            more = [ops.sumsquare(total)] if twist == "in the loop" else []
            if twist == "two products":
                var_updates.accumulate_mean_(total, x.T @ dy, count)
            ops.add_(count, popxl.constant(1.0))
            return more

        first = [ops.sumsquare(total)] if twist in ("before", "both sides") else []
        graph = ir.create_graph(body, total, count, x, dy)
        if twist == "in the loop":
            return ops.call(graph, total, count, x, dy)
        ops.repeat(graph, times, total, count, x, dy)
        if twist == "written":
            ops.add_(total, popxl.constant(1.0))
        if twist == "written in a view":
            ops.add_(ops.slice_(total, 1, 2), popxl.constant(1.0))
        if twist == "written in a loop":
            ops.repeat(ir.create_graph(increase, total), 2, total)
        if twist == "before":
            return first
        of = {"a part": lambda: ops.slice_(total, 1, 5), "another": lambda: total * 2.0}.get(
            twist, lambda: total
        )()
        squares = {"an axis": {"axis": 0}, "kept axes": {"keepdims": True}}.get(twist, {})
        after = [ops.sumsquare(of, **squares)]
        if twist == "written afterwards":
            ops.add_(total, popxl.constant(1.0))
        if twist == "twice":
            after.append(ops.sumsquare(total))
        return [*first, *after]

    return build


def increase(t: Ref) -> list[Tensor]:
    ops.add_(t, popxl.constant(1.0, t.dtype))
    return []


@both_types
@pytest.mark.parametrize(
    "twist", ["", "both sides", "in the loop", "two products", "written afterwards", "twice"]
)
def test_squares_are_summed_up_by_the_last_product(twist: str, dtype: popxl.dtype) -> None:
    left = {"accumulate_gemm"} if twist == "two products" else set()
    assert check(norm(twist, dtype), dtype, runs=2) == {FUSED, *left}


@pytest.mark.parametrize(
    "twist",
    [
        "before",
        "written",
        "written in a view",
        "written in a loop",
        "a part",
        "another",
        "an axis",
        "kept axes",
    ],
)
def test_other_squares_stay(twist: str) -> None:
    assert check(norm(twist), popxl.float32, runs=2) == {"accumulate_gemm"}


@pytest.mark.parametrize("dtype", [popxl.bfloat16, popxl.float16])
@pytest.mark.parametrize("rounds", [False, True])
def test_squares_of_what_is_rounded_stay(rounds: bool, dtype: popxl.dtype) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        ir._pb_ir.getSessionOptions().enableStochasticRounding = rounds
        return norm("narrow", dtype)(ir)

    assert check(build, dtype) == {"accumulate_gemm"}


def test_squares_after_several_runs_of_a_loop_stay() -> None:
    assert check(norm(times=3), popxl.float32) == {"accumulate_gemm"}


def test_an_accumulator_may_be_a_view_that_is_written_later() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        whole, x = (
            popxl.variable(normal(6, 9), name="whole"),
            popxl.variable(normal(5, 6), name="x"),
        )
        part = ops.slice_(whole, 2, 6, axis=1)
        var_updates.accumulate_mean_(part, x.T @ x[:, :4], popxl.constant(1.0))
        squares = ops.sumsquare(part)
        ops.add_(ops.slice_(part, 1, 3), popxl.constant(1.0))
        return [squares, part * 1.0]

    assert check(build, popxl.float32, runs=2) == {FUSED}


def test_the_rule_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_PASSES", "-fuse_grad_norm")
    assert fused_steps(observe(norm(), False)[1]) == {"accumulate_gemm"}

"""Compiled kernels where vectors end: sizes that fill none, NaN all around, subnormal numbers, rows
alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.matrices import NATIVE, matrix, random
from helpers.products import needs_tiles
from helpers.surrounded import surrounded
from popxl_engine.kernels import attention
from popxl_engine.kernels.accumulate import accumulate_gemm_, accumulate_gemm_sumsq_
from popxl_engine.kernels.adamw import adamw_
from popxl_engine.kernels.gemm import gemm
from popxl_engine.kernels.linalg import few_rows
from popxl_engine.kernels.native import newton_schulz
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.native import library as native

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
both_types = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
COLUMNS = (1, 2, 15, 16, 17, 31, 33, 63, 65)
"""Columns beside vectors of 8 and 16 numbers, two of them, and four."""
SHAPES = [
    *((rows, columns) for rows in (1, 3) for columns in COLUMNS),
    *((0, 17), (511, 33), (513, 15), (4, 129), (2, 1031)),
]
SUBNORMAL = torch.tensor([2.0**-127, -(2.0**-130), 3 * 2.0**-133, -1.1e-38, 2.0**-126, -0.0])
"""Numbers of float32 and bfloat16, of which one is the smallest that is not subnormal."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers, of which each seventh is small."""
    t = random(*shape, dtype=dtype, seed=seed)
    small = t.view(-1)[seed % 7 :: 7]
    small.copy_(SUBNORMAL.repeat(len(small) // len(SUBNORMAL) + 1)[: len(small)])
    return t


def apart(t: torch.Tensor) -> torch.Tensor:
    """The same rows, with room between them."""
    return t.new_zeros(t.shape[0], t.shape[1] + 3)[:, : t.shape[1]].copy_(t)


def elementwise(dtype: torch.dtype, rows: int, columns: int) -> dict[str, tuple[Any, ...]]:
    """Calls of kernels whose results are element by element."""
    x, dy = (numbers(rows, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    return {
        "gelu": (x,),
        "gelu_grad": (dy, x),
        "relu2": (x,),
        "relu2_grad": (dy, x),
        "softcap": (x, 4.0),
        "softcap_grad": (dy, (x.float() / 4).tanh().mul(4).to(dtype), 4.0),
        "accumulate_mean_": (random(rows, columns, seed=3), x, 2.0),
    }


ROWS = {
    "swiglu": (0,),
    "swiglu_grad": (0, 1),
    "geglu": (0,),
    "geglu_grad": (0, 1),
    "rotary": (0, 1, 2),
    "layer_norm": (0,),
    "group_norm_grad": (0, 1),
    "rms_norm": (0,),
    "rms_norm_grad": (0, 1),
    "logsumexp_and_pick": (0, 1),
    "logsumexp_and_pick_grad": (0, 1, 2, 3, 4),
    "fused_softcap_logsumexp_and_pick": (0, 1),
    "fused_softcap_logsumexp_and_pick_grad": (0, 1, 2, 3, 4),
    "fused_cross_entropy_and_grad": (0, 1, 2, 3),
}
"""Operands of kernels that work row by row: which operands have rows. Of several results of norms
the first one has.
"""


def by_rows(dtype: torch.dtype, rows: int, columns: int) -> dict[str, tuple[Any, ...]]:
    x, dy = (numbers(rows, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    wide = numbers(rows, 2 * columns, dtype=dtype, seed=3)
    weight, bias = random(columns, seed=4), random(columns, seed=5)
    indices = torch.arange(rows, dtype=torch.int32) * 7 % (columns + 2) - 1  # some outside
    sums = KERNELS["logsumexp_and_pick"](x, indices)[0]
    bounded_sums = KERNELS["fused_softcap_logsumexp_and_pick"](x, indices, 4.0)[0]
    slopes = (random(rows), random(rows, seed=5))
    return {
        "swiglu": (wide,),
        "swiglu_grad": (dy, wide),
        "geglu": (wide,),
        "geglu_grad": (dy, wide),
        "rotary": (
            apart(wide),
            random(max(rows, 1), columns, dtype=dtype),
            random(max(rows, 1), columns, dtype=dtype, seed=1),
            False,
        ),
        "layer_norm": (x, weight, bias, 0.1),
        "group_norm_grad": (dy, x, weight, 1, 0.1),
        "rms_norm": (x, weight, 0.1),
        "rms_norm_grad": (dy, x, weight, 0.1),
        "logsumexp_and_pick": (apart(x), indices),
        "logsumexp_and_pick_grad": (*slopes, sums, apart(x), indices),
        "fused_softcap_logsumexp_and_pick": (apart(x), indices, 4.0),
        "fused_softcap_logsumexp_and_pick_grad": (*slopes, bounded_sums, apart(x), indices, 4.0),
        "fused_cross_entropy_and_grad": (*slopes, apart(x), indices, 4.0),
    }


def others(dtype: torch.dtype, rows: int, columns: int) -> dict[str, tuple[Any, ...]]:
    x = numbers(rows, columns, dtype=dtype, seed=1)
    positions = torch.arange(rows, dtype=torch.int32) % 5
    calls: dict[str, tuple[Any, ...]] = {
        "short_convolution": (x, random(3, columns, dtype=dtype), positions, columns % 4 == 3),
        "short_convolution_weight_grad": (random(rows, columns, dtype=dtype), x, positions, 3),
        "dropout": (x, torch.tensor([7, 11], dtype=torch.uint32), 0.3),
        "merge_moments": (random(rows, 3), random(1 + columns % 4, rows, 3, seed=1)),
        "sumsquare": (x, None, False),
        "sum_to": (x, (columns,), ()),
        "copy_var_update_": (x, numbers(rows, columns, dtype=dtype, seed=2)),
        "where": (torch.tensor(columns > 16), x, numbers(rows, columns, dtype=dtype, seed=2)),
    }
    if dtype == torch.float32 and rows <= 4 and columns < 129:
        calls["newton_schulz"] = (random(rows, columns, 34), COEFFICIENTS, 3, 1e-7)
    return calls


def every_call(dtype: torch.dtype, rows: int, columns: int) -> dict[str, tuple[Any, ...]]:
    return {
        name: call
        for made in (elementwise, by_rows, others)
        for name, call in made(dtype, rows, columns).items()
    }


def clones(call: Any) -> list[Any]:
    return [
        a.as_strided(a.shape, a.stride()).clone() if isinstance(a, torch.Tensor) else a
        for a in call
    ]


def results(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


def same(found: Any, expected: Any) -> bool:
    pairs = zip(results(found), results(expected), strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


def wider(call: Any, dtype: torch.dtype) -> list[Any]:
    return [
        a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in call
    ]


def assert_close(found: Any, expected: Any) -> None:
    for got, exact in zip(results(found), results(expected), strict=True):
        unit = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-8}[got.dtype]
        near = 2.0**-19 * max(1.0, exact.abs().max().item())  # of sums that cancel
        torch.testing.assert_close(got.double(), exact.double(), rtol=unit, atol=near)


def test_every_compiled_kernel_is_here() -> None:
    assert {*every_call(torch.float32, 3, 5), "adamw_8bit_", "attention"} == set(NATIVE)


@both_types
def test_kernels_read_and_write_their_operands_alone(dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        for name, call in every_call(dtype, rows, columns).items():
            expected = KERNELS[name](*wider(call, torch.float64))
            plain = NATIVE[name](*clones(call))
            with surrounded():
                found = NATIVE[name](*clones(call))
            assert same(found, plain), (name, rows, columns)
            if rows:
                assert_close(found, expected)


@both_types
def test_an_elements_bits_do_not_depend_on_its_place(dtype: torch.dtype) -> None:
    for name, call in elementwise(dtype, 3, 65).items():
        flat = [a.reshape(-1) if isinstance(a, torch.Tensor) else a for a in call]
        whole = NATIVE[name](*clones(flat))
        for part in (slice(0, 1), slice(1, 32), slice(1, 34), slice(17, 195), slice(130, 193)):
            given = [a[part] if isinstance(a, torch.Tensor) else a for a in flat]
            assert same(NATIVE[name](*clones(given)), whole[part]), (name, part)


@both_types
def test_a_row_has_the_same_bits_whichever_rows_are_beside_it(dtype: torch.dtype) -> None:
    for rows, columns in ((9, 1), (9, 33), (9, 95), (33, 1031)):
        for name, call in by_rows(dtype, rows, columns).items():
            whole = results(NATIVE[name](*clones(call)))
            kept = slice(1) if name.endswith("norm_grad") else slice(None)
            for part in (slice(0, 1), slice(1, 6), slice(3, 7), slice(8, 9)):
                given = [a[part] if i in ROWS[name] else a for i, a in enumerate(call)]
                found = results(NATIVE[name](*clones(given)))
                assert same(found[kept], tuple(t[part] for t in whole[kept])), (name, part)


ROUNDED_ONCE = (
    "relu2",
    "relu2_grad",
    "softcap",
    "softcap_grad",
    "rotary",
    "short_convolution",
    "layer_norm",
    "rms_norm",
    "dropout",
)
"""What they compute does not depend on the type of operands."""


def rounded(wide: torch.Tensor) -> torch.Tensor:
    """float32 as the library rounds it to bfloat16: where the CPU has an instruction for that, it
    makes zero of what is below 2**-126.
    """
    vector = torch.full((64,), 2.0**-127, dtype=torch.bfloat16)
    seed = torch.tensor([7, 11], dtype=torch.uint32)
    if not NATIVE["dropout"](vector, seed, 0.0).any():
        wide = torch.where(wide.abs() < 2.0**-126, wide * 0, wide)
    return wide.to(torch.bfloat16)


def test_results_in_bfloat16_are_those_in_float32_rounded_wherever_they_are() -> None:
    for rows, columns in SHAPES:
        for name in ROUNDED_ONCE:
            call = every_call(torch.bfloat16, rows, columns)[name]
            found, wide = (
                results(NATIVE[name](*given))[0]
                for given in (clones(call), wider(clones(call), torch.float32))
            )
            assert same(found, rounded(wide)), (name, rows, columns)


# AdamW


def states(count: int, dtype: torch.dtype, moments: torch.dtype) -> list[torch.Tensor]:
    """Weight, gradient and moments."""
    weight, gradient = numbers(count, dtype=dtype), numbers(count, dtype=dtype, seed=1)
    first, second = numbers(count, dtype=moments, seed=2), numbers(count, dtype=moments, seed=3)
    return [weight, gradient, first, second.abs()]


def update(state: list[torch.Tensor], lr: float = 1e-2) -> list[torch.Tensor]:
    """The state after a step of AdamW."""
    weight, gradient, first, second = (t.clone() for t in state)
    adamw_(weight, gradient, None, first, second, torch.tensor(3.0), -lr, 0.9, 0.99, 1e-6, 0.1)
    return [weight, first, second]


def pairs_of_types() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    for weight in (*TYPES.values(), torch.float16):
        for moments in (*TYPES.values(), torch.float16):
            yield weight, moments


def test_adamw_works_on_its_operands_alone_and_element_by_element() -> None:
    for weight, moments in pairs_of_types():
        state = states(2051, weight, moments)
        whole = update(state)
        for part in (*(slice(5, 5 + count) for count in COLUMNS), slice(3, 2051)):
            given = [t[part] for t in state]
            with surrounded():
                found = update(given)
            assert same(tuple(found), tuple(t[part] for t in whole)), (weight, moments, part)


def test_a_weight_that_nothing_changes_stays_as_it_is() -> None:
    for weight, moments in pairs_of_types():
        state = states(100, weight, moments)
        change = update(state, lr=0.0)[0].double() - state[0].double()
        assert change.abs().max() < 2.0**-126, (weight, moments)


@both_types
def test_adamw_in_8_bits_works_on_its_operands_alone(dtype: torch.dtype) -> None:
    for count in (*COLUMNS, 1025):
        weight, gradient = numbers(count, dtype=dtype), numbers(count, dtype=dtype, seed=1)
        coded = [torch.arange(count + -(-count // 32)).mul(n).to(torch.uint8) for n in (37, 53)]
        for moment in coded:
            moment[count:] = 120
        rest = (torch.tensor(3.0), 1e-2, 0.9, 0.99, 1e-6, 0.1, 0.5, None)
        plain = clones((weight, gradient, *coded, *rest))
        found = clones((weight, gradient, *coded, *rest))
        NATIVE["adamw_8bit_"](*plain)
        with surrounded():
            NATIVE["adamw_8bit_"](*found)
        assert all(torch.equal(a, b) for a, b in zip(found[2:4], plain[2:4]))
        assert same(found[0], plain[0])


# Products


@both_types
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_few_rows_read_and_write_their_operands_alone(
    is_transposed: bool, dtype: torch.dtype
) -> None:
    for inner in (1, 2, 31, 33, 65, 385):
        for columns in (1, 15, 33, 65, 130):
            for rows in (1, 3, 8):
                x = apart(numbers(rows, inner, dtype=dtype))
                w = random(*((columns, inner) if is_transposed else (inner, columns)), dtype=dtype)
                w, bias = apart(w), random(columns, dtype=dtype, seed=1)
                w = w.t() if is_transposed else w
                with surrounded():
                    found = few_rows(x, w, bias)
                assert same(found, torch.cat([few_rows(row[None], w, bias) for row in x]))
                exact = x.double() @ w.double() + bias.double()
                unit = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
                assert ((found - exact).abs() <= unit * exact.abs() + 1e-6 * inner).all()


SIZES = [(1, 1, 1), (3, 2, 31), (33, 31, 15), (32, 64, 96), (64, 33, 65), (63, 1057, 34)]
"""Rows, terms of the sums, and columns of a product by tiles."""


def spread(t: torch.Tensor) -> torch.Tensor:
    """A matrix with gaps between the lines that lie side by side."""
    return apart(t) if t.stride(1) == 1 else apart(t.t()).t()


@needs_tiles
@pytest.mark.parametrize("is_rhs_transposed", [False, True])
@pytest.mark.parametrize("is_lhs_transposed", [False, True])
def test_products_by_tiles_read_and_write_their_operands_alone(
    is_lhs_transposed: bool, is_rhs_transposed: bool
) -> None:
    for rows, inner, columns in SIZES:
        lhs = spread(matrix(rows, inner, is_lhs_transposed, 1))
        rhs = spread(matrix(inner, columns, is_rhs_transposed, 2))
        bias, total = random(columns, dtype=torch.bfloat16), apart(random(rows, columns))
        assert native.multiplies(lhs, rhs)
        with surrounded():
            y = gemm(lhs, rhs, bias)
            sums, squares = accumulate_gemm_sumsq_(total.clone(), lhs, rhs, 2.0)
        assert same(accumulate_gemm_(total.clone(), lhs, rhs, 2.0), sums)
        exact = lhs.double() @ rhs.double()
        close: Callable[..., None] = torch.testing.assert_close
        close(y.double(), exact + bias.double(), rtol=2.0**-8, atol=1e-5 * inner)
        close(sums.double(), total.double() * 2 / 3 + exact / 3, rtol=1e-5, atol=1e-6 * inner)
        close(squares.double(), sums.double().square().sum(), rtol=1e-5, atol=0)
        for part in (slice(0, 1), slice(rows // 2, rows)):
            assert same(gemm(lhs[part], rhs, bias), y[part])


@needs_tiles
def test_a_product_that_is_its_bias_is_rounded_as_everything_else() -> None:
    lhs, bias = torch.zeros(33, 64, dtype=torch.bfloat16), numbers(65, dtype=torch.bfloat16)
    for is_transposed in (False, True):
        rhs = matrix(64, 65, is_transposed, 2)
        for found in (gemm(lhs, rhs, bias), few_rows(lhs[:3], rhs, bias)):
            assert same(found, rounded(bias + 0.0).expand(found.shape))


def iterated(t: torch.Tensor, coefficients: tuple[float, ...], steps: int) -> torch.Tensor:
    """Newton-Schulz of a matrix in float64, rounded to bfloat16 where the library does."""
    a, b, c = coefficients

    def kept(t: torch.Tensor) -> torch.Tensor:
        return t.to(torch.bfloat16).double()

    x = t.double() if t.shape[0] <= t.shape[1] else t.double().t()
    x = kept(x / (x.norm() + 1e-7))
    for _ in range(steps):
        square = kept(x @ x.t())
        x = kept(kept(c * square @ square + b * square) @ x + a * x)
    return x if t.shape[0] <= t.shape[1] else x.t()


@needs_tiles
def test_newton_schulz_by_tiles_reads_and_writes_its_operands_alone(
    threads: Callable[[int], None],
) -> None:
    threads(2)
    for rows, columns in ((1, 1), (5, 3), (3, 40), (31, 33), (65, 64), (97, 200), (290, 130)):
        t = random(3, rows, columns, dtype=torch.bfloat16)
        t[0, 0, 0] = torch.nan  # of the next ones nothing is
        for steps in (1, 3):  # each multiplies by 3.4 what rounding changes
            with surrounded():
                found = newton_schulz(t, COEFFICIENTS, steps, 1e-7)
            assert found[0].isnan().all()
            for own, matrix_alone in zip(found[1:], t[1:]):
                exact = iterated(matrix_alone, COEFFICIENTS, steps)
                assert (own - exact).norm() < 2.0**-9 * exact.norm()
                assert same(newton_schulz(matrix_alone, COEFFICIENTS, steps, 1e-7), own)
            threads(1)
            strided = t[1:].mT.contiguous().mT
            assert same(newton_schulz(strided, COEFFICIENTS, steps, 1e-7), found[1:])
            threads(2)


# Attention


def masks(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """None hidden, later keys, and keys here and there with queries that see none.

    Of more queries than keys the last see all keys, and none sees nothing: in such products with
    NaN of the first query oneDNN's AMX makes NaN of another key, too.
    """
    causal = torch.full((queries, keys), -torch.inf).triu(max(0, keys - queries) + 1)
    few = torch.where(random(queries, keys) > 0, -torch.inf, 0.0)
    few[queries // 2] = -torch.inf
    return [t.to(dtype) for t in (torch.zeros(queries, keys), causal, few)]


@both_types
def test_attention_reads_and_writes_its_operands_alone(dtype: torch.dtype) -> None:
    seed = torch.tensor([7, 11], dtype=torch.uint32)
    for b, h, q, k, d in (
        (1, 1, 1, 2, 1),
        (1, 1, 5, 8, 3),
        (2, 1, 33, 34, 17),
        (1, 2, 31, 66, 33),
        (1, 1, 39, 44, 8),
        (1, 1, 59, 62, 8),
        (1, 1, 65, 64, 64),
    ):
        query, key, value, dy = (
            random(b, n, h, d + 3, dtype=dtype, scale=1, seed=seed)[..., :d].transpose(1, 2)
            for seed, n in enumerate((q, k, k, q))
        )
        for mask in masks(q, k, dtype):
            for p in (0.0, 0.3):
                given = query, key.transpose(2, 3), value, mask, d**-0.5, seed if p else None, p
                with surrounded():
                    *probs, y = attention.attention(*given)
                    grads = gradients(dy, given, probs)
                exact = attention.attention(*wider(given, torch.float64))
                assert_near((*probs, y), exact)
                in_double = wider(given, torch.float64)
                assert_near(grads, gradients(dy.double(), in_double, exact[:-1]))
                assert same((*probs, y), attention.attention(*given))
                assert same(attention.attention_no_probs(*given), y)
                if not p:
                    part = slice(q // 2, q)
                    alone = (query[:, :, part], *given[1:3], mask[part], *given[4:])
                    assert same(attention.attention(*alone), (probs[0][:, :, part], y[:, :, part]))


def gradients(dy: torch.Tensor, given: Any, probs: Any) -> tuple[torch.Tensor, ...]:
    query, key_t, value, mask, scale, seed, p = given
    return attention.attention_grad(
        dy, query.transpose(2, 3), key_t.transpose(2, 3), value.transpose(2, 3),
        probs[0], probs[-1], scale, seed, p,
    )  # fmt: skip


def assert_near(found: Any, expected: Any) -> None:
    for got, exact in zip(found, expected, strict=True):
        unit = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), exact, rtol=unit, atol=unit, equal_nan=True)


@both_types
def test_attention_of_few_queries_reads_and_writes_its_operands_alone(dtype: torch.dtype) -> None:
    for b, h, q, k, d in ((1, 1, 1, 1, 1), (2, 3, 2, 17, 31), (1, 2, 8, 33, 65)):
        query, key, value = (
            random(b, n, h, d + 3, dtype=dtype, scale=1, seed=seed)[..., :d].transpose(1, 2)
            for seed, n in enumerate((q, k, k))
        )
        for mask in masks(q, k, dtype):
            given = query, key.transpose(2, 3), value, mask[None, None], d**-0.5, None, 0.0
            with surrounded():
                found = NATIVE["attention"](*given)
            assert_near(found, KERNELS["attention"](*wider(given, torch.float64)))

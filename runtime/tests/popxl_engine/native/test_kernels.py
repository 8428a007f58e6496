"""The compiled kernels: the plain ones' numbers, and the same bits for any threads and place."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.matrices import NATIVE, matrix, random
from helpers.products import needs_tiles
from helpers.quick import cases
from popxl.generator import draws as host_draws
from popxl.moments import FIRST, SECOND
from popxl_engine.kernels import generator
from popxl_engine.kernels.accumulate import accumulate_gemm_
from popxl_engine.kernels.adamw import adamw_
from popxl_engine.kernels.registry import KERNELS, OVERWRITES
from popxl_engine.kernels.rounding import Noise, Updates, round_to
from popxl_engine.native import library as native

COEFFICIENTS = 3.4445, -4.7750, 2.0315
TOLERANCES = {"newton_schulz": {"rtol": 0.0, "atol": 1e-5}}
"""Tolerances of float32, where not two units in the last place: each step multiplies what rounding
adds.
"""
SPECIAL = [
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    88.0,
    -88.0,
    3e38,
    -3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]

needs_compiler = pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: the plain kernels run"
)
both_types = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def with_special(t: torch.Tensor) -> torch.Tensor:
    flat = t.reshape(-1)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL[: flat.numel()]).to(t.dtype)
    return t


def with_rows_that_overflow(t: torch.Tensor) -> torch.Tensor:
    t[1, 0], t[2, 33], t[-1, -1] = float("inf"), float("-inf"), float("nan")
    return t


def gated(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Gates, large ones among them, and values."""
    gate = random(rows, columns, scale=30)
    return torch.cat([gate, random(rows, columns, seed=2)], 1).to(dtype)


def eight_bit_update(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """A step of weights whose moments are in 8 bits."""
    gradients = random(*shape, seed=1)
    first, second = (
        torch.from_numpy(form.encode(moment.reshape(-1).numpy()))
        for form, moment in ((FIRST, gradients / 10), (SECOND, gradients.square() / 100))
    )
    state = random(*shape, dtype=dtype), gradients.to(dtype), first, second
    return *state, torch.tensor(3.0), 1e-2, 0.9, 0.99, 1e-6, 0.1, 0.5, None


def some_positions(count: int) -> torch.Tensor:
    """Positions of sequences of 40."""
    return torch.arange(count, dtype=torch.int32) % 40


def operands(dtype: torch.dtype) -> dict[str, list[tuple[Any, ...]]]:
    """Calls of each kernel: small, empty, uneven, longer than a piece, with special numbers."""
    shapes = [(5,), (0,), (1,), (3, 7), (2, 33, 1031)]
    calls: dict[str, list[tuple[Any, ...]]] = {
        "gelu": [(with_special(random(*s, dtype=dtype)),) for s in shapes],
        "gelu_grad": [(random(*s, dtype=dtype, seed=1), random(*s, dtype=dtype)) for s in shapes],
        "relu2": [(random(*s, dtype=dtype),) for s in shapes]
        + [(torch.tensor([x for x in SPECIAL if x != 3e38]).to(dtype),)],
        "relu2_grad": [(random(*s, dtype=dtype, seed=1), random(*s, dtype=dtype)) for s in shapes],
        "softcap": [
            (with_special(random(*s, dtype=dtype, scale=scale)), cap)
            for s in shapes
            for scale, cap in ((1.0, 15.0), (30.0, 4.0), (0.01, 0.5))
        ],
        "softcap_grad": [
            (random(*s, dtype=dtype, seed=1), (random(*s) / 5).tanh().mul(4.0).to(dtype), 4.0)
            for s in shapes
        ],
        "newton_schulz": [
            (matrices, COEFFICIENTS, steps, 1e-7)
            for matrices, steps in (
                (random(1, 1), 1),
                (random(5, 3), 5),
                (random(0, 4), 5),
                (random(2, 33, 130), 2),
                (random(3, 65, 64), 5),
                (random(2, 200, 97), 5),
                (torch.zeros(70, 70), 5),
                (with_special(random(2, 64, 70)), 5),
            )
            if dtype == torch.float32
        ],
        **{
            name: [(gated(*s, dtype),) for s in ((1, 1), (3, 4), (0, 4), (67, 1031))]
            for name in ("swiglu", "geglu")
        },
        **{
            name: [
                (random(*s, dtype=dtype, seed=1), gated(*s, dtype))
                for s in ((1, 1), (3, 4), (0, 4), (67, 1031))
            ]
            for name in ("swiglu_grad", "geglu_grad")
        },
        "rotary": [
            (x, random(s, p, dtype=dtype), random(s, p, dtype=dtype, seed=1), inverse, size)
            for x, s, p, inverse, size in (
                (random(3, 2, dtype=dtype), 3, 1, False, None),
                (random(12, 210, dtype=dtype), 4, 35, False, None),
                (random(12, 210, dtype=dtype), 4, 33, False, 105),
                (random(12, 210, dtype=dtype)[:, :140], 6, 35, True, None),
                (random(12, 210, dtype=dtype)[:, :140], 6, 3, True, 35),
                (random(0, 8, dtype=dtype), 1, 2, True, None),
            )
        ],
        "short_convolution": [
            (
                random(*s, dtype=dtype),
                random(k, s[1], dtype=dtype, scale=0.1),
                some_positions(s[0]),
                t,
            )
            for s in ((1, 1), (3, 4), (0, 4), (67, 1031), (300, 70))
            for k in (1, 3, 7)
            for t in (False, True)
        ],
        "short_convolution_weight_grad": [
            (
                random(*s, dtype=dtype, seed=1, scale=0.1),
                random(*s, dtype=dtype, scale=0.1),
                some_positions(s[0]),
                k,
            )
            for s in ((1, 1), (3, 4), (0, 4), (67, 1031), (300, 70))
            for k in (1, 3, 7)
        ],
        "accumulate_mean_": [
            (random(*s), random(*s, dtype=dtype, seed=1), step)
            for s in shapes
            for step in (0.0, 2.0, torch.tensor(3.0), np.float32(1))
        ],
        "where": [
            (torch.tensor(condition), random(*s, dtype=dtype), rhs)
            for s in shapes
            for condition in (True, False, [0.5], [0.0])
            for rhs in (random(*s, dtype=dtype, seed=1), torch.tensor(-0.0, dtype=dtype))
        ],
        "dropout": [
            (with_special(random(*s, dtype=dtype)), torch.tensor([7, 11], dtype=torch.uint32), p)
            for s in shapes
            for p in (0.0, 0.1, 0.75)
        ]
        + [
            (
                random(6, 33, 1031, dtype=dtype),
                torch.tensor([[7, 11], [7, 12], [0, 1]], dtype=torch.uint32),
                0.1,
            )
        ],
        "sumsquare": [(random(*s, dtype=dtype), None, False) for s in shapes],
        "sum_to": [
            (random(rows, columns, dtype=dtype).abs(), (columns,), ())
            for rows, columns in ((1, 1), (3, 7), (35, 1031), (129, 640), (4, 0), (0, 4))
        ]
        + [(random(5, 7, dtype=dtype), (1, 7), ()), (random(5, 7, dtype=dtype), (5,), (1,))]
        + [(random(7, 7, dtype=dtype), (7,), (axis,)) for axis in (0, 1)],
        "layer_norm": [
            (x, random(x.shape[1], dtype=dtype), random(x.shape[1], dtype=dtype, seed=1), 1e-5)
            for x in (
                *(random(*s, dtype=dtype) for s in ((1, 1), (3, 8), (0, 8), (67, 1031), (2, 3, 4))),
                with_rows_that_overflow(random(9, 70, dtype=dtype)),
                random(4, 200, dtype=dtype, scale=0.1) + 30,
            )
        ],
        "rms_norm": [
            (x, random(x.shape[1], dtype=dtype), 1e-5, offset)
            for x in (random(*s, dtype=dtype) for s in ((1, 1), (3, 8), (0, 8), (67, 1031)))
            for offset in (0.0, 1.0)
        ],
        "rms_norm_grad": [
            (
                random(*s, dtype=dtype, seed=1, scale=0.1),
                random(*s, dtype=dtype),
                random(s[1], dtype=dtype),
                1e-5,
                offset,
            )
            for s in ((1, 1), (3, 8), (0, 8), (67, 1031))
            for offset in (0.0, 1.0)
        ],
        "merge_moments": [
            (random(rows, 3), random(size, rows, 3, seed=1))  # float32, as moments are
            for rows in (0, 1, 67)
            for size in (1, 2, 5)
        ],
        "group_norm_grad": [
            (
                random(*s, dtype=dtype, seed=1, scale=0.1),
                random(*s, dtype=dtype),
                random(s[1], dtype=dtype),
                1,
                1e-5,
            )
            for s in ((1, 1), (3, 8), (67, 1031))
        ]
        + [
            (
                random(9, 70, dtype=dtype),
                with_rows_that_overflow(random(9, 70, dtype=dtype)),
                random(70),
                1,
                1e-5,
            )
        ],
        "attention": [
            (
                random(b, q, h, w, dtype=dtype, scale=1, seed=1).transpose(1, 2),
                random(b, h, k, w, dtype=dtype, scale=1, seed=2).transpose(2, 3),
                random(b, h, k, w, dtype=dtype, scale=1, seed=3),
                random(b, 1, q, k, dtype=dtype, seed=4),
                w**-0.5,
                None,
                0.0,
            )
            for b, h, q, k, w in ((1, 12, 1, 80, 64), (2, 3, 4, 37, 20), (3, 2, 8, 70, 33))
        ],
        "adamw_8bit_": [eight_bit_update(s, dtype) for s in shapes],
        "copy_var_update_": [
            (random(*s, dtype=dtype), random(*s, dtype=dtype, seed=1)) for s in shapes
        ],
        "logsumexp_and_pick": [],
        "logsumexp_and_pick_grad": [],
        "fused_softcap_logsumexp_and_pick": [],
        "fused_softcap_logsumexp_and_pick_grad": [],
        "fused_cross_entropy_and_grad": [],
    }
    for rows, classes in ((1, 1), (4, 9), (3, 20011), (2000, 17)):
        logits = random(rows, classes, dtype=dtype)
        logits[0] = float("-inf")
        logits[-1, 0] = 1e4
        if rows > 3:
            logits[1, classes // 2], logits[2, -1] = float("nan"), float("inf")
        indices = torch.arange(rows, dtype=torch.int32) * 7 % (classes + 2) - 1  # some outside
        for name, cap in (("logsumexp_and_pick", ()), ("fused_softcap_logsumexp_and_pick", (9.0,))):
            calls[name].append((logits, indices, *cap))
            total = KERNELS[name](logits, indices, *cap)[0]
            gradients = (random(rows), random(rows, seed=5))
            calls[f"{name}_grad"].append((*gradients, total, logits, indices, *cap))
            both = (*gradients, logits, indices, *(cap or (None,)))
            calls["fused_cross_entropy_and_grad"].append(both)
    return calls


@pytest.mark.quick_every(2)
@needs_compiler
@both_types
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_a_compiled_kernel_gives_the_plain_kernels_numbers(name: str, dtype: torch.dtype) -> None:
    for call in operands(dtype)[name]:
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in call]
        found, expected = NATIVE[name](*copies), in_double(KERNELS[name], call)
        tolerance = (
            {"rtol": 1e-2, "atol": 1e-3}
            if dtype == torch.bfloat16
            else TOLERANCES.get(name, {"rtol": 2e-6, "atol": 1e-6})
        )
        torch.testing.assert_close(found, expected, **tolerance, equal_nan=True, check_dtype=False)


@needs_compiler
@both_types
@pytest.mark.parametrize(
    "name", sorted(name for name, kernel in NATIVE.items() if kernel in OVERWRITES)
)
def test_a_result_in_the_place_of_an_operand_has_the_bits_of_one_apart(
    name: str, dtype: torch.dtype
) -> None:
    place = list(inspect.signature(NATIVE[name]).parameters).index(OVERWRITES[NATIVE[name]])
    for call in operands(dtype)[name]:
        given = clones(call)
        found, expected = NATIVE[name](*given, into=given[place]), NATIVE[name](*call)
        if isinstance(found, torch.Tensor):
            found, expected = (found,), (expected,)
        assert any(result is given[place] for result in found)
        assert all(map(same, found, expected))


@needs_compiler
@pytest.mark.parametrize("kernels", [NATIVE, KERNELS], ids=["compiled", "plain"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_merged_moments_are_numpys_of_one_slice_after_another_bit_by_bit(
    size: int, kernels: dict[str, Any]
) -> None:
    for rows in (1, 2, 5, 131):
        factors = torch.logspace(-3, 3, rows)[:, None]
        own, slices = random(rows, 3) * factors, random(size, rows, 3, seed=1) * factors
        count = np.float32(size)
        means, rests, variances = slices.numpy().transpose(2, 0, 1)
        mean = sum(means) / count
        deviations = [m - mean + r for m, r in zip(means, rests)]
        rest = sum(deviations) / count
        variance = sum(v + (d - rest) * (d - rest) for v, d in zip(variances, deviations)) / count
        shift, found = kernels["merge_moments"](own, slices)
        assert (shift[:, 0].numpy() == own[:, 0].numpy() - mean - rest).all()
        assert (found[:, 0].numpy() == variance).all()


@needs_compiler
@pytest.mark.parametrize("kernels", [NATIVE, KERNELS], ids=["compiled", "plain"])
def test_a_convolution_reads_nothing_of_other_sequences(kernels: dict[str, Any]) -> None:
    x, weight = random(6, 40), random(3, 40)
    positions = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    for spoiled in (slice(0, 3), slice(3, 6)):
        bad = x.clone()
        bad[spoiled] = float("nan")
        kept = [r for r in range(6) if not spoiled.start <= r < spoiled.stop]
        for transposed in (False, True):
            convolved = kernels["short_convolution"]
            found, expected = (convolved(t, weight, positions, transposed) for t in (bad, x))
            assert torch.equal(found[kept], expected[kept])
    before = x.clone()
    before[2] = float("nan")  # what is never before another
    gradient = kernels["short_convolution_weight_grad"]
    found, expected = (gradient(x, t, positions, 3) for t in (before, x))
    assert torch.equal(found, expected)


@needs_compiler
def test_a_bound_within_the_loss_gives_the_bits_of_one_before_it() -> None:
    logits, cap = random(64, 1000, scale=20), 15.0
    indices = torch.arange(64, dtype=torch.int32) * 17 - 1  # the first and some last are outside
    d, e = random(64, seed=1), random(64, seed=2)
    bounded = NATIVE["softcap"](logits, cap)
    apart = NATIVE["logsumexp_and_pick"](bounded, indices)
    within = NATIVE["fused_softcap_logsumexp_and_pick"](logits, indices, cap)
    assert all(map(same, within, apart))
    gradient = NATIVE["logsumexp_and_pick_grad"](d, e, apart[0], bounded, indices)
    gradient = NATIVE["softcap_grad"](gradient, bounded, cap)
    name = "fused_softcap_logsumexp_and_pick_grad"
    assert same(NATIVE[name](d, e, within[0], logits, indices, cap), gradient)


@pytest.mark.parametrize(
    "condition, left, right",
    [((3, 7), (3, 7), (3, 7)), ((1, 1), (7,), (7,)), ((1,), (7, 1), (1, 7)), ((1,), (1,), (1, 1))],
)
def test_a_choice_that_is_not_in_the_place_of_an_operand_is_torchs(
    condition: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    chosen, lhs, rhs = random(*condition) > 0, random(*left), random(*right, seed=1)
    expected = torch.where(chosen, lhs, rhs)
    assert same(NATIVE["where"](chosen, lhs.clone(), rhs, into=lhs), expected)


@needs_compiler
@both_types
def test_rows_of_logits_that_do_not_follow_one_another_are_read_and_written_alone(
    dtype: torch.dtype,
) -> None:
    for call in operands(dtype)["logsumexp_and_pick_grad"]:
        logits, indices = call[3:]
        rows, classes = logits.shape
        whole = torch.full((rows, classes + 3), float("nan"), dtype=dtype)
        apart = whole[:, :classes]
        apart.copy_(logits)
        assert same(
            NATIVE["logsumexp_and_pick"](apart, indices),
            NATIVE["logsumexp_and_pick"](logits, indices),
        )
        expected = NATIVE["logsumexp_and_pick_grad"](*call)
        assert same(NATIVE["logsumexp_and_pick_grad"](*call[:3], apart, indices), expected)
        assert NATIVE["logsumexp_and_pick_grad"](*call[:3], apart, indices, into=apart) is apart
        assert same(apart.contiguous(), expected) and whole[:, classes:].isnan().all()


@needs_compiler
@both_types
def test_gelu_far_from_zero_is_zero_or_its_operand_and_its_slope_zero_or_one(
    dtype: torch.dtype,
) -> None:
    far = torch.tensor([10.0, 11.0, 1e4, 1e13, 1e20, 3e38, float("inf")]).to(dtype)
    ones = torch.ones_like(far)
    assert torch.equal(NATIVE["gelu_grad"](ones, far), ones)
    assert NATIVE["gelu_grad"](ones, -far).abs().max() < 1e-34  # that of -9.9 or -10
    assert torch.equal(NATIVE["gelu"](far), far)
    assert NATIVE["gelu"](-far[1:-1]).abs().max() == 0


@needs_compiler
def test_softcap_is_exact_to_five_units_in_the_last_place_near_zero_and_far_from_it() -> None:
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.logspace(-30, 1, 10_001)])
    found, exact = NATIVE["softcap"](x, 1.0), x.double().tanh()
    nearest = exact.float().abs()
    units = torch.nextafter(nearest, torch.tensor(2.0)) - nearest
    assert ((found - exact).abs() <= 5 * units).all()


@needs_compiler
@pytest.mark.parametrize("rows, columns", [(500, 203), (40, 65536)])
def test_layer_norm_of_equal_numbers_is_its_bias_however_small_epsilon_is(
    rows: int, columns: int
) -> None:
    equal = torch.linspace(1e5, 2e5, rows)[:, None].expand(rows, columns).contiguous()
    weight, bias = torch.ones(columns), random(columns)
    result = NATIVE["layer_norm"](equal, weight, bias, 1e-12)
    torch.testing.assert_close(result, bias.expand(rows, columns), rtol=0, atol=1e-2)


@needs_compiler
@both_types
@pytest.mark.parametrize("name, groups", [("group_norm_grad", (1,)), ("rms_norm_grad", ())])
def test_gradients_of_norms_of_huge_rows_are_those_in_float64(
    name: str, groups: tuple[int, ...], dtype: torch.dtype
) -> None:
    dy, rows = random(9, 200, dtype=dtype), random(9, 200, seed=1).mul(1e15).to(dtype)
    call = dy, rows, random(200, seed=2), *groups, 1e-5
    for found, exact in zip(NATIVE[name](*call), in_double(KERNELS[name], call), strict=True):
        size = exact.abs().max()
        torch.testing.assert_close(
            found / size, exact / size, rtol=1e-2, atol=1e-3, check_dtype=False
        )


@pytest.mark.quick_every(3)
@both_types
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_operands_that_the_library_does_not_take_go_to_the_plain_kernel(
    name: str, dtype: torch.dtype
) -> None:
    for call in operands(dtype)[name]:
        wide = [
            a.to(torch.float64) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in call
        ]
        assert same(NATIVE[name](*clones(wide)), KERNELS[name](*clones(wide)))
    x, y = random(8, 6, dtype=dtype), random(6, 8, dtype=dtype)
    torch.testing.assert_close(NATIVE["gelu"](x.t()), NATIVE["gelu"](x).t())
    torch.testing.assert_close(
        NATIVE["gelu_grad"](y, x.t()),
        NATIVE["gelu_grad"](y, x.t().contiguous()),
        rtol=2e-2,
        atol=1e-3,
    )


def in_double(kernel: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    """The plain kernel's result in float64."""
    return kernel(
        *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in call)
    )


def clones(call: Any) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in call]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b))
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.quick_every(3)
@needs_compiler
@pytest.mark.parametrize(
    "dtype",
    cases(
        [torch.float32, torch.bfloat16],
        lambda dtype: dtype is torch.float32,
        ["float32", "bfloat16"],
    ),
)
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_the_number_of_threads_does_not_change_a_bit(
    name: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    for call in operands(dtype)[name]:
        results = []
        for count in (1, 2, 3):
            threads(count)
            results.append(NATIVE[name](*clones(call)))
        assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.quick_every(3)
@needs_compiler
@both_types
@pytest.mark.parametrize("name", sorted(NATIVE))
def test_where_operands_lie_does_not_change_a_bit(name: str, dtype: torch.dtype) -> None:
    def moved(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        extent = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride()))
        room = torch.empty(max(0, extent) + 1, dtype=t.dtype)
        return room.as_strided(t.shape, t.stride(), 1).copy_(t)

    for call in operands(dtype)[name]:
        assert same(NATIVE[name](*clones(call)), NATIVE[name](*map(moved, call)))


@needs_compiler
def test_the_default_type_of_torch_does_not_change_a_bit() -> None:
    calls = operands(torch.float32)
    expected = {name: [NATIVE[name](*clones(call)) for call in calls[name]] for name in NATIVE}
    torch.set_default_dtype(torch.float64)
    try:
        for name in NATIVE:
            found = [NATIVE[name](*clones(call)) for call in calls[name]]
            assert all(map(same, found, expected[name])), name
    finally:
        torch.set_default_dtype(torch.float32)


@needs_tiles
@pytest.mark.parametrize("is_rhs_transposed", [False, True])
@pytest.mark.parametrize("is_lhs_transposed", [False, True])
@pytest.mark.parametrize(
    "rows, inner, columns",
    [
        *((1, 1, 1), (33, 70, 17), (64, 1025, 31)),
        *(
            pytest.param(*size, marks=pytest.mark.slow)
            for size in ((5, 2047, 40), (200, 3, 64), (300, 32, 7))
        ),
    ],
)
def test_products_by_tiles_are_those_in_float64_for_any_threads(
    rows: int,
    inner: int,
    columns: int,
    is_lhs_transposed: bool,
    is_rhs_transposed: bool,
    threads: Any,
) -> None:
    lhs, rhs = (
        matrix(rows, inner, is_lhs_transposed, 1),
        matrix(inner, columns, is_rhs_transposed, 2),
    )
    whole = random(rows, columns + 3)
    for step, before in ((2.0, whole), (0.0, torch.full_like(whole, float("nan")))):
        results = []
        for count in (1, 2, 3):
            threads(count)
            held = before.clone()
            total = held[:, 1:-2]  # a stride of its own
            assert native.adds_product(total, lhs, rhs)
            results.append(accumulate_gemm_(total, lhs, rhs, step).clone())
            assert torch.equal(held[:, 0].nan_to_num(7), before[:, 0].nan_to_num(7))
            assert torch.equal(held[:, -2:].nan_to_num(7), before[:, -2:].nan_to_num(7))
        kept = before[:, 1:-2].double() * (step / (step + 1)) if step else 0.0
        expected = kept + lhs.double() @ rhs.double() / (step + 1)
        torch.testing.assert_close(
            results[0].double(), expected, rtol=1e-5, atol=1e-6 * inner**0.5 + 1e-6
        )
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@needs_tiles
def test_other_libraries_find_their_tiles_as_they_left_them() -> None:
    lhs, rhs = (
        random(256, 256, dtype=torch.bfloat16),
        random(256, 256, dtype=torch.bfloat16, seed=1),
    )
    before = lhs @ rhs
    accumulate_gemm_(torch.zeros(256, 256), lhs, rhs, 0.0)
    assert torch.equal(lhs @ rhs, before)


def test_products_that_tiles_do_not_take_are_made_by_torch() -> None:
    lhs, rhs = (
        random(6, 40, dtype=torch.bfloat16)[:, ::2],
        random(20, 5, dtype=torch.bfloat16, seed=1),
    )
    total = torch.zeros(6, 5)
    assert not native.adds_product(total, lhs, rhs)
    accumulate_gemm_(total, lhs, rhs, 0.0)
    torch.testing.assert_close(total, lhs.float() @ rhs.float(), rtol=1e-2, atol=1e-2)
    for t, a, b in (
        (total.double(), lhs, rhs),
        (total, lhs.float(), rhs.float()),
        (total[:0], lhs[:0], rhs),
    ):
        assert not native.adds_product(t, a, b)


@needs_compiler
@both_types
def test_an_elements_bits_do_not_depend_on_its_place(dtype: torch.dtype) -> None:
    x, dy = random(4099, dtype=dtype), random(4099, dtype=dtype, seed=1)
    total = random(4099)
    for first, end in ((0, 1), (1, 18), (3, 4099), (4090, 4099)):
        part = slice(first, end)
        assert same(NATIVE["gelu"](x)[part], NATIVE["gelu"](x[part]))
        assert same(NATIVE["gelu_grad"](dy, x)[part], NATIVE["gelu_grad"](dy[part], x[part]))
        whole = NATIVE["accumulate_mean_"](total.clone(), x, 2.0)
        assert same(whole[part], NATIVE["accumulate_mean_"](total.clone()[part], x[part], 2.0))


@needs_compiler
@both_types
def test_dropout_is_the_plain_kernels_bit_for_bit(dtype: torch.dtype) -> None:
    for call in operands(dtype)["dropout"]:
        assert same(NATIVE["dropout"](*call), KERNELS["dropout"](*call))


@pytest.mark.parametrize("p", [1 - 1e-11, 1 - 2**-53])
def test_dropout_with_a_probability_next_to_one_drops_all_but_every_2_to_the_32nd(p: float) -> None:
    seed = torch.tensor([7, 11], dtype=torch.uint32)
    for dropout in (NATIVE["dropout"], KERNELS["dropout"]):
        assert not dropout(torch.ones(1000), seed, p).any()


@needs_compiler
def test_draws_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for offset, count in ((0, 1), (1, 70_003), (2**33, 11), (12345, 65_536)):
        expected = host_draws(np.array([5, 4_000_000_000], np.uint32), count, offset)
        seed = torch.tensor([5, 4_000_000_000], dtype=torch.uint32)
        found = generator.draws(seed, count, offset)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            assert torch.equal(found, generator.draws(seed, count, offset))
        np.testing.assert_array_equal(found.numpy().view(np.uint32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_mean_that_starts_anew_forgets_what_overflowed_before(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0, -3.0], dtype=dtype)
    for kernel in (NATIVE["accumulate_mean_"], KERNELS["accumulate_mean_"]):
        for step in (0.0, torch.tensor(0.0), np.float32(0)):
            total = torch.tensor([float("inf"), float("nan"), 5.0], dtype=dtype)
            assert torch.equal(kernel(total, values, step), values)
            assert torch.equal(kernel(total, total, step), values)


@needs_compiler
def test_exponentials_are_right_to_two_units_in_the_last_place() -> None:
    near = random(100_000, scale=1).abs().neg()
    x = torch.cat(
        [
            torch.linspace(-86.5, 0.0, 200_001),
            near,
            torch.tensor([0.0, -0.0, -86.7, -1e9, -float("inf")]),
        ]
    )
    ones = torch.ones(1)
    zero = torch.zeros(1)
    found = (
        NATIVE["logsumexp_and_pick_grad"](ones, zero, zero, x[None], torch.tensor([-1]))[0]
        .double()
        .numpy()
    )
    expected = np.exp(x.double().numpy())
    expected[expected < 2.4e-38] = 0
    assert np.max(np.abs(found - expected) / np.maximum(expected, 1e-38)) < 2 * 2**-23


# AdamW


def adam_state(weight: torch.dtype, gradient: torch.dtype, count: int) -> list[torch.Tensor]:
    state = [random(count, dtype=weight, scale=0.1), random(count, dtype=gradient, seed=1)]
    return [*state, random(count, seed=2), random(count, seed=3).square(), torch.tensor(4.0)]


def update(state: list[torch.Tensor], scale: Any = 0.5) -> torch.Tensor:
    var, grad, first, second, step = state
    return adamw_(var, grad, scale, first, second, step, -1e-2, 0.9, 0.99, 1e-6, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_adamw_is_torchs_own(gradient: torch.dtype) -> None:
    var, grad, first, second, step = state = adam_state(torch.float32, gradient, 70_001)
    expected = [t.double() for t in (var, grad * 0.5, first, second)]
    torch._fused_adamw_(
        *([t] for t in expected), [], [step.clone()], lr=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-6,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    update(state)
    for found, wanted in zip((var, first, second), (expected[0], expected[2], expected[3])):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=2e-7)


TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def with_every_float16(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every number that float16 has among a moment's, so that each is upcast, and rounded
    again.
    """
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    state[2][: len(bits)] = bits.view(torch.float16).to(state[2].dtype)
    return state


def expected_adamw(
    state: list[torch.Tensor], to: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
) -> list[torch.Tensor]:
    """Weight and moments after `update`, by the formula in float32; ``to`` rounds to a type."""
    var, grad, first, second, step = (t.float() for t in state)
    types = [state[i].dtype for i in (0, 2, 3)]
    g = grad * 0.5
    m = to(first * 0.9 + g * np.float32(1 - 0.9), types[1])
    v = to(second * np.float32(0.99) + g * np.float32(1 - 0.99) * g, types[2])
    root = v.float().sqrt() * (1 / (1 - 0.99 ** step.item())) ** 0.5 + 1e-6
    return [
        to(var * (1 - 1e-2 * 0.1) - 1e-2 / (1 - 0.9 ** step.item()) * m.float() / root, types[0]),
        m,
        v,
    ]


def assert_apart_by_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums that differ in float32's last bits are rounded apart now and then, by one unit of a
    narrow type.
    """
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7, equal_nan=True)
        return
    torch.testing.assert_close(found, expected, equal_nan=True, **{
        torch.bfloat16: {"rtol": 2**-7, "atol": 1e-30}, torch.float16: {"rtol": 2**-10, "atol": 2**-24},
    }[found.dtype])  # fmt: skip
    assert ((found != expected) & ~found.isnan()).float().mean() < 5e-3


@pytest.mark.quick_every(17)
@needs_compiler
@pytest.mark.parametrize("stochastic", [False, True], ids=["to nearest", "stochastic"])
@pytest.mark.parametrize("gradient", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("second", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("first", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("weight", TYPES.values(), ids=TYPES)
def test_adamw_of_any_types_is_the_formula_with_each_result_rounded_once(
    weight: torch.dtype,
    first: torch.dtype,
    second: torch.dtype,
    gradient: torch.dtype,
    stochastic: bool,
) -> None:
    state = adam_state(weight, gradient, 70_001)
    state[2], state[3] = state[2].to(first), state[3].to(second)
    with_every_float16(state)
    seeds = [torch.tensor([n, 9], dtype=torch.uint32) for n in range(3)]
    narrow = [t.dtype != torch.float32 for t in (state[0], state[2], state[3])]
    drawn = iter(seeds)

    def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        noise = Noise(next(order), 5 + t.numel()) if stochastic and dtype != torch.float32 else None
        return round_to(dtype, t, noise, 5)

    drawn_first = seeds[: sum(narrow)]  # for the weight, if it is narrow, which is rounded last
    order = iter(drawn_first[1:] + drawn_first[:1] if narrow[0] else drawn_first)
    expected = expected_adamw(state, rounded)
    if stochastic:
        with Updates.rounded_stochastically(lambda: next(drawn), 5):
            update(state)
    else:
        update(state)
    for found, wanted in zip((state[0], state[2], state[3]), expected):
        assert_apart_by_rounding(found, wanted)


@needs_compiler
@pytest.mark.parametrize("offset", [0, 5, 65_530, 200_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_numbers_are_rounded_at_random_as_by_the_plain_kernel(
    dtype: torch.dtype, offset: int
) -> None:
    given = random(140_001, scale=3)
    given[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40])
    seed = torch.tensor([3, 9], dtype=torch.uint32)
    for count in (0, 1, 37, 70_000, 140_001):
        found, expected = torch.zeros(2, count, dtype=dtype)
        for t, kernels in ((found, NATIVE), (expected, KERNELS)):
            with Updates.rounded_stochastically(lambda: seed, offset):
                assert kernels["copy_var_update_"](t, given[:count]) is t
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert count < 2 or not torch.equal(found, given[:count].to(dtype))


@needs_compiler
def test_adamw_upcasts_and_rounds_float16_as_numpy_does() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        near = every.astype(np.float32)
        values = np.concatenate(
            [near, np.nextafter(near, np.float32(np.inf)), near * np.float32(1 + 2**-11)]
        )
    zeros = torch.zeros(len(values))
    gradient, moment = (
        torch.from_numpy(values.copy()),
        torch.zeros(len(values), dtype=torch.float16),
    )
    # beta1 0: the first moment becomes the gradient, rounded
    adamw_(
        zeros.clone(),
        gradient,
        None,
        moment,
        zeros.clone(),
        torch.tensor(1.0),
        0.0,
        0.0,
        0.99,
        1e-6,
        0.0,
    )
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(moment.numpy(), expected)


@pytest.mark.parametrize("offset", [0, 5, 65_530, 200_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_adamw_rounds_narrow_weights_with_the_noise_of_the_plain_kernel(
    dtype: torch.dtype, offset: int
) -> None:
    narrow = adam_state(dtype, torch.float32, 140_001)
    wide = [narrow[0].float(), *clones(narrow[1:])]
    seed = torch.tensor([3, 9], dtype=torch.uint32)
    with Updates.rounded_stochastically(lambda: seed, offset):
        found = update(narrow)
    exact = update(wide)
    expected = round_to(dtype, exact, Noise(seed, offset + exact.numel()), offset)
    assert torch.equal(found, expected)
    assert not torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_adamw_without_gradients_and_decay_keeps_the_bits_of_narrow_weights(
    dtype: torch.dtype,
) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    before, zeros = every[every.isfinite()], torch.zeros(int(every.isfinite().sum()))
    weight, seed = before.clone(), torch.tensor([3, 9], dtype=torch.uint32)
    rest = (zeros, None, zeros.clone(), zeros.clone(), torch.tensor(4.0))
    with Updates.rounded_stochastically(lambda: seed):
        adamw_(weight, *rest, -1e-2, 0.9, 0.99, 1e-6, 0.0)
    assert torch.equal(weight.view(torch.int16), before.view(torch.int16))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_without_stochastic_rounding_adamw_rounds_to_nearest(dtype: torch.dtype) -> None:
    narrow = adam_state(dtype, dtype, 40_001)
    wide = [narrow[0].float(), *clones(narrow[1:])]
    assert torch.equal(update(narrow), update(wide).to(dtype))


@pytest.mark.parametrize(
    "beta1, beta2, step", [(0.9, 0.99, 0.0), (1.0, 0.99, 1.0), (0.9, 1.0, 1.0)]
)
def test_adamw_without_a_finite_correction_gives_torchs_infinities(
    beta1: float, beta2: float, step: float
) -> None:
    var, grad, first, second, _ = adam_state(torch.float32, torch.float32, 5)
    count, plain = torch.tensor(step), clones([var, grad, first, second])
    adamw_(var, grad, None, first, second, count, -1e-2, beta1, beta2, 1e-6, 0.1)
    torch._fused_adamw_(
        *([t] for t in plain), [], [count], lr=1e-2, beta1=beta1, beta2=beta2, weight_decay=0.1, eps=1e-6,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    for found, expected in zip((var, first, second), (plain[0], *plain[2:])):
        torch.testing.assert_close(found, expected, equal_nan=True)

"""AdamW with moments of 8 bits: what codes hold, the formula, noise, shards, and steps left out."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import popxl
import popxl_engine.kernels  # noqa: F401 - registers every kernel
import pytest
import torch
from popxl import ops
from popxl.errors import DTypeError, ShapeError
from popxl.extensions import adamw_8bit_
from popxl.moments import BLOCK, FIRST, MOMENTS, SECOND, MomentFormat, coded_length
from popxl.ops import collectives
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_engine.kernels.adamw_8bit import Part
from popxl_engine.kernels.registry import ALTERNATES, KERNELS
from popxl_engine.kernels.rounding import Noise, Updates
from popxl_engine.native import library as native

formats = pytest.mark.parametrize("form", MOMENTS.values(), ids=MOMENTS)
SMALLEST_NORMAL = {FIRST: 2.0**-14, SECOND: 2.0**-30}
"""Relative to a block's power of two."""
NUMBERS = (0.01, 0.9, 0.95, 1e-6, 0.1, 0.5)
"""lr, beta1, beta2, epsilon, weight_decay, scale."""


def moment(form: MomentFormat, *shape: int, seed: int = 0, octaves: int = 30) -> np.ndarray:
    """Numbers as different as moments are; second ones have no sign."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * np.exp2(random.integers(-octaves, 3, shape))
    return np.asarray(x * x if form is SECOND else x, np.float32)


def powers(x: np.ndarray) -> np.ndarray:
    """The power of two of each number's block, by the definition."""
    padded = np.pad(np.abs(x), (0, -len(x) % BLOCK)).reshape(-1, BLOCK)
    exponents = np.ceil(np.log2(padded.max(1).astype(np.float64)))
    return np.repeat(2.0**exponents, BLOCK)[: len(x)]


# Codes


@formats
def test_a_code_is_within_a_sixteenth_of_its_number_and_small_ones_within_a_step(form):
    x = moment(form, 5003).astype(np.float64)
    found = form.decode(form.encode(x.astype(np.float32)), len(x))
    smallest = powers(x) * SMALLEST_NORMAL[form]
    is_normal = np.abs(x) >= smallest
    assert 0.05 < np.mean(~is_normal) or form is SECOND
    error = np.abs(found - x)
    assert (error[is_normal] <= np.abs(x)[is_normal] / 16).all()
    assert (error[~is_normal] <= smallest[~is_normal] / 8).all()
    if form is SECOND:
        assert (found[x > 0] > 0).all(), "a second moment divides"


@formats
@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000])
def test_numbers_that_were_coded_once_stay_as_they_are(form, count):
    once = form.decode(form.encode(moment(form, 3, count)), count)
    coded = form.encode(once)
    assert coded.shape == (3, coded_length(count)) and coded.dtype == np.uint8
    np.testing.assert_array_equal(form.decode(coded, count).view(np.uint32), once.view(np.uint32))


@formats
def test_numbers_of_near_sizes_stay_as_they_are_in_other_blocks_too(form):
    once = form.decode(form.encode(moment(form, 400, octaves=6)), 400)
    for first in range(1, BLOCK):
        rest = once[first:]
        np.testing.assert_array_equal(form.decode(form.encode(rest), len(rest)), rest)


@formats
def test_zero_bytes_are_zeros_and_what_is_not_finite_stays_so(form):
    assert not form.decode(np.zeros(coded_length(70), np.uint8), 70).any()
    for wrong in (np.inf, np.nan):
        x = np.ones(70, np.float32)
        x[33] = wrong
        found = form.decode(form.encode(x), 70)
        assert not np.isfinite(found[33]) and (found[:32] == 1).all() and (found[64:] == 1).all()


@formats
def test_the_engine_codes_as_the_host_does(form):
    for count in (1, 32, 33, 5003):
        x = moment(form, count)
        coded = torch.zeros(coded_length(count), dtype=torch.uint8)
        part = Part(coded, count, 0, count)
        part.encode(form, torch.from_numpy(x), 0x8000, None)
        np.testing.assert_array_equal(coded.numpy(), form.encode(x))
        np.testing.assert_array_equal(part.decode(form).numpy(), form.decode(form.encode(x), count))


@formats
def test_rounding_at_random_has_no_bias(form):
    """The mean of 4096 roundings is as near to the number as such a mean is; to the nearest, most
    are further off. A second moment's smallest code stands for all that is smaller.
    """
    x, rounds = moment(form, 96, octaves=8), 4096
    count = rounds * len(
        x
    )  # whole blocks, the same again and again, each number with bits of its own
    coded = torch.zeros(coded_length(count), dtype=torch.uint8)
    part, noise = (
        Part(coded, count, 0, count),
        Noise(torch.tensor([5, 1], dtype=torch.uint32), count),
    )
    part.encode(form, torch.from_numpy(np.tile(x, rounds)), noise, None)
    mean = part.decode(form).double().numpy().reshape(rounds, -1).mean(0)
    step = np.maximum(np.abs(x) / 8, powers(x) * SMALLEST_NORMAL[form] / 8)
    error = np.abs(mean - x)
    assert (error < 5 * step / 2 / np.sqrt(rounds)).all()
    assert np.median(np.abs(form.decode(form.encode(x), 96) - x)) > 4 * np.median(error)


# The update


def state(count: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """var, first and second, before the first step."""
    var = torch.from_numpy(np.random.default_rng(seed).normal(size=count)).to(dtype)
    return [var, *(torch.zeros(coded_length(count), dtype=torch.uint8) for _ in range(2))]


def gradient(count: int, step: int) -> torch.Tensor:
    return torch.from_numpy(moment(FIRST, count, seed=step, octaves=8))


def update(kernel: Any, t: list[torch.Tensor], step: int, condition: Any = None) -> None:
    var, first, second = t
    one = torch.tensor(float(step))
    kernel(var, gradient(var.numel(), step), first, second, one, *NUMBERS, condition)


def by_hand(count: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight and moments in float64, number by number, with the codes of the host between steps."""
    var = np.random.default_rng(0).normal(size=count).astype(np.float32).astype(np.float64)
    m, v = np.zeros(count), np.zeros(count)
    lr, beta1, beta2, epsilon, decay, scale = NUMBERS
    for step in range(1, steps + 1):
        for i, g in enumerate(gradient(count, step).double().numpy() * scale):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            root = np.sqrt(v[i] / (1 - beta2**step)) + epsilon
            var[i] -= lr * (m[i] / (1 - beta1**step) / root + decay * var[i])
        m, v = (
            f.decode(f.encode(x.astype(np.float32)), count).astype(np.float64)
            for f, x in ((FIRST, m), (SECOND, v))
        )
    return var, m, v


@pytest.mark.parametrize("kernels", [KERNELS, ALTERNATES["cpu"]], ids=["plain", "native"])
def test_the_update_is_the_formula_in_a_plain_loop(kernels):
    found, count = state(700, torch.float32), 700
    for step in range(1, 6):
        update(kernels["adamw_8bit_"], found, step)
    var, m, v = by_hand(count, 5)
    np.testing.assert_allclose(found[0].double().numpy(), var, rtol=1e-5, atol=1e-6)
    for coded, form, wanted in ((found[1], FIRST, m), (found[2], SECOND, v)):
        x = form.decode(coded.numpy(), count)
        # sums that differ in float32's last bits are rounded apart now and then
        assert np.mean(x != wanted) < 0.01
        np.testing.assert_allclose(x, wanted, rtol=1 / 8, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.quick_every(3)
@pytest.mark.parametrize("offset", [None, 0, 5, 65_530])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_compiled_kernel_gives_what_the_plain_one_gives(dtype, offset, monkeypatch):
    assert native.library() is not None, "tests have a compiler"
    monkeypatch.setattr("popxl_engine.kernels.adamw_8bit.CHUNK", 3200)
    plain, fast = state(140_001, dtype), state(140_001, dtype)
    for step in range(1, 4):
        for kernel, t in (
            (KERNELS["adamw_8bit_"], plain),
            (ALTERNATES["cpu"]["adamw_8bit_"], fast),
        ):
            seed = torch.tensor([step, 9], dtype=torch.uint32)
            drawing = Updates.rounded_stochastically(lambda seed=seed: seed, offset or 0)
            with nullcontext() if offset is None else drawing:
                update(kernel, t, step)
    # sums that differ in float32's last bits are rounded apart now and then, by one code
    apart = (fast[0].float() - plain[0].float()).abs()
    unit = 1e-5 if dtype == torch.float32 else 2**-7
    assert (apart > 1e-6 + unit * plain[0].float().abs()).float().mean() < 1e-4
    assert apart.max() < NUMBERS[0] / 4
    for one, other in zip(fast[1:], plain[1:]):
        assert (one != other).float().mean() < 1e-3
        assert (one.int() - other.int()).abs().max() <= 1


@pytest.mark.parametrize("kernels", [KERNELS, ALTERNATES["cpu"]], ids=["plain", "native"])
def test_a_step_that_is_left_out_changes_no_bit(kernels):
    t = state(100, torch.float32)
    update(kernels["adamw_8bit_"], t, 1, torch.tensor(True))
    before = [x.clone() for x in t]
    assert all(x.any() for x in before)
    t_gradient = torch.full((100,), torch.nan)
    kernels["adamw_8bit_"](
        t[0], t_gradient, *t[1:], torch.tensor(2.0), *NUMBERS, torch.tensor(False)
    )
    assert all(map(torch.equal, t, before))


# In programs

GRADIENT = np.random.default_rng(1).normal(size=(8, 320)).astype(np.float32)


def trained(replicas: int, flags: tuple[bool, ...] = (True, True, True)) -> list[np.ndarray]:
    """The variable, its moments as numbers, and the step, after some steps; over replicas each has
    a shard.
    """
    ir = popxl.Ir(replication=replicas)
    ir._pb_ir.getSessionOptions().enableStochasticRounding = True
    data = np.random.default_rng(0).normal(size=GRADIENT.shape).astype(np.float32)
    with ir.main_graph, popxl.in_sequence():
        given = popxl.constant(GRADIENT)
        if replicas > 1:
            v, target = popxl.replica_sharded_variable(data)
            given = collectives.replica_sharded_slice(given)
        else:
            v = target = popxl.variable(data)
        facts, step = AdamOptimizerStep().create_graph(
            target, given, lr=1e-2, first_order_dtype=popxl.uint8, second_order_dtype=popxl.uint8,
            update_if=popxl.TensorSpec((), popxl.bool),
        )  # fmt: skip
        made = facts.init()
        for flag in flags:
            step.bind(made).call(target, given, popxl.constant(flag, popxl.bool))
    named = {v.name: v for v in ir.main_graph.variables}
    with popxl.Session(ir) as session:
        session.run()
        found = [session.get_tensor_data(x) for x in (v, *(named[n] for n in (*MOMENTS, "step")))]
    count = GRADIENT.size // replicas
    for i, form in enumerate(MOMENTS.values(), 1):
        found[i] = form.decode(found[i].reshape(replicas, -1), count).reshape(-1)
    return found


def test_the_interpreter_gives_what_the_engine_gives(monkeypatch):
    found = trained(1)
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    expected = trained(1)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(found[1:3], expected[1:3]):
        assert np.mean(one != other) < 1e-3
    assert found[3] == expected[3] == 3


def test_shards_of_whole_blocks_are_updated_as_the_whole_is():
    for found, expected in zip(trained(4), trained(1)):
        np.testing.assert_array_equal(found, expected)


def test_programs_leave_steps_out():
    for found, expected in zip(trained(1, (True, False)), trained(1, (True,))):
        np.testing.assert_array_equal(found, expected)


def test_what_does_not_fit_is_refused_in_words():
    with popxl.Ir().main_graph:
        var, one = popxl.variable(np.zeros(40, np.float32)), popxl.constant(1.0)
        coded = popxl.variable(np.zeros(coded_length(40), np.uint8))
        short = popxl.variable(np.zeros(40, np.uint8))
        wrong = popxl.variable(np.zeros(3, np.float32))
        for error, words, arguments in (
            (ShapeError, r"first uint8\[40\].*expected uint8\[42\]", (var, var, short, coded)),
            (DTypeError, "second float32.*expected uint8", (var, var, coded, var)),
            (ShapeError, "expected equal shapes", (var, wrong, coded, coded)),
        ):
            with pytest.raises(error, match=words):
                adamw_8bit_(*arguments, one, 1e-3)
        with pytest.raises(DTypeError, match="condition.*expected a bool"):
            adamw_8bit_(var, var, coded, coded, one, 1e-3, condition=one)
        with pytest.raises(ValueError, match="expected uint8 for both, with bias correction"):
            AdamOptimizerStep().create_graph(
                var, var, lr=1.0, first_order_dtype=popxl.uint8, second_order_dtype=popxl.float32
            )
        assert ops.identity(adamw_8bit_(var, var, coded, coded, one, 1e-3)).shape == (40,)

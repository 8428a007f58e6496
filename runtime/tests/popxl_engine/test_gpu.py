"""Kernels on a GPU: everything is where it belongs, and kernels for GPUs give the numbers of the
plain ones.

Proven without one: the first on tensors that have a device and no memory, the second on the
processor.

Torch's fake tensors refuse to mix devices, and have no numbers that a kernel could wait for.
"""

from contextlib import nullcontext

import popxl
import pytest
import torch
from helpers.copies import Copies
from helpers.fake_gpu import CUDA, fake_gpu, run_on_fake_gpu
from helpers.op_cases import build, make_case
from helpers.op_families import FAMILIES, QUICK, family_program
from helpers.op_programs import build as build_program
from helpers.op_samples import SAMPLES, over
from helpers.quick import cases
from helpers.samples.sample import Sample
from popxl import ops
from popxl.extensions import bfloat16, plan
from popxl.opdef import call_arguments, map_tensors
from popxl_engine.interpreter import constant_tensor
from popxl_engine.kernels import adamw, cross_entropy, generator, gpu, linalg
from popxl_engine.kernels.compiled import OnePass, one_pass
from popxl_engine.kernels.dtypes import torch_dtype
from popxl_engine.kernels.registry import ALTERNATES, KERNELS, kernel_for
from popxl_engine.kernels.rounding import (
    PERIOD,
    Noise,
    Updates,
    bits_at,
    round_to,
    rounded_at,
    update_noise,
)
from popxl_engine.support import making_on
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

WAIT = {
    *("dynamic_slice", "dynamic_update", "dynamic_update_"),
    *("roi_align", "roi_align_grad", "jump_seed"),
}
"""Ops whose kernels wait for a number from the device: where to cut, how many samples there are, or a
seed where it is not computed on the host.
"""


@pytest.mark.quick_every(5)
@over(SAMPLES)
def test_a_kernel_gives_its_results_on_the_device_of_its_operands(sample: Sample):
    case = make_case(sample, sample.dtype)
    program = build(case)
    for op in program.graph.ops:
        # no fakes of sparse tensors
        if op.called() or op.definition.effects or op.definition.name == "sparse_matmul":
            continue
        with fake_gpu():
            arguments = {n: map_tensors(v, empty) for n, v in op.arguments.items()}
            args, kwargs = call_arguments(op.definition, arguments)
            try:
                with Copies() as copies:
                    run = kernel_for(op.definition, "cuda")
                    result = (run if op.inputs else making_on(CUDA, run))(*args, **kwargs)
            except DataDependentOutputException:
                assert op.definition.name in WAIT
                continue
            assert not any(copies.waited), f"{op} waits for a copy of host memory"
        for t in result if isinstance(result, (list, tuple)) else [result]:
            assert t.device.type == "cuda", f"{op}: a result on {t.device}"


@pytest.mark.sampled(3)
@pytest.mark.quick_every(3)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "family", cases(sorted(FAMILIES.keys() - {"sparse"}), lambda family: family in QUICK)
)
@pytest.mark.parametrize(
    "dtype, replicas",
    [(bfloat16, 4), pytest.param(popxl.float32, 1, marks=pytest.mark.slow)],
    ids=["bfloat16-4", "float32-1"],
)
def test_programs_mix_no_devices_and_wait_for_no_number(family, dtype, replicas, monkeypatch):
    samples = [s for s in FAMILIES[family] if s.op not in WAIT]
    monkeypatch.setitem(FAMILIES, family, samples)
    ir = build_program(samples, *family_program(family, replicas), replicas, dtype).ir
    assert run_on_fake_gpu(ir) > 0


def empty(t):
    return torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0, 3, torch.tensor(0.0), torch.tensor(2.0)], ids=str)
def test_a_gpus_mean_is_the_plain_one(step, dtype):
    random = torch.Generator().manual_seed(0)
    old, value = (torch.randn(40, 7, generator=random).to(dtype) for _ in range(2))
    if not float(step):
        old[3] = float("inf")
    args = (value, step)
    plain = KERNELS["accumulate_mean_"](old.clone(), *args)
    found = ALTERNATES["cuda"]["accumulate_mean_"](old.clone(), *args)
    turned = old.t().contiguous().t()
    assert ALTERNATES["cuda"]["accumulate_mean_"](turned, *args) is turned and torch.equal(
        turned, found
    )
    torch.testing.assert_close(
        found, plain, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6
    )


LABELS = torch.tensor([3, 0, -1, 10, 11, 5, 2], dtype=torch.int32)
"""Some of which are none of eleven classes."""


BOTH_LOSSES = pytest.mark.parametrize(
    "name, cap", [("logsumexp_and_pick", ()), ("fused_softcap_logsumexp_and_pick", (2.5,))]
)


@BOTH_LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_gpus_cross_entropy_is_the_plain_one(dtype, name, cap, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 30)  # several chunks
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=random).mul(4).to(dtype)
    logits[4] = float("-inf")
    table, plain = ALTERNATES["cuda"], KERNELS
    total, picked = table[name](logits, LABELS, *cap)
    for found, expected in zip((total, picked), plain[name](logits, LABELS, *cap)):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    scales, shares = (torch.randn(7, generator=random).to(total.dtype) for _ in range(2))
    arguments = (scales, shares, total, logits, LABELS, *cap)
    found, expected = (of[f"{name}_grad"](*arguments) for of in (table, plain))
    torch.testing.assert_close(
        found, expected, rtol=1e-6 if dtype is not torch.bfloat16 else 1e-2, atol=1e-6
    )


class Launches(TorchDispatchMode):
    """Counts what is asked of a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


@pytest.mark.slow
@BOTH_LOSSES
@pytest.mark.parametrize("kernels", [ALTERNATES["cuda"], KERNELS], ids=["gpu", "plain"])
def test_a_large_cross_entropy_asks_little_of_a_gpu(kernels, name, cap):
    with fake_gpu():
        with CUDA:
            logits, row = torch.empty(8192, 50257, dtype=torch.bfloat16), torch.empty(8192)
            indices = torch.empty(8192, dtype=torch.int32)
        with Launches() as launches:
            kernels[name](logits, indices, *cap)
            kernels[f"{name}_grad"](row, row, row, logits, indices, *cap)
    assert launches.count < (1500 if cap else 1000)


@pytest.mark.parametrize("first, count", [(0, 1), (1, 1000), (2**33 + 5, 300)])
def test_words_drawn_at_once_are_those_drawn_step_by_step(first, count):
    key = generator.key(torch.tensor([3, 77], dtype=torch.uint32))
    (start, expected), *others = generator.squares64(first, count, key, torch.device("cpu"))
    assert start == first and not others
    assert torch.equal(generator.words_at_once(key, first, count), expected)


@pytest.mark.parametrize("first, count", [(0, 5), (3, 70_001), (2**33 + PERIOD - 3, 9)])
def test_noise_drawn_at_once_is_that_drawn_period_by_period(first, count):
    noise = Noise(torch.tensor([3, 77], dtype=torch.uint32), first + count)
    found = bits_at(noise.key_there, torch.arange(first, first + count))
    assert torch.equal(found, noise.bits(count, first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_at_once_has_the_bits_of_rounding_part_by_part(dtype):
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    x[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-7])
    noise = Noise(torch.tensor([3, 77], dtype=torch.uint32), 5 + x.numel(), 5)
    found = rounded_at(dtype, x, noise.key_there, torch.arange(5, 5 + x.numel()))
    expected = round_to(dtype, x, noise, 5)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(rounded_at(dtype, x[1:], None, torch.arange(1)), x[1:].to(dtype))


NUMBERS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def step_by_step(state, grad, scale, step, lr, noises, condition=None):
    """What a GPU's update does where nothing is compiled."""
    adamw._step_by_step(
        state, grad.float() * scale, step, {"lr": lr, **NUMBERS}, noises, 0, condition
    )


def at_once(state, grad, scale, step, lr, noises, condition=None):
    """What is compiled of it."""
    keys = [None if noise is None else noise.key_there for noise in noises]
    weight, *moments = state
    numbers = (lr, *NUMBERS.values())
    adamw._step_at_once.plain(weight, moments, grad, scale, step, numbers, keys, 3, condition)


WAYS = pytest.mark.parametrize("way", [step_by_step, at_once])


@WAYS
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rounds", [False, True], ids=["nearest", "stochastic"])
def test_a_gpus_adamw_is_the_fused_one(weights, moments, rounds, way, monkeypatch):
    random = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(70_001, generator=random).to(weights) for _ in range(2))
    m, v = grad.float().mul(0.1).to(moments), grad.float().square().to(moments)
    number = [torch.tensor(x) for x in (0.5, 4.0, -1e-3)]

    def updated(kernel):
        state = [t.clone() for t in (weight, m, v)]
        seeds = iter([(torch.tensor([i, 7], dtype=torch.uint32), 3) for i in range(3)])
        with Updates.drawing(lambda: next(seeds)) if rounds else nullcontext():
            kernel(state, *number)
        return state

    def fused(state, scale, step, minus_lr):
        adamw.adamw_(
            state[0], grad, scale, state[1], state[2], step, minus_lr, 0.9, 0.95, 1e-8, 0.1
        )

    def on_a_gpu(state, scale, step, minus_lr):
        noises = [update_noise(t) for t in state]
        monkeypatch.setattr(Noise, "blocks", whole)
        way(state, grad, scale, step, -minus_lr, noises)

    for found, expected in zip(updated(on_a_gpu), updated(fused)):
        near = found.float().sub(expected.float()).abs() <= 1e-6 * expected.float().abs().clamp(
            min=1e-3
        )
        assert near.float().mean() > (
            0.9999 if rounds or found.dtype is not torch.float32 else 0.999999
        )
        torch.testing.assert_close(found, expected)  # the others are neighbours


@WAYS
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpus_adamw_changes_no_bit_where_its_condition_is_false(weights, moments, way):
    random = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(1000, generator=random).to(weights) for _ in range(2))
    weight[:10], grad[:500] = -0.0, torch.nan
    state = [
        weight,
        torch.randn(1000, generator=random).to(moments),
        torch.rand(1000, generator=random).to(moments),
    ]
    before = [t.clone() for t in state]
    for taken in (False, True):
        seeds = iter([(torch.tensor([i, 7], dtype=torch.uint32), 3) for i in range(3)])
        with Updates.drawing(lambda: next(seeds)):
            noises = [update_noise(t) for t in state]
        numbers = (torch.tensor(x) for x in (1.0, 4.0, 1e-3))
        way(state, grad, *numbers, noises, torch.tensor(taken))
        same = [
            torch.equal(t.view(torch.uint8), old.view(torch.uint8)) for t, old in zip(state, before)
        ]
        assert same == [not taken] * 3


@pytest.mark.parametrize("condition", [None, torch.tensor(True), torch.tensor(False)], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [0, 5])
def test_what_is_compiled_of_adamw_is_called_with_its_operands(
    weights, start, condition, monkeypatch
):
    """The case of a processor, by the plain function in place of the compiled one."""
    random = torch.Generator().manual_seed(0)
    old = [torch.rand(300, generator=random) for _ in range(4)]
    numbers = [torch.tensor(x) for x in (0.5, 4.0, -1e-2)]

    def updated():
        var, grad, first, second = (t.clone() for t in old)
        state = [var.to(weights), first, second]
        seeds = iter([(torch.tensor([1, 7], dtype=torch.uint32), start)])
        operands = (state[0], grad, numbers[0], *state[1:], *numbers[1:], 0.9, 0.95, 1e-3, 0.1)
        with Updates.drawing(lambda: next(seeds)):
            if condition is None:
                adamw.adamw_(*operands)
            else:
                adamw.adamw_where_(condition, *operands)
        return state

    expected, calls = updated(), []

    def noted(*args):
        calls.append(1)
        return adamw._step_at_once.plain(*args)

    monkeypatch.setattr(adamw.native, "updates", lambda *_: False)
    monkeypatch.setattr(OnePass, "is_for", lambda self, first: True)
    monkeypatch.setattr(OnePass, "_compiled", lambda self: noted)
    found = updated()
    assert bool(calls) == (condition is None or bool(condition))
    for t, other in zip(found, expected):
        torch.testing.assert_close(t, other, rtol=0.01 if t.dtype == weights else 1e-6, atol=1e-7)
        assert (t.float() - other.float()).abs().le(1e-6).float().mean() > 0.99


def test_moments_that_are_rounded_to_nearest_are_rounded_before_the_weight_is_made_of_them():
    """Compilers keep them wide until they are stored, so that step is not made at once."""
    state = [torch.ones(4, dtype=torch.bfloat16) for _ in range(3)]
    of = adamw.AdamW(
        state[0], torch.ones(4), None, *state[1:], torch.tensor(1.0), -0.1, 0.9, 0.9, 1e-8, 0.0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnePass, "is_for", lambda self, first: True)
        patch.setattr(OnePass, "attempt", lambda self, *_: (True, None))
        for moments, expected in ((torch.bfloat16, False), (torch.float32, True)):
            both = {n: getattr(of, n).to(moments) for n in ("first", "second")}
            given = (0.1, (0.9, 0.9, 1e-8, 0.0), [None] * 3, None)
            assert adamw._is_done_at_once(of._replace(**both), *given) is expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, inner, columns", [(37, 16, 43), (32, 5, 41), (33, 7, 40)])
def test_a_product_by_aligned_parts_is_the_whole_one(rows, inner, columns, bias, monkeypatch):
    monkeypatch.setattr(linalg, "WIDE", 32)
    random = torch.Generator().manual_seed(0)
    lhs, rhs, added = (
        torch.randn(shape, generator=random) for shape in ((rows, inner), (columns, inner), columns)
    )
    b = added if bias else None
    y = linalg.aligned_product(lhs, rhs.t(), b)
    exact = lhs.double() @ rhs.double().t() + (added.double() if bias else 0)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    assert y.stride(0) % 4 == 0 and y.stride(1) == 1


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_over_an_odd_number_of_classes_is_rounded_once(bias):
    """The sum of two products is made in float32, which a fake tensor shows by its type."""
    with fake_gpu(), CUDA, WideProducts() as wide:
        g, table = (
            torch.empty(shape, dtype=torch.bfloat16) for shape in ((300, 50257), (50257, 64))
        )
        y = linalg.matrix_product(g, table, torch.empty(64, dtype=torch.bfloat16) if bias else None)
    assert (y.dtype, tuple(y.shape), y.device.type) == (torch.bfloat16, (300, 64), "cuda")
    assert wide.products == [torch.float32, torch.float32]


class WideProducts(TorchDispatchMode):
    """Notes the types of the products made."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.products.append(result.dtype)
        return result


def rounded_to_both(x, key):
    """Values in both types, as numbers that can be compared."""
    places = torch.arange(x.numel()) + (2**33 + 5)
    return [rounded_at(t, x, key, places).float() for t in (torch.bfloat16, torch.float16)]


def whole(noise, count, offset):
    yield slice(0, count), noise.bits(count, offset)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_what_is_compiled_for_a_gpu_gives_the_same_numbers():
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1000, generator=random) for _ in range(2))
    step = torch.tensor(3.0)
    logits, row, classes = a.view(40, 25), b[:40], torch.arange(40)
    key = generator.key(torch.tensor([3, 77], dtype=torch.uint32))
    calls = (
        (gpu._mean, (a, b.to(torch.bfloat16), step)),
        (gpu._logsumexp, (logits, None)),
        (gpu._logsumexp, (logits, 2.5)),
        (one_pass(gpu.logits_gradient), (logits, row, row, row, classes, None)),
        (one_pass(gpu.logits_gradient), (logits, row, row, row, classes, 2.5)),
        (generator.words_at_once, (key, 2**33 + 5, 300)),
        (adamw.moments, (a, b, b.square(), 0.9, 0.95)),
        (one_pass(rounded_to_both), (a, key)),
        (adamw.updated_weight, (a, b, b.square(), step, torch.tensor(1e-3), 0.9, 0.95, 1e-8, 0.1)),
    )
    layouts = (
        (a, b.to(torch.bfloat16)),
        (a.view(40, 25).t(), b.view(25, 40)),
        (logits[3], logits[4]),
    )
    olds, values = ([pair[i].clone() for pair in layouts] for i in (0, 1))
    means = [gpu.mean_of(old, value, step) for old, value in zip(olds, values)]

    def all_of_them(operands, olds, values):
        for old, value in zip(olds, values):
            gpu._become_mean.plain(old, value, step)
        return [fn.plain(*args) for (fn, _), args in zip(calls, operands)]

    # One program, without vectors, for which no compiler is tried: nearly all of the time is its.
    quick = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    compiled = torch.compile(all_of_them, dynamic=True, options=quick)
    found = compiled([args for _, args in calls], olds, values)
    torch.testing.assert_close(found, [fn(*args) for fn, args in calls])
    torch.testing.assert_close(olds, means)


def test_a_plan_for_a_gpu_runs_its_kernels_and_no_other_does(monkeypatch):
    called = []
    monkeypatch.setitem(
        ALTERNATES["cuda"], "exp", lambda t: called.append(t.device.type) or t.clone()
    )
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((3,), popxl.float32))
        ops.host_store(popxl.d2h_stream((3,), popxl.float32), ops.exp(x))
    plan(ir)
    assert not called
    plan(ir, device="cuda")
    assert called == ["meta"]


def test_an_interpreters_constants_are_on_its_device():
    ir = popxl.Ir()
    with ir.main_graph:
        constant = popxl.constant([1.0, 2.0])
    with torch.device("meta"):
        assert constant_tensor(constant).is_meta
    assert constant_tensor(constant).tolist() == [1.0, 2.0]

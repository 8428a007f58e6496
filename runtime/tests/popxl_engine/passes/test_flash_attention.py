"""Attention without probabilities: the textbook's numbers, the interpreter's in programs, and what
must keep them.

The rule is for GPUs, and its kernels for processors serve here: which kernel a GPU takes is seen on
fake tensors.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.attention_programs import error, normal
from helpers.fake_gpu import CUDA, fake_gpu
from helpers.quick import cases
from helpers.streamed_attention import Build, causal, numbers, training
from popxl import Tensor, ops
from popxl.extensions import plan
from popxl.ops.normalisation import softmax_grad
from popxl_engine import compiler
from popxl_engine.engine import Engine
from popxl_engine.kernels import flash_attention
from popxl_engine.kernels.flash_attention import has_flash_attention
from popxl_engine.native import library as native
from popxl_engine.passes import PASSES_GPU, Pass, enabled_passes
from popxl_engine.planner.live_bytes import LiveBytes
from torch.utils._python_dispatch import TorchDispatchMode

EVERY = [*PASSES_GPU]
"""Every pass of a GPU."""


# Kernels


def run_kernels(tensors: Sequence[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Result and gradients of query, key and value."""
    query, key, value, dy = tensors
    y, logsumexp = flash_attention.flash_attention(query, key.transpose(2, 3), value, scale)
    d_query, d_key_t, d_value = flash_attention.flash_attention_grad(
        dy, query.transpose(2, 3), key, value.transpose(2, 3), y, logsumexp, scale
    )
    return [y, d_query, d_key_t.transpose(2, 3), d_value]


def test_a_gradient_that_is_one_number_everywhere_is_read_right() -> None:
    *tensors, dy = (normal(torch.float32, 2, 2, 8, 8, seed=seed) for seed in range(4))
    one = torch.ones(()).expand(dy.shape)
    for found, expected in zip(
        run_kernels([*tensors, one], 0.3), run_kernels([*tensors, one.clone()], 0.3)
    ):
        assert torch.equal(found, expected)


class Calls(TorchDispatchMode):
    """Notes which of torch's operations are called, and what they are told about the order of
    sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ordered: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1]
        self.names.append(name)
        if name.endswith("_backward"):
            only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
            self.ordered.append(torch.are_deterministic_algorithms_enabled() and not only_warned)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "dtype, width, kernel",
    [
        (torch.bfloat16, 80, "flash"),
        (torch.float16, 192, "flash"),
        (torch.bfloat16, 256, "efficient"),
        (torch.float32, 20, "efficient"),
    ],
    ids=str,
)
def test_on_a_gpu_rows_are_read_and_written_where_they_lie_and_sums_have_one_order(
    dtype: torch.dtype, width: int, kernel: str
) -> None:
    batch, heads, sequence = 2, 3, 37
    with fake_gpu(), CUDA:
        qkv = torch.empty(batch, sequence, 3 * heads * width, dtype=dtype)
        rows = [
            t.view(batch, sequence, heads, width)
            for t in (*qkv.split(heads * width, 2), torch.empty_like(qkv))[:3]
        ]
        query, key, value = (t.transpose(1, 2) for t in rows)
        dy = torch.empty(batch, sequence, heads, width, dtype=dtype).transpose(1, 2)
        with Calls() as calls:
            results = run_kernels((query, key, value, dy), 0.1)
        for t in results:
            assert t.device == CUDA and t.dtype is dtype and t.transpose(1, 2).is_contiguous()
        name = f"_scaled_dot_product_{kernel}_attention"
        assert [n for n in calls.names if "attention" in n] == [name, f"{name}_backward"]
        assert not {"clone", "copy_", "_to_copy"} & set(calls.names)
        assert calls.ordered == [True]
        moved = torch.empty(dy.numel() + 1, dtype=dtype)[1:].view(dy.shape)
        with Calls() as calls:
            run_kernels((query, key, value, moved), 0.1)
        assert calls.names.count("clone") == 1


@pytest.mark.parametrize("setting", [(False, False), (True, True), (True, False)], ids=str)
def test_what_the_user_says_about_the_order_of_sums_is_so_again(setting: tuple[bool, bool]) -> None:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(setting[0], warn_only=setting[1])
    try:
        with pytest.raises(ZeroDivisionError), flash_attention._one_order():
            _ = 1 / 0
        now = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        assert now == setting and torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# Programs


def observe(
    build: Build, passes: Sequence[Pass] | None
) -> tuple[list[tuple[np.ndarray, popxl.dtype]], dict[str, int]]:
    """(outputs, how often each fused kernel of attention stands in the program) of a main graph
    ``build(ir)``.
    """
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        streams_ = []
        for t in build(ir):
            streams_.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(streams_[-1], t)
    engine = Engine(ir, range(1), passes)
    outputs = {s: np.zeros((1, 1, *s.shape), s.dtype.as_numpy()) for s in streams_}
    engine.run({}, outputs)
    names = (
        []
        if engine.program is None
        else re.findall(r"k_fused_(\w*attention\w*?)_\d+\w*\(", engine.program.source.text())
    )
    return [(outputs[s], s.dtype) for s in streams_], {
        name: names.count(name) for name in sorted(set(names))
    }


NEAR = {popxl.float32: 2e-6, popxl.bfloat16: 0.016, popxl.float16: 0.002}
"""Distance of an output from the interpreter's, as a part of the output: a few roundings."""


def counts_of(build: Build) -> dict[str, int]:
    """The fused kernels of a program, whose numbers are the interpreter's."""
    expected, _ = observe(build, None)
    found, counts = observe(build, EVERY)
    for i, ((one, dtype), (other, _)) in enumerate(zip(found, expected)):
        distance = error(torch.from_numpy(one), torch.from_numpy(other))
        assert distance < NEAR[dtype], f"output {i}: {distance}"
    return counts


@pytest.mark.parametrize(
    "dtype",
    cases(
        [popxl.float32, popxl.bfloat16],
        lambda dtype: dtype is popxl.bfloat16,
        ["float32", "bfloat16"],
    ),
)
@pytest.mark.parametrize("recomputing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("is_loop", [False, True], ids=["in a row", "in a loop"])
@pytest.mark.parametrize(
    "shape, heads",
    [
        ((2, 6, 16), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((1, 33, 8), 1), ((3, 16, 96), 4))
        ),
    ],
    ids=str,
)
def test_programs_have_the_interpreters_numbers(
    shape: tuple[int, ...], heads: int, is_loop: bool, recomputing: bool, dtype: popxl.dtype
) -> None:
    count = 3
    build = training(
        dtype, shape, heads, micro_batches=count, is_loop=is_loop, recomputing=recomputing
    )
    times = 1 if is_loop else count
    expected = {"flash_attention": times * (1 + recomputing), "flash_attention_grad": times}
    assert counts_of(build) == expected


def stays(build: Build) -> bool:
    """Whether attention of a program is not rewritten."""
    return "flash_attention" not in counts_of(build)


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros((6, 6), np.float32),
        np.tril(causal(6), k=1),
        causal(6, -100.0),
        causal(6) + np.tril(np.full((6, 6), -np.inf, np.float32), k=-4).clip(-1e9, 0),
        causal(6).T,
        np.full((6, 6), 0.5, np.float32) + causal(6),
    ],
    ids=["none", "next is seen", "faint", "banded", "later ones", "more"],
)
def test_a_mask_that_is_not_causal_stays(mask: np.ndarray) -> None:
    assert stays(training(popxl.float32, mask=np.nan_to_num(mask, neginf=-1e9)))


@pytest.mark.parametrize(
    "hidden", cases([-1e4, -65504.0, np.finfo(np.float32).min], lambda hidden: hidden == -1e4)
)
@pytest.mark.parametrize(
    "dtype", [popxl.float32, popxl.bfloat16, popxl.float16], ids=lambda d: d.name
)
def test_a_finite_mask_hides_as_well(hidden: float, dtype: popxl.dtype) -> None:
    hidden = max(hidden, torch.finfo(dtype.as_torch()).min)
    found = counts_of(training(dtype, mask=causal(6, hidden)))
    assert set(found) == {"flash_attention", "flash_attention_grad"}


def test_dropout_and_heads_that_do_not_fit_stay() -> None:
    assert stays(training(popxl.float32, seed=True))
    assert stays(training(popxl.float32, (2, 6, 12), 2))


def by_hand(twist: str) -> Build:
    """Attention and its gradient in one graph, with a twist that the rule must see."""

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        query, key, value, dy, other = (
            popxl.variable(numbers(2, 2, 6, 8, seed=i)) for i in range(5)
        )
        mask = popxl.constant(causal(4 if twist == "fewer queries" else 6)[:, -6:])
        if twist == "fewer queries":
            query, dy, mask = (
                query[:, :, :4],
                dy[:, :, :4],
                popxl.constant(np.zeros((4, 6), np.float32)),
            )
        probs = ops.softmax(query @ key.transpose((0, 1, 3, 2)) * 0.3 + mask, axis=-1)
        y = probs @ value
        results = [y]
        if twist == "probs are seen":
            results.append(probs)
        if twist == "probs are summed":
            results.append(ops.sum(probs * 2.0))
        if twist == "probs are turned":
            results.append(probs.transpose((0, 1, 3, 2)) + 1.0)
        if twist == "result is changed":
            results = [y + 0.0, ops.add_(y, y)]
        if twist == "result is changed in a loop":

            def double(y: popxl.TensorByRef) -> list[Tensor]:
                ops.add_(y, y)
                return []

            results = [y + 0.0, y]
            ops.repeat(ir.create_graph(double, y), 2, y)
        if twist == "key is changed":
            ops.add_(key, key)
        at = other if twist == "another value" else value
        d = softmax_grad(dy @ at.transpose((0, 1, 3, 2)), probs, -1) * (
            0.4 if twist == "another scale" else 0.3
        )
        d_query = d @ (other if twist == "another key" else key)
        asked = other[:, :, : query.shape[2]] if twist == "another query" else query
        return [
            *results,
            d_query,
            asked.transpose((0, 1, 3, 2)) @ d,
            probs.transpose((0, 1, 3, 2)) @ dy,
            key + 0.0,
        ]

    return build


def test_attention_and_gradient_of_one_graph_are_rewritten() -> None:
    assert counts_of(by_hand("")) == {"flash_attention": 1, "flash_attention_grad": 1}


@pytest.mark.parametrize(
    "twist",
    [
        *("probs are seen", "probs are summed", "probs are turned", "fewer queries"),
        *("another value", "another scale", "another key", "another query"),
        *("result is changed", "result is changed in a loop", "key is changed"),
    ],
)
def test_what_others_see_or_change_stays(twist: str) -> None:
    assert stays(by_hand(twist))


@pytest.mark.parametrize("is_seen", [False, True])
def test_an_op_is_rewritten_everywhere_or_nowhere(is_seen: bool) -> None:
    def layer(x: Tensor, w: Tensor) -> list[Tensor]:
        query = (x @ w).reshape((1, 1, 6, 8))
        probs = ops.softmax(
            query @ query.transpose((0, 1, 3, 2)) * 0.3 + popxl.constant(causal(6)), axis=-1
        )
        return [(probs @ query).reshape(x.shape), probs]

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        x, w = popxl.variable(numbers(6, 8, seed=0)), popxl.variable(numbers(8, 8, seed=1))
        graph = ir.create_graph(layer, x, w)

        def body(x: Tensor, w: Tensor) -> Tensor:
            return ops.call(graph, x, w)[0]

        (y,) = ops.repeat(ir.create_graph(body, x, w), 2, x, w)
        once, probs = ops.call(graph, x, w)
        return [y, once, *([probs] if is_seen else [])]

    assert counts_of(build) == (
        {"attention": 1, "attention_no_probs": 1} if is_seen else {"flash_attention": 2}
    )


# Devices


def test_the_rule_is_for_gpus_and_can_be_switched_off(monkeypatch: Any) -> None:
    of_gpus = [each for each in EVERY if each.name != "fuse_cross_entropy"]
    assert list(enabled_passes(CUDA)) == of_gpus
    assert "flash_attention" not in [each.name for each in enabled_passes()]
    assert observe(training(popxl.float32), enabled_passes())[1].keys() == {
        "attention_no_probs",
        "attention_grad_packed",
    }
    monkeypatch.setenv("POPXL_PASSES", "-flash_attention")
    rest = [each for each in of_gpus if each.name != "flash_attention"]
    assert list(enabled_passes(CUDA)) == rest


@pytest.mark.parametrize(
    "capability, expected", [((7, 5), False), ((8, 0), True), ((9, 0), True)], ids=str
)
def test_a_gpu_without_the_kernels_keeps_the_probabilities(
    capability: Any, expected: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_flash_attention(CUDA) is expected


def program_of(build: Build) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        for t in build(ir):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    return ir


@pytest.mark.parametrize(
    "dtype",
    cases(
        [popxl.float32, popxl.bfloat16],
        lambda dtype: dtype is popxl.bfloat16,
        ["float32", "bfloat16"],
    ),
)
def test_a_plan_for_a_gpu_needs_no_memory_for_probabilities(
    dtype: popxl.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_PASSES", "-recompute_probs")
    batch, sequence, heads = 16, 1280, 2  # of many heads, few are added in parts
    ir = program_of(training(dtype, (batch, sequence, 16), heads))
    here, there = (plan(ir, device=device).peak_bytes for device in ("cpu", "cuda"))
    assert here - there > 0.5 * batch * heads * sequence**2 * dtype.itemsize
    block = compiler.compile(ir, CUDA).block
    assert not any(
        value.spec.shape[-2:] == (sequence, sequence) for i in block.instrs for value in i.outputs
    )
    assert not any(c.shape == (sequence, sequence) for c in block.constants), (
        "nothing reads the mask"
    )


@pytest.mark.skipif(
    native.library() is None, reason="no C++ compiler: plans for processors see the plain kernels"
)
def test_a_plan_for_a_gpu_does_not_see_the_processors_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(native, "call", lambda name, *_: called.append(name))
    ir = program_of(training(popxl.float32, seed=True))
    plan(ir, device="cuda")
    assert not called
    plan(ir, device="cpu")
    assert {"attend", "attend_grad"} <= set(called)


@pytest.mark.parametrize("dtype, parts", [(torch.bfloat16, 132 // 4), (torch.float32, 0)], ids=str)
def test_a_dry_run_counts_what_flash_takes_to_add_in_one_order(
    dtype: torch.dtype, parts: int
) -> None:
    shape = (2, 2, 100, 80)  # in tiles: 128 rows, 96 columns
    with torch.device("meta"), LiveBytes() as live:
        tensors = [torch.empty(shape, dtype=dtype) for _ in range(4)]
        before = live.begin()
        run_kernels(tensors, 0.3)
        needed = live.highest - before
    results = 4 * math.prod(shape) * dtype.itemsize
    sums = parts * 2 * 2 * 128 * 96 * 4
    assert sums + results <= needed < sums + 1.2 * results


def test_a_plan_for_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(
        ValueError, match="plan: got device 'auto'; expected one of cpu, cuda. Name one of them."
    ):
        plan(program_of(training(popxl.float32)), device="auto")

"""The engine's own ops against textbooks: specs, values, what they write, costs, refusals."""

import inspect
import math
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.fused_samples import FLOATS, LAYOUTS, MAKERS, Draw, Sample
from helpers.quick import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from popxl.errors import ShapeError
from popxl.op_records import OPS, as_specs, call_arguments
from popxl.tensor import TensorSpec
from popxl_engine.kernels.registry import ALTERNATES, KERNELS, OVERWRITES, kernel_for
from popxl_engine.kernels.rounding import TORCH_HALF_DTYPES, Updates
from popxl_engine.ops import FUSED_OPS
from popxl_engine.ops.adamw import AdamW
from popxl_engine.ops.attention import attention, attention_grad
from popxl_engine.ops.definition import check_results, declared_cost, operand_specs
from popxl_engine.ops.gemm import gemm_bias

ERROR = {torch.float32: 3e-6, torch.bfloat16: 0.015, torch.float16: 2e-3}
"""How far results may be from the textbook's, of its norm and that of ones, which operands are
about: some roundings of their type.
"""
MOVING = ("fused_refresh_view_", "fused_write_back_")
"""Ops without arithmetic."""
over_ops = pytest.mark.parametrize("name", sorted(FUSED_OPS))


def spec_of(t: torch.Tensor) -> TensorSpec:
    return TensorSpec(t.shape, getattr(popxl, str(t.dtype).removeprefix("torch.")))


class Known:
    """Stands for a tensor of the program."""

    def __init__(self, t: torch.Tensor):
        self.spec = spec_of(t)


def known(arguments: dict[str, Any]) -> dict[str, Any]:
    def as_known(a: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(map(as_known, a))
        return Known(a) if isinstance(a, torch.Tensor) else a

    return {n: as_known(a) for n, a in arguments.items()}


def check(name: str, sample: Sample, dtype: torch.dtype) -> None:
    definition, arguments = FUSED_OPS[name], sample.arguments
    expected = sample.expected()
    before = {n: a.clone() for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    args, kwargs = call_arguments(definition, arguments)
    returned = kernel_for(definition)(*args, **kwargs)
    results = list(returned) if isinstance(returned, tuple) else [returned]
    check_results(definition, known(arguments), [Known(t) for t in results])
    for operand, t in before.items():
        if operand not in definition.writes:
            assert torch.equal(arguments[operand], t), f"{operand} is written"
    if definition.writes:
        assert results[0] is arguments[definition.writes[0]]
        results = [*(arguments[n] for n in definition.writes), *results[1:]]
    assert len(results) == len(expected)
    for i, (found, wanted) in enumerate(zip(results, expected)):
        wanted = wanted.expand(found.shape) if not found.dim() else wanted
        difference = (found.double() - wanted).norm()
        bound = ERROR[dtype] * (wanted.norm() + math.sqrt(wanted.numel()))
        assert difference <= bound, f"result {i}: {difference} > {bound}"


@pytest.mark.quick_every(7)
@over_ops
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", cases(FLOATS, lambda dtype: dtype is torch.bfloat16, [str(d) for d in FLOATS])
)
def test_results_are_the_textbooks(name: str, layout: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        check(name, MAKERS[name](Draw(seed, dtype, layout)), dtype)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(FUSED_OPS)),
    st.integers(0, 2**32),
    st.sampled_from(FLOATS),
    st.sampled_from(LAYOUTS),
)
def test_results_of_random_operands_are_the_textbooks(
    name: str, seed: int, dtype: torch.dtype, layout: str
) -> None:
    check(name, MAKERS[name](Draw(seed, dtype, layout)), dtype)


@pytest.mark.parametrize("dtype", TORCH_HALF_DTYPES, ids=str)
def test_rows_that_meet_in_16_bits_are_added_up_in_float32_and_rounded_once(
    dtype: torch.dtype,
) -> None:
    dy, indices = torch.ones(4096, 5, dtype=dtype), torch.ones(4096, dtype=torch.int32)
    mean = KERNELS["fused_accumulate_gather_grad_"]
    t = mean(torch.full((3, 5), 7.0, dtype=dtype), dy, indices, True, 0.0)
    assert (t[1] == 4096).all() and (t[[0, 2]] == 0).all()
    seed = torch.tensor([3, 9], dtype=torch.uint32)
    found, expected = (torch.full((3, 5), 1.0, dtype=dtype) for _ in range(2))
    sums = torch.tensor([[0.0], [4096.0], [0.0]]).expand(3, 5)
    with Updates.rounded_stochastically(lambda: seed):
        mean(found, dy, indices, True, 2.0)
        KERNELS["accumulate_mean_"](expected, sums, 2.0)
    assert torch.equal(found, expected)


def test_a_table_without_rows_and_no_rows_to_add_change_nothing() -> None:
    for rows, count in ((0, 3), (4, 0), (0, 0)):
        t, dy = torch.ones(rows, 5), torch.ones(count, 5)
        indices = torch.zeros(count, dtype=torch.int32)
        KERNELS["fused_scatter_add_rows_"](t, dy, indices, True)
        KERNELS["fused_accumulate_gather_grad_"](t, dy, indices, True, 1.0)
        assert torch.equal(t, torch.full((rows, 5), 0.5))


def test_every_op_has_a_maker_of_samples_and_a_name_that_programs_do_not_use() -> None:
    assert MAKERS.keys() == FUSED_OPS.keys() and not OPS.keys() & FUSED_OPS.keys()


def parameters_of(kernel: Any) -> list[str]:
    """A kernel's without its result's place; ``*operands`` stands for the record of AdamW's."""
    found: list[str] = []
    for name, parameter in inspect.signature(kernel).parameters.items():
        is_rest = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        found += AdamW._fields if is_rest else [name]
    return found[:-1] if kernel in OVERWRITES else found


@over_ops
def test_kernels_have_the_parameters_of_their_op(name: str) -> None:
    for kernel in (KERNELS[name], *(table[name] for table in ALTERNATES.values() if name in table)):
        assert parameters_of(kernel) == list(FUSED_OPS[name].signature.parameters)


@over_ops
def test_costs_are_counted_from_specs(name: str) -> None:
    arguments = known(MAKERS[name](Draw(3, torch.float32)).arguments)
    results = as_specs(FUSED_OPS[name].infer(**{n: operand_specs(a) for n, a in arguments.items()}))
    cost = declared_cost(FUSED_OPS[name], arguments, [Spec(s) for s in results])
    assert (cost.flops > 0) is (name not in MOVING)
    assert cost.bytes is not None and cost.bytes > 0


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hosts_copy_between_views_and_what_they_view_as_devices_do(name: str, layout: str) -> None:
    definition = FUSED_OPS[name]
    for seed in range(12):
        sample = MAKERS[name](Draw(seed, torch.float32, layout))
        on_host = {n: map_tensors_to_numpy(a) for n, a in sample.arguments.items()}
        args, kwargs = call_arguments(definition, on_host)
        before = on_host["t"].copy()
        found = definition.host(*args, **kwargs)
        assert np.array_equal(on_host["t"], before), "it changes its operand"
        (expected,) = sample.expected()
        assert np.array_equal(found, expected.float().numpy())


def map_tensors_to_numpy(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(map_tensors_to_numpy, argument))
    return argument.numpy() if isinstance(argument, torch.Tensor) else argument


class Spec(Known):
    """The same of a spec."""

    def __init__(self, spec: TensorSpec):
        self.spec = spec


def of_shapes(**shapes: Any) -> dict[str, Any]:
    return {
        n: Spec(TensorSpec(s, popxl.float32)) if isinstance(s, tuple) else s
        for n, s in shapes.items()
    }


def test_results_that_an_op_does_not_make_are_refused() -> None:
    operands = of_shapes(lhs=(4, 6), rhs=(6, 5), bias=(5,))
    with pytest.raises(
        ShapeError, match=r"got results float32\[5, 4\]; expected float32\[4, 5\]. Correct the pass"
    ):
        check_results(gemm_bias, operands, [Spec(TensorSpec((5, 4), popxl.float32))])
    with pytest.raises(ShapeError, match=r"expected float32\[4, 5\]"):
        check_results(gemm_bias, operands, [Spec(TensorSpec((4, 5), popxl.float16))])


def test_operands_that_an_op_does_not_take_are_refused() -> None:
    y = [Spec(TensorSpec((4, 5), popxl.float32))]
    with pytest.raises(ShapeError, match=r"got lhs float32\[4, 6\].*; expected \[m, k\], \[k, n\]"):
        check_results(gemm_bias, of_shapes(lhs=(4, 6), rhs=(7, 5), bias=(5,)), y)
    with pytest.raises(TypeError, match="got arguments lhs, rhs; expected lhs, rhs, bias"):
        check_results(gemm_bias, of_shapes(lhs=(4, 6), rhs=(6, 5)), y)


PLAIN = {"positions": None, "causal": False, "window": None, "softcap": 0.0}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"probs": (1, 2, 3, 4)}, "or neither, to compute them again"),
        ({"causal": True, "mask": (3, 4)}, "expected no mask"),
        ({"mask": (3, 5)}, r"a mask \[3, 4\]"),
        ({"positions": (1, 1, 3, 1)}, r"1 \* 3 causal queries"),
        ({"positions": (1, 1, 4, 1), "causal": True}, r"1 \* 3 causal queries"),
        ({"dy": (1, 2, 5, 8), "query_t": (1, 2, 8, 5), "causal": True}, "as many keys as queries"),
    ],
    ids=str,
)
def test_a_gradient_of_attention_refuses_what_does_not_fit(
    change: dict[str, Any], says: str
) -> None:
    operands = {
        "dy": (1, 2, 3, 8), "query_t": (1, 2, 8, 3), "key": (1, 2, 4, 8), "value_t": (1, 2, 8, 4),
        "probs": None, "dropped_probs": None, "scale": 1.0, "seed_tensor": None, "p": 0.0,
        "mask": None, **PLAIN,
    }  # fmt: skip
    with pytest.raises(ShapeError, match=says):
        check_results(attention_grad, of_shapes(**{**operands, **change}), [])


def test_a_gradient_that_computes_probabilities_again_does_that_work_too() -> None:
    b, h, q, s, d = 2, 3, 5, 7, 8
    given = {"scale": 1.0, "seed_tensor": None, "p": 0.0, **PLAIN}
    probs = 2 * b * h * q * s * d + 2 * b * h * q * s + 10 * b * h * q * s
    operands = {"dy": (b, h, q, d), "query_t": (b, h, d, q), "key": (b, h, s, d)}
    operands |= {"value_t": (b, h, d, s), "mask": (q, s), **given}
    kept = of_shapes(probs=(b, h, q, s), dropped_probs=(b, h, q, s), **operands)
    again = of_shapes(probs=None, dropped_probs=None, **operands)
    costs = [declared_cost(attention_grad, a, []).flops for a in (kept, again)]
    assert costs[0] == 4 * 2 * b * h * q * s * d + 5 * b * h * q * s
    assert costs[1] - costs[0] == probs
    operands = {"query": (b, h, q, d), "key_t": (b, h, d, s), "value": (b, h, s, d)}
    forward = of_shapes(mask=(q, s), **operands, **given)
    assert declared_cost(attention, forward, []).flops == probs + 2 * b * h * q * s * d
    windowed = of_shapes(**operands, **{**given, "mask": None, "causal": True, "window": 3})
    assert declared_cost(attention, windowed, []).flops == (probs + 2 * b * h * q * s * d) * 3 // s

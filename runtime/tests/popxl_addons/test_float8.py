"""Products in 8 bits that a model is trained through: scales, gradients, parts of one tensor."""

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import run_program, run_session, store_all
from popxl import ops
from popxl.extensions import float8_e4m3fn, float8_e5m2
from popxl_addons.ops.float8 import float8_product, with_scale
from popxl_engine.kernels import float8 as kernels

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(t: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """The nearest numbers that a float8 type stands for with the largest power of two as scale."""
    largest = float(t.abs().max())
    scale = max(2.0**s for s in range(-63, 64) if largest * 2.0**s <= LARGEST[narrow])
    return (t * scale).to(narrow).to(torch.float64) / scale


class Product(torch.autograd.Function):
    """x @ w of rounded operands, in float64; the gradient is rounded, too."""

    @staticmethod
    def forward(ctx, x, w):
        narrow = [rounded(t.float(), torch.float8_e4m3fn) for t in (x, w)]
        ctx.save_for_backward(*narrow)
        return narrow[0] @ narrow[1]

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = rounded(dy.float(), torch.float8_e5m2)
        return dy @ w.T, x.T @ dy


class Rounded(addons.Module):
    """x @ weight in 8 bits."""

    def build(self, x: popxl.Tensor, weight: popxl.Tensor) -> popxl.Tensor:
        operands = (with_scale(t, float8_e4m3fn) for t in (x, weight))
        (x, x_amax), (weight, weight_amax) = operands
        return float8_product(x, weight, x_amax, weight_amax, popxl.float32)


@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (1e3, 1e-3, 1e-8)], ids=str)
def test_products_and_gradients_are_those_of_torch_with_the_same_rounding(sizes):
    generator = np.random.default_rng(0)
    shapes = (24, 40), (40, 17), (24, 17)
    arrays = [
        (generator.standard_normal(shape) * size).astype(np.float32)
        for shape, size in zip(shapes, sizes)
    ]

    def build(ir: popxl.Ir) -> list[popxl.Tensor]:
        x, weight, dy = (popxl.variable(array) for array in arrays)
        graph = ir.create_graph(Rounded(), x, weight)
        info = addons.autodiff(graph).grad_graph_info
        call = ops.call_with_info(graph, x, weight)
        gradients = ops.call(info.graph, dy, inputs_dict=info.inputs_dict(call))
        return [*call.outputs[:1], *gradients]

    leaves = [torch.from_numpy(a).double().requires_grad_() for a in arrays[:2]]
    y = Product.apply(*leaves)
    expected = [y, *torch.autograd.grad(y, leaves, torch.from_numpy(arrays[2]).double())]
    for found, wanted in zip(run_program(build), expected):
        wanted = wanted.detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2], ids=lambda dtype: dtype.name)
def test_parts_of_one_tensor_have_the_codes_of_the_whole(dtype):
    """The small part alone would have another scale, in which its numbers are not subnormal."""
    small, large = np.linspace(-0.004, 0.004, 12, dtype=np.float32), np.full(12, 3e2, np.float32)
    whole = np.concatenate([small, large])

    def codes(replicas: int, group: bool, data: np.ndarray) -> np.ndarray:
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph, popxl.in_sequence():
            t = popxl.variable(data, replica_grouping=ir.replica_grouping(group_size=1))
            rounded = with_scale(t, dtype, ir.replica_grouping() if group else None)
            (stream, _) = store_all(rounded)
        return run_session(ir, {})[0][stream].view(np.uint8)

    expected = codes(1, False, whole)
    parts = np.stack([small, large])
    np.testing.assert_array_equal(codes(2, True, parts).ravel(), expected)
    assert (codes(2, False, parts).ravel() != expected).any()


def exact_product(lhs, rhs, lhs_amax, rhs_amax):
    scales = [
        2.0 ** -int(kernels.log2_scale(amax, t.dtype))
        for t, amax in ((lhs, lhs_amax), (rhs, rhs_amax))
    ]
    return lhs.double() @ rhs.double() * scales[0] * scales[1]


@pytest.mark.parametrize("shape", [(32, 48, 64), (5, 48, 20), (7, 9, 3)], ids=str)
@pytest.mark.parametrize("types", [(0, 0), (1, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("layout", ["by rows", "transposed"])
def test_scaled_products_of_tensor_cores_get_what_they_ask_for(shape, types, layout, monkeypatch):
    """torch has the product of tensor cores on processors, too, whatever lies in what order."""
    rows, inner, columns = shape
    of = [(torch.float8_e4m3fn, torch.float8_e5m2)[i] for i in types]
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(s, generator=generator) for s in ((rows, inner), (inner, columns))]
    amaxes = [torch.tensor(448.0), torch.tensor(1e-6)]
    lhs, rhs = (t.to(narrow) for t, narrow in zip(wide, of))
    if layout == "transposed":
        lhs, rhs = lhs.t().contiguous().t(), rhs.t().contiguous().t()
    asked, multiply = [], torch._scaled_mm

    def record(a, b, *scales, **options):
        asked.append((a, b))
        return multiply(a, b, *scales, **options)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    y = kernels.scaled_product(lhs, rhs, *amaxes, torch.float32)
    ((a, b),) = asked
    assert a.stride(1) == 1 and b.stride(0) == 1, "rows of the first, columns of the second"
    assert not any(n % 16 for n in (a.shape[1], b.shape[0], b.shape[1], a.stride(0), b.stride(1)))
    expected = exact_product(lhs, rhs, *amaxes)
    assert y.shape == expected.shape and y.is_contiguous()
    for found in (y, kernels.float8_matmul(lhs, rhs, *amaxes, popxl.float32)):
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
        )


def test_a_gpu_that_multiplies_no_8_bits_multiplies_them_in_float32(monkeypatch):
    lhs, rhs = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    amaxes = torch.tensor(2.0), torch.tensor(3.0)
    expected = kernels.float8_matmul(lhs, rhs, *amaxes, popxl.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, calls in (((8, 0), 0), ((8, 9), 1), ((9, 0), 1)):
        kernels.multiplies_float8.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        asked, multiply = [], torch._scaled_mm
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_scaled_mm", lambda *a, **k: asked.append(1) or multiply(*a, **k))
            found = kernels.float8_matmul_by_tensor_cores(lhs, rhs, *amaxes, popxl.bfloat16)
        assert len(asked) == calls
        torch.testing.assert_close(found, expected)
    kernels.multiplies_float8.cache_clear()

"""The add-ons' scales for float8, four-bit groups, and the layers that use them."""

from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_program
from popxl import ops
from popxl.fp8_utils import (
    host_fp8_mse_scale,
    host_pow2scale_cast_from_fp8,
    host_pow2scale_cast_to_fp8,
)
from popxl_addons.layers import Linear, LinearFP8, LinearGQ
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)

LARGEST = {popxl.float8_143: 240.0, popxl.float8_152: 57344.0}
TORCH = {popxl.float8_143: torch.float8_e4m3fnuz, popxl.float8_152: torch.float8_e5m2fnuz}
over_types = pytest.mark.parametrize("dtype", LARGEST, ids=lambda d: d.name)

# Scales


@pytest.mark.slow
@over_types
def test_the_amax_scale_is_the_largest_without_overflow(dtype: popxl.dtype) -> None:
    powers = [LARGEST[dtype] * 2.0**-k for k in range(-30, 31)]
    sizes = [*powers, *(1.01 * p for p in powers), *(0.99 * p for p in powers)]

    def build(ir: popxl.Ir) -> list[popxl.Tensor]:
        rows = popxl.variable(np.array([[-s, s / 3] for s in sizes], np.float32))
        return [fp8_amax_scale(rows[i], dtype) for i in range(len(sizes))]

    for size, found in zip(sizes, run_program(build)):
        assert found.dtype == np.int32 and found.shape == ()
        assert size * 2.0**found <= LARGEST[dtype] * (1 + 1e-6) < size * 2.0 ** (found + 1), size


@over_types
@pytest.mark.parametrize(
    "data, expected",
    [([0.0, 0.0], 31), ([1e-30, 0], 31), ([-1e30, 1], -31), ([np.inf, 1], -31), ([np.nan, 1], 0)],
    ids=str,
)
def test_the_amax_scale_is_clipped(data: list[float], expected: int, dtype: popxl.dtype) -> None:
    (found,) = run_program(
        lambda ir: [fp8_amax_scale(popxl.variable(np.array(data, np.float32)), dtype)]
    )
    assert found == expected


@over_types
@pytest.mark.parametrize("of", [popxl.float32, popxl.float16], ids=lambda d: d.name)
def test_the_mse_scale_has_the_error_of_the_hosts(dtype: popxl.dtype, of: popxl.dtype) -> None:
    arrays = [normal(5, 7, seed=seed) * 0.3 for seed in range(4)]
    arrays += [np.full(20000, 2e-4), np.zeros(3), np.ones(3)]
    # halfway between two subnormal numbers, and with twice the scale one of them
    arrays[4][::2] = 7e-4
    arrays[4][0] = 244.8  # as near to 240 as to what it is rounded to at the fitting scale
    arrays = [a.astype(of.as_numpy()) for a in arrays]
    found = run_program(lambda ir: [fp8_mse_scale(popxl.variable(a), dtype) for a in arrays])
    fitting = run_program(lambda ir: [fp8_amax_scale(popxl.variable(a), dtype) for a in arrays])
    for a, by in zip(arrays, found):
        narrow = host_pow2scale_cast_to_fp8(a, dtype, int(by), nan_on_overflow=False)
        error = np.mean(
            (host_pow2scale_cast_from_fp8(narrow, popxl.float64, -int(by)) - a.astype(np.float64))
            ** 2
        )
        assert error <= host_fp8_mse_scale(a, dtype)[0] * (1 + 1e-6)
    clips = [int(f - g) for f, g in zip(found, fitting)]
    assert clips == [0, 0, 0, 0, int(dtype is popxl.float8_143), 0, 0]


@pytest.mark.parametrize("scale_of", [fp8_amax_scale, fp8_mse_scale, addons.fp8_amax_scale])
def test_scales_are_for_float8_and_of_numbers(scale_of: Any) -> None:
    with popxl.Ir().main_graph:
        with pytest.raises(
            RuntimeError, match="got dtype popxl.dtypes.float16; expected popxl.float8_143"
        ):
            scale_of(popxl.variable(1.0), popxl.float16)
        with pytest.raises(
            RuntimeError, match="got src int32.*expected float16, bfloat16 or float32"
        ):
            scale_of(popxl.variable(1))


# Linear in float8


def narrowed(x: np.ndarray, dtype: popxl.dtype, scale: Any) -> tuple[torch.Tensor, int]:
    """(x as float8 holds it, in float64, without its scale's inverse; the scale: amax's unless
    given).
    """
    by = (
        int(np.clip(np.floor(np.log2(LARGEST[dtype] / float(np.abs(x).max()))), -15, 16))
        if scale is None
        else scale
    )
    return torch.from_numpy(x.astype(np.float64) * 2.0**by).to(TORCH[dtype]).double(), by


def product(lhs: tuple[torch.Tensor, int], rhs: tuple[torch.Tensor, int]) -> np.ndarray:
    """Rounded once to float16, as float32."""
    return ((lhs[0] @ rhs[0]) * 2.0 ** -(lhs[1] + rhs[1])).to(torch.float16).float().numpy()


def run_layer(
    layer: Any, arrays: dict[str, np.ndarray], names: list[str], required: Any = None
) -> list[np.ndarray]:
    """A layer's output and gradients, with the arrays as x, dy and variables."""

    def build(ir: popxl.Ir) -> list[popxl.Tensor]:
        given = {name: popxl.variable(a) for name, a in arrays.items()}
        _, graph = layer.create_graph(given["x"])
        wanted = [graph.graph.inputs[0], *(getattr(graph.args, n) for n in names)]
        grad = graph.autodiff(grads_required=wanted if required is None else required(graph))
        made = {getattr(graph.args, n): given[n] for n in graph.args.to_dict()}
        call = graph.call_with_info(given["x"], args=made)
        inputs = grad.grad_graph_info.inputs_dict(call)
        return [call.outputs[0], *grad.call(given["dy"], args=inputs)]

    return run_program(build)


@pytest.mark.parametrize("of", [np.float32, np.float16])
@pytest.mark.parametrize("rows", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("metric, scale", [("amax", None), ("manual_scale", 3)])
def test_linear_fp8_multiplies_rounded_operands_and_so_do_its_gradients(
    of: Any, rows: tuple[int, ...], metric: str, scale: Any
) -> None:
    arrays = {
        "x": normal(*rows, 8).astype(of),
        "dy": (normal(*rows, 5) * 0.01).astype(of),
        "weight": normal(8, 5).astype(of),
        "bias": normal(5).astype(of),
    }
    layer = LinearFP8(5, scale_metric=metric, scale=scale or 0)
    y, dx, dw, db = run_layer(layer, arrays, ["weight", "bias"])
    flat = {
        name: a.reshape(-1, a.shape[-1]) if name in ("x", "dy") else a for name, a in arrays.items()
    }
    x, weight = (narrowed(flat[n], popxl.float8_143, scale) for n in ("x", "weight"))
    dy = narrowed(flat["dy"], popxl.float8_152, scale)
    turned = lambda pair: (pair[0].T, pair[1])  # noqa: E731
    expected = [
        product(x, weight).astype(of) + arrays["bias"],
        product(dy, turned(weight)),
        product(turned(x), dy),
    ]
    for found, want in zip((y, dx, dw), expected):
        np.testing.assert_array_equal(found.reshape(want.shape), want.astype(of))
    np.testing.assert_allclose(
        db, flat["dy"].astype(np.float64).sum(0), rtol=2e-3 if of is np.float16 else 1e-6
    )


@pytest.mark.parametrize("metric", ["amax", "mse"])
def test_linear_fp8_is_near_linear(metric: str) -> None:
    x, dy = normal(32, 64), normal(32, 16, seed=1) * 1e-3
    reference = torch.nn.Linear(64, 16)
    tx = torch.tensor(x, requires_grad=True)
    ty = reference(tx)
    ty.backward(torch.tensor(dy))
    weight, bias = reference.weight, reference.bias
    arrays = {
        "x": x,
        "dy": dy,
        "weight": weight.detach().numpy().T.copy(),
        "bias": bias.detach().numpy(),
    }
    results = run_layer(LinearFP8(16, scale_metric=metric), arrays, ["weight", "bias"])
    for found, want in zip(results, (ty.detach(), tx.grad, weight.grad.T, bias.grad)):
        error = np.linalg.norm(found - want.numpy()) / np.linalg.norm(want.numpy())
        assert error < 0.08, (
            "three and two bits of mantissa: at most 6 and 12 percent for each operand"
        )


def test_linear_fp8_gives_only_the_gradients_that_are_required() -> None:
    arrays = {"x": normal(6, 8), "dy": normal(6, 5), "weight": normal(8, 5)}
    only_x = run_layer(LinearFP8(5, bias=False), arrays, [], lambda graph: [graph.graph.inputs[0]])
    only_weight = run_layer(LinearFP8(5, bias=False), arrays, [], lambda graph: [graph.args.weight])
    assert [r.shape for r in only_x + only_weight] == [(6, 5), (6, 8), (6, 5), (8, 5)]


def test_linear_fp8_has_linears_variables() -> None:
    with popxl.Ir().main_graph:
        facts, _ = LinearFP8(5).create_graph(popxl.TensorSpec((2, 8), popxl.float32))
        made = facts.init()
        assert sorted(made.to_dict()) == ["bias", "weight"]
        reference = torch.nn.Linear(8, 5)
        mapped = LinearFP8.torch_mapping(made, reference)
        for variable, value in Linear.torch_mapping(made, reference).items():
            np.testing.assert_array_equal(mapped[variable], value)


def test_linear_fp8_refuses_unknown_metrics_and_scales_out_of_range() -> None:
    with pytest.raises(
        ValueError, match="got scale_metric 'max'; expected 'amax', 'mse' or 'manual_scale'"
    ):
        LinearFP8(5, scale_metric="max")
    for scale in (-16, 17):
        with pytest.raises(ValueError, match="expected -15 <= scale <= 16"):
            LinearFP8(5, scale_metric="manual_scale", scale=scale)


# Groups of four bits


def quantised(matrix: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Each group of neighbours along an axis, rounded to 16 levels from its least to its largest,
    where the least and the step are float16.
    """
    result = np.array(matrix, np.float64)
    along = np.moveaxis(result, axis, -1)
    for row in (along[index] for index in np.ndindex(*along.shape[:-1])):
        for start in range(0, len(row), size):
            group = row[start : start + size]
            low = float(np.float16(group.min()))
            step = float(np.float16((group.max() - low) / 15))
            group[:] = low + step * np.clip(np.rint((group - low) / step), 0, 15) if step else low
    return result


@pytest.mark.parametrize("of", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(
    "shape, axis",
    [((8, 16), -1), ((8, 16), 0), ((8, 16), -2), ((16,), 0), ((2, 8, 3), 1), ((2, 8, 3, 4), -3)],
)
@pytest.mark.parametrize("size", [4, 8])
def test_compression_keeps_sixteen_levels_of_each_group(
    shape: tuple[int, ...], axis: int, size: int, of: Any
) -> None:
    array = normal(*shape).astype(of)
    array.flat[: array.size // 2] = 0.25  # some groups have one value, and no width
    packed, scale, bias = group_quantize_compress_numpy(array, size, axis)
    others = tuple(np.delete(shape, axis))
    assert packed.dtype == np.uint16
    assert packed.shape == (*others, shape[axis] // size, size // 4)
    assert scale.shape == bias.shape == (*others, shape[axis] // size, 1)
    assert scale.dtype == bias.dtype == np.float16
    nibbles = np.stack([packed >> shift & 15 for shift in (12, 8, 4, 0)], -1)
    levels = nibbles.reshape(*packed.shape[:-1], size).astype(np.float64)
    unpacked = (levels * scale + bias).reshape(*others, shape[axis])
    expected = np.moveaxis(quantised(array, size, axis), axis, -1)
    np.testing.assert_allclose(unpacked, expected, rtol=1e-12, atol=1e-12)
    if array.ndim == 2:
        wide = (scale.astype(np.float64), bias.astype(np.float64))
        on_host = group_quantize_decompress_numpy(packed, *wide, axis)
        np.testing.assert_array_equal(on_host, np.moveaxis(unpacked, -1, axis))


def test_the_first_of_four_lies_in_the_highest_bits() -> None:
    packed, scale, bias = group_quantize_compress_numpy(
        np.array([[0.0, 5, 15, 3, 0, 0, 15, 1]]), 4, -1
    )
    np.testing.assert_array_equal(packed, [[[0x05F3], [0x00F1]]])
    np.testing.assert_array_equal([scale.ravel(), bias.ravel()], [[1, 1], [0, 0]])


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("of", [np.float32, np.float16])
def test_programs_unpack_what_the_host_does(axis: int, of: Any) -> None:
    packed, scale, bias = group_quantize_compress_numpy(normal(8, 16), 8, axis)
    scale, bias = scale.astype(of), bias.astype(of)

    def build(ir: popxl.Ir) -> list[popxl.Tensor]:
        return [
            group_quantize_decompress(*(popxl.variable(a) for a in (packed, scale, bias)), dim=axis)
        ]

    (found,) = run_program(build)
    assert found.dtype == of and found.shape == (8, 16)
    np.testing.assert_array_equal(found, group_quantize_decompress_numpy(packed, scale, bias, axis))


def test_shapes_and_data_that_do_not_fit_are_refused() -> None:
    packed, ones = np.zeros((2, 3, 4), np.uint16), np.ones((2, 3, 1), np.float32)
    infinite, matrix = np.array([[1, 2, np.inf, 4]]), np.ones((2, 8))
    large = np.array([[1, 2, 65505.0, 4]])
    refusals: Any = (
        (
            lambda: group_quantize_decompress_numpy(packed[0], ones, ones, -1),
            NotImplementedError,
            "a packed matrix",
        ),
        (
            lambda: group_quantize_decompress_numpy(packed, ones[:1], ones, -1),
            ValueError,
            r"expected \[2, 3, 1\] each",
        ),
        (
            lambda: group_quantize_decompress_numpy(packed, ones, ones, 2),
            ValueError,
            "-2 <= dim < 2",
        ),
        (
            lambda: group_quantize_compress_numpy(infinite, 4, -1),
            ValueError,
            "expected finite numbers",
        ),
        (
            lambda: group_quantize_compress_numpy(matrix.astype(int), 4, -1),
            TypeError,
            "expected floating point",
        ),
        (
            lambda: group_quantize_compress_numpy(large, 4, -1),
            ValueError,
            "magnitudes up to 65505.0; expected finite numbers of at most 65504.0",
        ),
        (lambda: group_quantize_compress_numpy(matrix[0], 4, 1), ValueError, "one of its axes"),
        (lambda: group_quantize_compress_numpy(matrix, 4, 2), ValueError, "and one of its axes"),
        (
            lambda: group_quantize_compress_numpy(matrix, 6, -1),
            ValueError,
            "expected a multiple of 4 that divides",
        ),
        (
            lambda: group_quantize_compress_numpy(matrix, 16, -1),
            ValueError,
            "for 8 elements on axis -1",
        ),
        (lambda: group_quantize_compress_numpy(matrix, 0, -1), ValueError, "got group_size 0"),
    )
    for call, error, says in refusals:
        with pytest.raises(error, match=says):
            call()
    with popxl.Ir().main_graph:
        t, scale = popxl.variable(packed), popxl.variable(ones)
        with pytest.raises(TypeError, match="expected uint16"):
            group_quantize_decompress(ops.cast(t, popxl.int32), scale, scale)
        with pytest.raises(NotImplementedError, match="a packed matrix"):
            group_quantize_decompress(t[0], scale, scale)
        with pytest.raises(ValueError, match="expected an axis of a matrix"):
            group_quantize_decompress(t, scale, scale, 2)
        for size in (3, 6, 16):
            with pytest.raises(ValueError, match="expected a multiple of 4 that divides them"):
                LinearGQ(12, group_size=size).create_graph(popxl.TensorSpec((2, 8), popxl.float32))


PACKED, SCALE, SHIFT = (
    "weight_compressed",
    "weight_decompression_scale",
    "weight_decompression_bias",
)
"""Names of the layer's variables, in PopXL."""


@pytest.mark.parametrize("axis, size", [(-1, 4), (0, 8), (-1, 0), (0, 0)])
def test_linear_gq_is_linear_with_the_unpacked_weight(axis: int, size: int) -> None:
    reference = torch.nn.Linear(16, 12)
    layer = LinearGQ(12, group_size=size, dim=axis)
    with popxl.Ir().main_graph:
        facts, _ = layer.create_graph(popxl.TensorSpec((3, 16), popxl.float32))
        mapping = LinearGQ.torch_mapping(facts.init(), reference, group_size=size, dim=axis)
    arrays = {variable.name.split("/")[-1]: value for variable, value in mapping.items()}
    arrays |= {"x": normal(3, 16), "dy": normal(3, 12)}
    matrix = reference.weight.detach().numpy().T
    weight = quantised(matrix, size or matrix.shape[axis], axis)
    y, dx, dscale, dshift, db = run_layer(layer, arrays, [SCALE, SHIFT, "bias"])
    x, dy = arrays["x"].astype(np.float64), arrays["dy"].astype(np.float64)
    near = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(y, x @ weight + reference.bias.detach().numpy(), **near)
    np.testing.assert_allclose(dx, dy @ weight.T, **near)
    np.testing.assert_allclose(db, dy.sum(0), **near)
    groups = (x.T @ dy if axis == -1 else (x.T @ dy).T).reshape(*dscale.shape[:2], -1)
    np.testing.assert_allclose(dshift, groups.sum(-1, keepdims=True), **near)
    zero, one = np.zeros_like(arrays[SHIFT]), np.ones_like(arrays[SCALE])
    levels = group_quantize_decompress_numpy(arrays[PACKED], one, zero, -1).reshape(groups.shape)
    np.testing.assert_allclose(dscale, (groups * levels).sum(-1, keepdims=True), **near)


def test_fresh_variables_of_linear_gq_are_zeros() -> None:
    with popxl.Ir().main_graph:
        facts, _ = LinearGQ(64, group_size=16).create_graph(
            popxl.TensorSpec((2, 128), popxl.float16)
        )
        made = {name: v.host_value for name, v in facts.init().to_dict().items()}
    assert {name: (v.shape, v.dtype) for name, v in made.items()} == {
        PACKED: ((128, 4, 4), np.uint16),
        SCALE: ((128, 4, 1), np.float16),
        SHIFT: ((128, 4, 1), np.float16),
        "bias": ((64,), np.float16),
    }
    assert not any(v.any() for v in made.values())

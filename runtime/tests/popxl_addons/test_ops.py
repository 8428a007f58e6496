"""The add-ons' own ops against numpy, torch and Hugging Face: rotary embedding, sparse products,
sharded losses.
"""

import importlib
from types import SimpleNamespace

import numpy as np
import popxl
import popxl_addons as addons
import pytest
import torch
from helpers.addons_programs import normal, run_program
from helpers.public_api import api
from helpers.quick import Later
from popxl import ops
from popxl.transforms.autodiff import autodiff
from popxl_addons.ops.cross_entropy_sharded_wr_loss import (
    cross_entropy_sharded_wr_loss,
    handle_ipus,
)
from popxl_addons.ops.linear_layout import linear_layout
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants, trig_tables
from popxl_addons.ops.static_sparse_ops import dense_const_sparse_matmul, random_sparse

transformers = Later("transformers")
BATCH, SEQUENCE, HEADS, FEATURES = 2, 5, 3, 8


def with_gradients(fn, dy, *arrays):
    """A function's result on arrays, and the gradients of those that are floating point."""

    def build(ir):
        tensors = [popxl.variable(a) for a in arrays]
        graph = ir.create_graph(fn, *tensors)
        info = autodiff(
            graph, grads_required=[t for t in graph.inputs if t.dtype.is_floating_point]
        )
        call = ops.call_with_info(graph, *tensors)
        return [
            call.outputs[0],
            *ops.call(info.graph, popxl.variable(dy), inputs_dict=info.inputs_dict(call)),
        ]

    return run_program(build)


# Rotary embedding


def turned(t, dim, sign=1):
    """Pairs of features as complex numbers, times e**(i * angle)."""
    angles = np.arange(t.shape[1])[:, None] * 10000.0 ** (-2 * np.arange(dim // 2) / dim)
    pairs = t[..., :dim:2] + 1j * t[..., 1:dim:2]
    pairs = pairs * np.exp(1j * sign * angles)[:, None]
    result = t.astype(np.float64)
    result[..., :dim:2], result[..., 1:dim:2] = pairs.real, pairs.imag
    return result


@pytest.mark.parametrize("dim", [None, 8, 4, 2])
def test_rotary_embedding_turns_pairs_as_complex_numbers_and_its_gradient_turns_back(dim):
    t, dy = (
        normal(BATCH, SEQUENCE, HEADS, FEATURES),
        normal(BATCH, SEQUENCE, HEADS, FEATURES, seed=1),
    )

    def fn(x):
        sin, cos = trig_table_constants(SEQUENCE, dim or FEATURES)
        return rotary_pos_embed(x, sin, cos, dim)

    result, gradient = with_gradients(fn, dy, t)
    np.testing.assert_allclose(result, turned(t, dim or FEATURES), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, turned(dy, dim or FEATURES, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16])
def test_rotary_embedding_is_that_of_hugging_faces_gpt_j(dtype):
    t = normal(BATCH, SEQUENCE, HEADS, FEATURES).astype(dtype.as_numpy())
    gptj = transformers.models.gptj.modeling_gptj
    reference = gptj.create_sinusoidal_positions(SEQUENCE, FEATURES)
    sin, cos = trig_tables(SEQUENCE, FEATURES)
    np.testing.assert_allclose(
        np.concatenate([sin, cos], 1), reference.numpy(), rtol=1e-6, atol=1e-7
    )
    tables = [part[None].to(torch.float32) for part in reference.split(FEATURES // 2, 1)]
    expected = gptj.apply_rotary_pos_emb(torch.tensor(t, dtype=torch.float32), *tables)
    (result,) = run_program(
        lambda ir: [
            rotary_pos_embed(
                popxl.variable(t), *trig_table_constants(SEQUENCE, FEATURES, dtype=dtype)
            )
        ]
    )
    assert result.dtype == t.dtype
    tolerance = 1e-6 if dtype is popxl.float32 else 4e-3
    np.testing.assert_allclose(result, expected.numpy(), rtol=tolerance, atol=tolerance)


def test_rotary_tables_take_another_base():
    _, cos = trig_tables(3, 4, base=100)
    np.testing.assert_allclose(cos, np.cos(np.outer(np.arange(3), [1, 0.1])), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", np.float32, np.dtype("float64")])
def test_rotary_tables_are_computed_in_the_type_that_is_asked_for(dtype):
    positions, pairs = np.arange(100).astype(dtype), np.arange(0, 8, 2).astype(dtype)
    speeds = np.divide(
        1, np.power(np.full(4, 10000, dtype), pairs / np.full(4, 8, dtype)), dtype=dtype
    )
    angles = positions[:, None] * speeds
    assert angles.dtype == dtype
    sin, cos = trig_tables(100, 8, np_dtype=dtype)
    assert sin.dtype == cos.dtype == dtype
    np.testing.assert_array_equal(sin, np.sin(angles))
    np.testing.assert_array_equal(cos, np.cos(angles))


@pytest.mark.parametrize(
    ("shape", "dim", "table", "says"),
    [
        ((5, 3, 8), None, (5, 4), r"expected \[batch, sequence, heads, features\]"),
        ((2, 5, 3, 8), 3, (5, 4), "an even number from 2 to 8"),
        ((2, 5, 3, 8), 10, (5, 5), "an even number from 2 to 8"),
        ((2, 5, 3, 7), None, (5, 3), "an even number from 2 to 7"),
        ((2, 5, 3, 8), None, (6, 4), r"expected shape \[5, 4\].*Slice longer tables"),
        ((2, 5, 3, 8), 4, (5, 4), r"expected shape \[5, 2\]"),
    ],
)
def test_rotary_embedding_refuses_what_does_not_fit(shape, dim, table, says):
    with popxl.Ir().main_graph:
        t, sin, cos = (popxl.variable(np.zeros(s, np.float32)) for s in (shape, table, table))
        with pytest.raises(ValueError, match=says):
            rotary_pos_embed(t, sin, cos, dim)
    with pytest.raises(ValueError, match="got rotary_dim 3; expected a positive even number"):
        trig_tables(4, 3)


# Sparse products


def as_csr(dense):
    """The fields of a scipy CSR matrix."""
    rows, columns = np.nonzero(dense)
    counts = np.bincount(rows, minlength=len(dense))
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return SimpleNamespace(
        data=dense[rows, columns], indices=columns, indptr=indptr, shape=dense.shape
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (7,)])
def test_products_with_a_sparse_constant_are_those_with_the_dense_one(shape, dtype):
    np.random.seed(0)
    dense = random_sparse(normal(7, 5), 0.4).astype(dtype)
    dense[2] = 0
    x, dy = normal(*shape).astype(dtype), normal(*shape[:-1], 5, seed=1).astype(dtype)
    y, dx = with_gradients(lambda t: dense_const_sparse_matmul(t, as_csr(dense), 5), dy, x)
    wide = dense.astype(np.float64)
    tolerance = 1e-5 if dtype is np.float32 else 4e-3
    np.testing.assert_allclose(y, x.astype(np.float64) @ wide, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(dx, dy.astype(np.float64) @ wide.T, rtol=tolerance, atol=tolerance)
    assert y.dtype == dtype and dx.dtype == dtype


def test_a_sparse_matrix_without_entries_gives_zeros():
    (y,) = run_program(
        lambda ir: [
            dense_const_sparse_matmul(popxl.variable(normal(3, 7)), as_csr(np.zeros((7, 2))), 2)
        ]
    )
    np.testing.assert_array_equal(y, np.zeros((3, 2), np.float32))


def test_sparse_products_refuse_other_types_and_shapes():
    with popxl.Ir().main_graph:
        with pytest.raises(
            RuntimeError, match=r"got lhs int32\[2, 7\]; expected float16 or float32"
        ):
            dense_const_sparse_matmul(
                popxl.variable(np.ones((2, 7), np.int32)), as_csr(np.ones((7, 5))), 5
            )
        for matrix, columns in ((np.ones((6, 5)), 5), (np.ones((7, 5)), 4)):
            with pytest.raises(
                ValueError, match=r"expected rhs of shape \[lhs's last axis, output_cols\]"
            ):
                dense_const_sparse_matmul(popxl.variable(normal(2, 7)), as_csr(matrix), columns)


def test_random_entries_are_zeroed_by_the_global_generator():
    dense = normal(200, 100) + 10
    np.random.seed(1)
    sparse = random_sparse(dense, 0.3)
    assert sparse.dtype == dense.dtype and abs((sparse != 0).mean() - 0.3) < 0.01
    np.testing.assert_array_equal(sparse[sparse != 0], dense[sparse != 0])
    np.random.seed(1)
    np.testing.assert_array_equal(random_sparse(dense, 0.3), sparse)
    assert (random_sparse(dense, 0) == 0).all() and (random_sparse(dense, 1.0) == dense).all()
    with pytest.raises(ValueError, match="got density 1.5"):
        random_sparse(dense, 1.5)


def test_a_layout_hint_changes_nothing():
    x, dy = normal(3, 4), normal(3, 4, seed=1)
    y, dx = with_gradients(lambda t: linear_layout(t, 4), dy, x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(dx, dy)


# Cross entropy over virtual devices


def on_devices(fn, known):
    """``fn(logits, indices)`` on tensors that are copied to devices 0, 1, .. first."""

    def build(*tensors):
        logits, indices = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        if known:
            logits = [ops.ipu_copy(t, i, 0) for i, t in enumerate(logits)]
        return fn(list(logits), list(indices))

    return build


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("cuts", [[4, 8], [2, 5, 9], []])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint8])
def test_cross_entropy_over_devices_is_torchs_with_whole_class_ids_on_each(known, cuts, dtype):
    logits, labels = normal(6, 12) * 4, np.array([0, 5, 11, 3, 5, 8])
    dy = normal(6, seed=1)
    leaf = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(leaf, torch.tensor(labels), reduction="none")
    loss.backward(torch.tensor(dy))
    pieces = [np.ascontiguousarray(p) for p in np.split(logits, cuts, axis=1)]
    devices = None if known else range(len(pieces))
    fn = on_devices(lambda a, b: cross_entropy_sharded_wr_loss(a, b, devices), known)
    got, *gradients = with_gradients(fn, dy, *pieces, *[labels.astype(dtype)] * len(pieces))
    np.testing.assert_allclose(got, loss.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.concatenate(gradients, 1), leaf.grad.numpy(), rtol=1e-4, atol=1e-6
    )


def test_cross_entropy_over_devices_survives_large_logits_and_is_on_the_first_device():
    logits = np.array([[1000, 0, 999, -1000]], np.float16)

    def build(ir):
        pieces = [popxl.variable(p) for p in np.split(logits, 2, 1)]
        labels = [popxl.variable(np.array([2], np.int32))] * 2
        loss = cross_entropy_sharded_wr_loss(pieces, labels, [3, 1])
        assert loss.ipu == 3 and loss.dtype is popxl.float16
        return [loss]

    np.testing.assert_allclose(run_program(build)[0], [1 + np.log1p(np.exp(-1.0))], rtol=1e-3)


def test_devices_must_be_known_and_as_many_as_tensors():
    with popxl.Ir().main_graph:
        t, labels = popxl.variable(normal(3, 4)), popxl.variable(np.zeros(3, np.int32))
        assert handle_ipus([t, t], (4, 2)) == [4, 2]
        assert handle_ipus([ops.ipu_copy(t, 2, 0), t], None) == [2, 0]
        with pytest.raises(ValueError, match="a tensor whose device is not known"):
            handle_ipus([popxl.variable(normal(3, 4))], None)
        with pytest.raises(ValueError, match="got 1 ipus for 2 tensors"):
            handle_ipus([t, t], [0])
        with pytest.raises(ValueError, match="got 1 logits and 2 indices"):
            cross_entropy_sharded_wr_loss([t], [labels, labels], [0])
        with pytest.raises(ValueError, match="got 0 logits"):
            cross_entropy_sharded_wr_loss([], [], [])


# Where programs find them


@pytest.mark.parametrize(
    "name",
    [
        "cross_entropy_sharded_loss",
        "cross_entropy_sharded_wr_loss",
        "fp8_amax_scale",
        "fp8_mse_scale",
        "grad_reduce_square_add",
        "group_quantize_decompress",
        "layer_norm_distributed",
        "linear_layout",
        "replicated_all_reduce_TP",
        "replicated_strided_collectives",
        "rotary_pos_embed",
        "static_sparse_ops",
    ],
)
def test_an_op_is_in_a_package_and_in_its_module_of_the_same_name(name):
    package = importlib.import_module(f"popxl_addons.ops.{name}")
    module = importlib.import_module(f"popxl_addons.ops.{name}.{name}")
    assert module is not package
    for function in api()["modules"][f"popxl_addons.ops.{name}"]:
        assert getattr(module, function) is getattr(package, function)


def test_a_collective_of_a_strided_group_is_in_a_module_of_its_own():
    package = importlib.import_module("popxl_addons.ops.replicated_strided_collectives")
    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        module = importlib.import_module(f"{package.__name__}.replicated_{name}_strided")
        assert getattr(module, f"replicated_{name}_strided") is getattr(
            package, f"replicated_{name}_strided"
        )


def test_the_package_of_ops_has_the_common_ones_itself():
    from popxl_addons.ops import (
        cross_entropy,
        cross_entropy_with_grad,
        fp8_amax_scale,
        host_load,
        host_store,
    )

    for function in (cross_entropy, cross_entropy_with_grad, fp8_amax_scale, host_load, host_store):
        assert getattr(addons, function.__name__) is function

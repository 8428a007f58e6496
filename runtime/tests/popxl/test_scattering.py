"""What the tables of scattering ops cannot say: equal values, indices outside, and one group."""

import numpy as np
import popxl
import pytest
import torch
from helpers.interpreted import run_graph
from popxl import ops
from popxl.transforms.autodiff import autodiff

ROWS = np.array([2, 0, 2, 0, 2], np.int32)


def evaluate(fn, *arrays):
    """A function of tensors, on arrays."""
    specs = [popxl.TensorSpec(a.shape, popxl.dtype.as_dtype(a.dtype)) for a in arrays]
    graph = popxl.Ir().create_graph(fn, *specs)
    return [r.numpy() for r in run_graph(graph, [torch.from_numpy(a.copy()) for a in arrays])]


def gradients(fn, dy, *arrays):
    """Gradients of a function of floating-point tensors."""
    specs = [popxl.TensorSpec(a.shape, popxl.dtype.as_dtype(a.dtype)) for a in arrays]
    graph = popxl.Ir().create_graph(fn, *specs)
    info = autodiff(graph)
    given = [torch.from_numpy(a.copy()) for a in arrays]
    values = dict(zip(graph.outputs, run_graph(graph, given))) | dict(zip(graph.inputs, given))
    inputs = [
        torch.from_numpy(dy) if c.connection_type.name == "FwdGrad" else values[c.fwd_tensor]
        for c in info.expected_inputs
    ]
    return [r.numpy() for r in run_graph(info.graph, inputs)]


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("start", [False, True])
def test_equal_extremes_share_the_gradient_as_in_torch(reduction, start):
    data = np.array([[1, 5], [3, 3], [1, 5], [3, 2], [1, 4]], np.float64)
    initial = np.array([[3, 3], [7, 7], [1, 5]], np.float64)
    dy = np.arange(1, 7, dtype=np.float64).reshape(3, 2)
    arrays = [data, initial] if start else [data]

    def ours(t, first=None):
        indices = popxl.constant(ROWS)
        return ops.scatter_reduce(t, indices, reduction, first, axis_size=3)

    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays]
    first = leaves[1] if start else torch.zeros(3, 2, dtype=torch.float64)
    index = torch.from_numpy(ROWS).long()[:, None].expand(5, 2)
    result = first.scatter_reduce(0, index, leaves[0], f"a{reduction}", include_self=start)
    result.backward(torch.from_numpy(dy))
    for got, leaf in zip(gradients(ours, dy, *arrays), leaves):
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-12)


def test_of_elements_that_share_a_place_the_last_one_is_kept_and_gets_the_gradient():
    data, dy = np.arange(1.0, 6.0), np.array([10.0, 20.0, 30.0])
    (result,) = evaluate(
        lambda t: ops.scatter_reduce(t, popxl.constant(ROWS), "none", axis_size=3), data
    )
    np.testing.assert_array_equal(result, [4, 0, 5])
    (given,) = gradients(
        lambda t: ops.scatter_reduce(t, popxl.constant(ROWS), "none", axis_size=3), dy, data
    )
    np.testing.assert_array_equal(given, [0, 0, 0, 10, 30])
    zero = np.zeros(3)
    placed = lambda t, v: ops.scatter(t, popxl.constant(ROWS), v)  # noqa: E731
    np.testing.assert_array_equal(evaluate(placed, zero, data)[0], [4, 0, 5])
    kept, given = gradients(placed, dy, zero, data)
    np.testing.assert_array_equal(kept, [0, 20, 0])
    np.testing.assert_array_equal(given, [0, 0, 0, 10, 30])


@pytest.mark.parametrize("index", [-1, 3])
@pytest.mark.parametrize("reduction", [None, "sum", "max", "none"])
def test_an_index_outside_is_refused_in_words(index, reduction):
    def put(t, values):
        indices = popxl.constant([0, index], popxl.int32)
        if reduction is None:
            return ops.scatter(t, indices, values)
        return ops.scatter_reduce(values, indices, reduction, t)

    says = rf"got index {index} on axis 0 of 3; expected 0 <= index < 3\. Clip"
    with pytest.raises(IndexError, match=says):
        evaluate(put, np.zeros(3), np.ones(2))


def test_an_index_outside_its_group_does_not_read_the_next_one():
    t = np.arange(12.0).reshape(2, 3, 2)
    (result,) = evaluate(
        lambda x, i: ops.groupedgather(x, i, 1, 2), t, np.array([[3], [-1]], np.int32)
    )
    np.testing.assert_array_equal(result, [t[0, 2:], t[1, :1]])


@pytest.mark.parametrize("group_size", [1, None])
def test_one_group_is_no_group(group_size):
    t, indices = np.arange(6.0).reshape(3, 2), np.array([[2, 0], [1, 1]], np.int32)
    (result,) = evaluate(lambda x, i: ops.groupedgather(x, i, group_size=group_size), t, indices)
    np.testing.assert_array_equal(result, t[indices])


def test_scattering_in_groups_adds_no_op_for_each_group():
    ir = popxl.Ir()
    data, indices = (
        popxl.TensorSpec((4, 6, 3), popxl.float32),
        popxl.TensorSpec((4, 6), popxl.int32),
    )
    graph = ir.create_graph(
        lambda t, i: ops.grouped_scatter_reduce(t, i, "sum", axis=1, axis_size=2, group_size=4),
        data,
        indices,
    )
    assert [op.definition.name for op in graph.ops] == ["reshape", "scatter_reduce"]
    assert graph.outputs[0].shape == (4, 2, 3)


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_outside_the_classes_is_told_in_words(label: int) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        probs = popxl.variable(np.full((2, 3), 1 / 3, np.float32))
        loss = ops.nll_loss(probs, popxl.variable(np.array([0, label], np.int32)))
        ops.host_store(popxl.d2h_stream(loss.shape, loss.dtype), loss)
    says = f"got index {label} on axis 1 of 3; expected 0 <= index < 3"
    with popxl.Session(ir) as session, pytest.raises(IndexError, match=says):
        session.run()


@pytest.mark.parametrize(
    "shapes", [((2, 3, 0), (2, 0, 5)), ((2, 0, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 0))]
)
def test_scores_without_elements_are_computed(shapes: tuple[tuple[int, ...], ...]) -> None:
    ir = popxl.Ir()
    x, w = (np.ones(shape, np.float32) for shape in shapes)
    mask = np.ones((x.shape[1], w.shape[2]), np.float32)
    with ir.main_graph:
        y = popxl.variable(x) @ popxl.variable(w) * 0.5 + popxl.variable(mask)
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], x @ w * 0.5 + mask)

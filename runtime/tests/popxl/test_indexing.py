"""Indexing of tensors against numpy's; functions over shapes, places and printing that the tables
do not cover.
"""

import numpy as np
import popxl
import pytest
import torch
from helpers.interpreted import run_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from popxl import ops
from popxl.transforms import autodiff

SPEC = popxl.TensorSpec((4, 5, 3), popxl.float32)
ARRAY = np.arange(60, dtype=np.float32).reshape(4, 5, 3)


def evaluate(fn, *arrays):
    """A function of tensors, on arrays: (graph, results)."""
    specs = [popxl.TensorSpec(a.shape, popxl.dtype.as_dtype(a.dtype)) for a in arrays]
    graph = popxl.Ir().create_graph(fn, *specs)
    return graph, [
        r.numpy() for r in run_graph(graph, [torch.from_numpy(a.copy()) for a in arrays])
    ]


def numbers(size):
    return st.none() | st.integers(-size - 2, size + 2)


def keys(size):
    steps = st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3])
    return st.integers(-size, size - 1) | st.builds(slice, numbers(size), numbers(size), steps)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.tuples(keys(4)) | st.tuples(keys(4), keys(5)) | st.tuples(keys(4), keys(5), keys(3)))
def test_integers_and_slices_index_as_in_numpy(key):
    expected = ARRAY[key]
    graph, (result,) = evaluate(lambda t: t[key], ARRAY)
    assert graph.outputs[0].shape == expected.shape
    np.testing.assert_array_equal(result, expected)


NOTHING = [
    *(slice(2, 2), slice(3, 1), slice(1, 3, -1), slice(9, None)),
    *(
        (slice(None, None, -1), slice(2, 2)),
        (1, slice(2, 2)),
        (slice(0, 0), 2),
        (0, 0, slice(0, 0)),
    ),
]


@pytest.mark.parametrize("key", NOTHING)
def test_slices_that_select_nothing_index_as_in_numpy_and_have_gradients(key):
    with popxl.Ir().main_graph as main:
        data = popxl.variable(ARRAY)
        graph = main.ir.create_graph(lambda t: t[key].flatten(), data)
        gradient = autodiff(graph)
        call = ops.call_with_info(graph, data)
        ones = popxl.constant(np.ones(0, np.float32))
        (dx,) = ops.call(gradient.graph, ones, inputs_dict=gradient.inputs_dict(call))
        results = [data[key], ops.concat([data[key]] * 2), ops.sum(data[key]), dx]
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in results]
        for stream, t in zip(streams, results):
            ops.host_store(stream, t)
    with popxl.Session(main.ir) as session:
        found = session.run()
    empty = ARRAY[key]
    expected = [empty, np.concatenate([empty] * 2), np.float32(0), np.zeros_like(ARRAY)]
    for stream, want in zip(streams, expected):
        np.testing.assert_array_equal(found[stream], want, strict=True)


def test_writing_to_a_view_of_nothing_needs_no_order_and_changes_nothing():
    with popxl.Ir().main_graph as main:
        t = popxl.variable(ARRAY)
        one = popxl.constant(1, popxl.float32)
        ops.add_(ops.slice_(t, 2, 2), one)
        stream = popxl.d2h_stream(t.shape, t.dtype)
        ops.host_store(stream, ops.add_(t, one))
    with popxl.Session(main.ir) as session:
        np.testing.assert_array_equal(session.run()[stream], ARRAY + 1)


@pytest.mark.parametrize("key", [2, slice(1, 3), -1])
def test_a_single_key_indexes_the_first_axis(key):
    _, (result,) = evaluate(lambda t: t[key], ARRAY)
    np.testing.assert_array_equal(result, ARRAY[key])


@pytest.mark.parametrize("indices", [[0, 3, 3], [[1], [2]], np.array([2, 0], np.uint32)])
def test_integer_arrays_and_tensors_gather_on_the_first_axis(indices):
    _, (result,) = evaluate(lambda t: t[indices], ARRAY)
    np.testing.assert_array_equal(result, ARRAY[np.asarray(indices)])
    _, (result,) = evaluate(lambda t, i: t[i], ARRAY, np.asarray(indices, np.int32))
    np.testing.assert_array_equal(result, ARRAY[np.asarray(indices)])


def test_boolean_masks_zero_what_they_do_not_choose():
    mask = ARRAY % 2 == 0
    for fn, arrays in ((lambda t: t[mask], [ARRAY]), (lambda t, m: t[m], [ARRAY, mask])):
        _, (result,) = evaluate(fn, *arrays)
        np.testing.assert_array_equal(result, np.where(mask, ARRAY, 0))


@pytest.mark.parametrize(
    "key",
    [
        *("a", True, np.True_, None, 1.5, (..., 0), (0, None), (0, "a"), [[1], [2, 3]], [0.5]),
        *((True, 0), (0, False), (np.True_, 0), ([0], [1]), ((0, 1), (1, 2)), (slice(2), [0])),
        *((np.array(1), np.array(0)), (0, np.array([1]))),
    ],
)
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError, match="index: got .*; expected ints, slices"):
        evaluate(lambda t: t[key], ARRAY)


def test_a_tensor_within_a_tuple_is_refused():
    with pytest.raises(TypeError, match="index: got Tensor in a tuple for .*; expected ints"):
        evaluate(lambda t, i: t[0, i], ARRAY, np.array([1], np.int32))


@pytest.mark.parametrize("shape", [(3,), (5, 1), (4, 1, 3), (1, 1, 1)])
def test_smaller_masks_broadcast_to_the_tensor(shape):
    mask = np.arange(np.prod(shape)).reshape(shape) % 2 == 0
    _, (result,) = evaluate(lambda t: t[mask], ARRAY)
    np.testing.assert_array_equal(result, np.where(mask, ARRAY, 0))


@pytest.mark.parametrize("shape", [(4,), (4, 5), (2, 4, 5, 3), (4, 5, 2)])
def test_masks_that_do_not_fit_the_tensor_are_refused(shape):
    with pytest.raises(ValueError, match="expected one that broadcasts to its shape"):
        evaluate(lambda t: t[np.ones(shape, bool)], ARRAY)


def test_positions_outside_and_surplus_keys_are_refused():
    with pytest.raises(ValueError, match="expected -4 <= index < 4"):
        evaluate(lambda t: t[4], ARRAY)
    with pytest.raises(ValueError, match="expected at most 3"):
        evaluate(lambda t: t[0, 0, 0, 0], ARRAY)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2), (1, 1)])
def test_diag_is_numpys(shape):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    _, (result,) = evaluate(lambda t: t.diag(), array)
    np.testing.assert_array_equal(result, np.diag(array))
    with pytest.raises(ValueError, match="expected a matrix"):
        evaluate(lambda t: t.diag(), ARRAY)


def test_methods_of_tensors_are_the_ops():
    def fn(t):
        return [
            t.T,
            t.flatten(),
            t.reshape([2, -1]),
            t.transpose([1, 0, 2]),
            t.detach(),
            t.reshape_((60,)),
            t.T_,
            t.flatten_(),
            t.detach_(),
        ]

    _, results = evaluate(fn, ARRAY)
    flat = ARRAY.reshape(-1)
    expected = [
        ARRAY.T,
        flat,
        ARRAY.reshape(2, 30),
        ARRAY.transpose(1, 0, 2),
        ARRAY,
        flat,
        ARRAY.T,
        flat,
        ARRAY,
    ]
    for result, want in zip(results, expected):
        np.testing.assert_array_equal(result, want)


def test_writing_through_a_view_changes_the_original_and_through_a_value_does_not():
    def fn(t):
        t = t + 0.0
        ops.add_(ops.slice_(t, 1, 2), popxl.constant(100, popxl.float32))
        ops.add_(ops.transpose_(ops.concat_(ops.split(t, 2), 0)), popxl.constant(5, popxl.float32))
        joined = ops.concat_([t, t])
        ops.add_(ops.reshape_(t, (-1,)), popxl.constant(1, popxl.float32))
        ops.add_(t[2:3], popxl.constant(1000, popxl.float32))
        return [t, joined]

    _, (t, joined) = evaluate(fn, ARRAY)
    expected = ARRAY + 1
    expected[1] += 100
    np.testing.assert_array_equal(t, expected)
    np.testing.assert_array_equal(joined, np.concatenate([expected, expected]))


def test_slice_without_arguments_is_the_tensor_itself():
    graph = popxl.Ir().create_graph(lambda t: [ops.slice(t), ops.slice_(t)], SPEC)
    assert graph.outputs == (graph.inputs[0], graph.inputs[0]) and not graph.ops


@pytest.mark.parametrize("strides", [2, [2], [1, 3], (3, 2, 2)])
def test_subsample_takes_every_nth_element(strides):
    steps = [strides] * ARRAY.ndim if isinstance(strides, int) else strides
    _, (result,) = evaluate(lambda t: ops.subsample(t, strides), ARRAY)
    np.testing.assert_array_equal(result, ARRAY[tuple(slice(None, None, s) for s in steps)])


def test_subsample_refuses_too_many_strides():
    with pytest.raises(ValueError, match="at most 3 numbers"):
        evaluate(lambda t: ops.subsample(t, [1, 1, 1, 1]), ARRAY)


def test_tied_gather_gathers():
    _, (result,) = evaluate(
        lambda t, i: ops.tied_gather(t, i, 1, zero_OOR=True), ARRAY, np.array([4, 7], np.int32)
    )
    np.testing.assert_array_equal(result, np.stack([ARRAY[:, 4], np.zeros((4, 3))], 1))


def test_dynamic_slices_refuse_to_reach_outside_when_they_run():
    with pytest.raises(IndexError, match="expected 0 <= start <= 2"):
        evaluate(
            lambda t, i: ops.dynamic_slice(t, i, [1], [3], True), ARRAY, np.array([3], np.uint32)
        )


def test_iterables_of_any_kind_are_taken():
    def fn(t):
        return [
            ops.concat((piece for piece in ops.split(t, 2)), 1),
            t.reshape(n for n in (5, 12)),
            t.reshape(np.array([12, 5])),
        ]

    graph, results = evaluate(fn, ARRAY)
    assert [o.shape for o in graph.outputs] == [(2, 10, 3), (5, 12), (12, 5)]
    np.testing.assert_array_equal(results[1], ARRAY.reshape(5, 12))


def test_results_carry_the_names_they_were_given():
    def fn(t):
        return [ops.rename(t, "renamed"), ops.init((2,), popxl.float32, "fresh"), ops.identity(t)]

    graph = popxl.Ir().create_graph(fn, SPEC)
    assert [t.name for t in graph.outputs] == ["renamed", "fresh", "identity"]


def test_shards_stay_shards_where_elements_keep_their_places():
    spec = popxl.TensorSpec((4,), popxl.float32, (2, 8))

    def fn(t):
        seed = popxl.constant([1, 2], popxl.uint32)
        return [
            ops.identity(t),
            ops.detach(t),
            ops.io_tile_copy(t),
            ops.dropout(t, seed, 0.5),
            ops.where(t, t, t),
            ops.print_tensor(t),
        ]

    assert {t.meta_shape for t in popxl.Ir().create_graph(fn, spec).outputs} == {(2, 8)}


# Places


def test_copies_between_places_are_marked_with_their_place():
    def fn(t):
        with popxl.ipu(0):
            x = t + 1.0
        y = ops.ipu_copy(x, 1)
        z = ops.ipu_copy(y, 3, 1)
        with popxl.io_tiles():
            w = x + 1.0
        return [x, y, z, w, ops.io_tile_copy(w), ops.io_tile_copy(z)]

    graph = popxl.Ir().create_graph(fn, SPEC)
    assert [t.ipu for t in graph.outputs[:3]] == [0, 1, 3]
    assert [t.tile_set for t in graph.outputs] == [
        "compute",
        "compute",
        "compute",
        "io",
        "compute",
        "io",
    ]


def test_code_is_always_loaded():
    ir = popxl.Ir()
    graph = ir.create_graph(lambda t: t, SPEC)
    with ir.main_graph:
        assert ops.remote_code_load(graph, "executable") is None
        with pytest.raises(ValueError, match="got the current graph 'main'"):
            ops.remote_code_load(ir.main_graph, "executable")
        with pytest.raises(NotImplementedError, match="expected 'executable'"):
            ops.remote_code_load(graph, "buffer")
        with pytest.raises(NotImplementedError, match="code_copy"):
            ops.code_copy(graph, "buffer", "executable")


# Printing


def printed(capfd, array, **options):
    _, (result,) = evaluate(lambda t: ops.print_tensor(t, **options), array)
    np.testing.assert_array_equal(result, array)
    return capfd.readouterr().err


def test_print_writes_the_value_under_its_name(capfd):
    assert printed(capfd, np.array([[1, 2], [3, 4]], np.int32)) == "print_t: [[1 2]\n [3 4]]\n"


def test_print_follows_its_form(capfd):
    array = np.array([1.5, 2.25], np.float32)
    text = printed(
        capfd,
        array,
        title="x",
        digits=2,
        float_format="fixed",
        separator=",",
        open_bracket="(",
        close_bracket=")",
    )
    assert text == "x: (1.50,2.25)\n"
    assert (
        printed(capfd, array, title="x", digits=1, float_format="scientific")
        == "x: [1.5e+00 2.2e+00]\n"
    )
    assert printed(capfd, array, title="x", float_format="none") == "x: [1.5 2.25]\n"
    assert printed(capfd, array, title="x", print_self=False) == ""


def test_print_summarises_large_tensors(capfd):
    text = printed(
        capfd, np.arange(100, dtype=np.int32), title="x", summarise_threshold=10, edge_items=2
    )
    assert text == "x: [ 0  1 ... 98 99]\n"


def test_print_shows_the_gradient_when_asked(capfd):
    from popxl.transforms.autodiff import autodiff

    graph = popxl.Ir().create_graph(
        lambda t: ops.print_tensor(t, "x", print_gradient=True),
        popxl.TensorSpec((2,), popxl.float32),
    )
    info = autodiff(graph)
    run_graph(info.graph, [torch.tensor([1.0, 2.0])])
    assert capfd.readouterr().err == "x_gradient: [1. 2.]\n"

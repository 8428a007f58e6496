"""Functions around the ops: Python operators, wrappers that choose among ops, and the checks of
`popxl.ops.utils`.
"""

import operator

import numpy as np
import popxl
import pytest
import torch
from helpers.interpreted import run_graph
from popxl import ops
from popxl.errors import DTypeError, UndefinedValue
from popxl.ops import collectives, utils, var_updates

X = np.array([[1.5, -2.0, 3.0], [0.5, 4.0, -1.0]], np.float32)
Y = np.array([2.0, -0.5, 1.25], np.float32)
INTEGERS = np.array([7, -7, 3], np.int32)
M = np.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]], np.float32)


def evaluate(fn, *arrays):
    """The results of a function of popxl tensors, and the inputs as they are afterwards."""
    graph = popxl.Ir().create_empty_graph("sample")
    with graph:
        inputs = [
            popxl.graph_input(a.shape, popxl.dtype.as_dtype(a.dtype), by_ref=True) for a in arrays
        ]
        result = fn(*inputs)
        for t in result if isinstance(result, tuple) else (result,):
            popxl.graph_output(t)
    tensors = [torch.from_numpy(a.copy()) for a in arrays]
    return [t.numpy() for t in run_graph(graph, tensors)], [t.numpy() for t in tensors]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "mod"])
@pytest.mark.parametrize("other", [2.0, Y, [2.0, 3.0, 0.5]], ids=["number", "array", "list"])
def test_arithmetic_operators_take_numbers_and_arrays_on_either_side(name, other):
    apply = getattr(operator, name)
    expected = np.fmod if name == "mod" else apply
    assert_all(
        evaluate(lambda x: (apply(x, other), apply(other, x)), X)[0],
        expected(X, other),
        expected(other, X),
    )


def assert_all(actual, *expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        np.testing.assert_allclose(a, e, rtol=1e-6)


def test_power_takes_a_number_an_array_or_a_tensor_and_may_be_reflected():
    base = np.abs(X)
    results, _ = evaluate(
        lambda x, y: (x**2, x**y, 2.0**x, ops.pow(x, [1.0, 2.0, 3.0]), ops.pow(x, 0.5)), base, Y
    )
    assert_all(
        results, base**2, base**Y, 2.0**base, base ** np.array([1.0, 2.0, 3.0]), np.sqrt(base)
    )


def test_matrix_operators_negation_and_in_place_addition():
    results, _ = evaluate(lambda x, m: (x @ m, x @ M, X @ m, -x), X, M)
    assert_all(results, X @ M, X @ M, X @ M, -X)

    def in_place(x, y):
        before = x
        x += y
        assert x is before
        return x

    results, (changed, _) = evaluate(in_place, X, Y)
    assert_all([*results, changed], X + Y, X + Y)


def test_integer_operators_truncate_and_keep_the_sign_of_the_dividend():
    results, _ = evaluate(lambda t: (t / 2, t % 2), INTEGERS)
    assert [r.tolist() for r in results] == [[3, -3, 1], [1, -1, 1]]


@pytest.mark.parametrize("divide", [ops.div, ops.fmod])
def test_integers_divided_by_a_computed_zero_are_refused_in_words(divide):
    with pytest.raises(ZeroDivisionError, match="got 0 in the divisor; expected other integers"):
        evaluate(divide, INTEGERS, INTEGERS * 0)


def test_logical_operators_are_those_of_python():
    a, b = np.array([True, True, False]), np.array([True, False, False])
    results, _ = evaluate(lambda p, q: (p & q, p | q, ~p, p & [False, True, True]), a, b)
    assert [r.tolist() for r in results] == [
        (a & b).tolist(),
        (a | b).tolist(),
        (~a).tolist(),
        [False, True, False],
    ]


def test_operators_of_different_dtypes_are_refused():
    with pytest.raises(DTypeError, match="expected equal dtypes"):
        evaluate(lambda x, i: x + i, Y, INTEGERS)


def test_operands_of_another_program_are_refused_by_its_number():
    programs = popxl.Ir(), popxl.Ir()
    tensors = []
    for ir in programs:
        with ir.main_graph:
            tensors.append(popxl.variable(1.0, name="x"))
    first, second = (ir.id for ir in programs)
    with (
        programs[1].main_graph,
        pytest.raises(ValueError, match=rf"%x.* of Ir {first}; expected .* of Ir {second}"),
    ):
        ops.add(tensors[1], tensors[0])


# Optimizer updates


MOMENTS = (np.array([0.1, -0.2, 0.3], np.float32), np.array([0.01, 0.2, 0.3], np.float32))
STEP = np.array(4.0, np.float32)


@pytest.mark.parametrize(
    "updater", [var_updates.adam_updater, var_updates.lamb_updater], ids=lambda f: f.__name__
)
def test_time_steps_count_in_place_before_they_are_used(updater):
    (update,), (_, _, step) = evaluate(
        lambda m, v, s: updater(m, v, time_step=s, beta1=0.9, beta2=0.99), *MOMENTS, STEP
    )
    m, v = MOMENTS[0] / (1 - 0.9**5), MOMENTS[1] / (1 - 0.99**5)
    assert step == 5
    np.testing.assert_allclose(update, m / (np.sqrt(v) + 1e-7), rtol=1e-6)


def test_adamax_counts_its_time_steps_too():
    (update,), (_, _, step) = evaluate(
        lambda m, v, s: var_updates.adamax_updater(m, v, time_step=s), *MOMENTS, STEP
    )
    assert step == 5
    np.testing.assert_allclose(update, MOMENTS[0] / (1 - 0.9**5) / (MOMENTS[1] + 1e-7), rtol=1e-6)


@pytest.mark.parametrize("mode", ["adam", "lamb", "adamax"])
def test_create_adamupdater_makes_the_update_of_its_mode(mode):
    betas = {"beta1": 0.9} if mode == "adamax" else {"beta1": 0.9, "beta2": 0.99}

    def both(m, v, s, other):
        direct = getattr(var_updates, f"{mode}_updater")(m, v, time_step=s, **betas)
        return direct, var_updates.create_adamupdater(
            m, v, {1: m, 2: v}, mode, time_step=other, **betas
        )

    (direct, created), _ = evaluate(both, *MOMENTS, STEP, STEP)
    np.testing.assert_array_equal(direct, created)


def test_create_adamupdater_refuses_another_mode():
    with pytest.raises(ValueError, match="'adam', 'lamb' or 'adamax'"):
        evaluate(lambda m, v: var_updates.create_adamupdater(m, v, {}, "sgd"), *MOMENTS)


def test_updates_have_the_weights_dtype_only_if_it_decays():
    def dtypes_of(weight_decay):
        with popxl.Ir().create_empty_graph("sample"):
            m, w = popxl.graph_input((3,), popxl.float32), popxl.graph_input((3,), popxl.float16)
            return var_updates.adam_updater(m, m, weight=w, weight_decay=weight_decay).dtype

    assert dtypes_of(0.1) is popxl.float16
    assert dtypes_of(0.0) is popxl.float32
    assert dtypes_of(None) is popxl.float32


def test_weight_decay_is_required_for_tensors_and_numbers_other_than_zero():
    with popxl.Ir().main_graph:
        assert var_updates.weight_decay_is_required(popxl.constant(0.0))
    assert var_updates.weight_decay_is_required(0.1)
    assert not var_updates.weight_decay_is_required(0.0)
    assert not var_updates.weight_decay_is_required(None)


# Helpers for programs with ops of their own


@pytest.fixture
def two_graphs():
    ir = popxl.Ir()
    graph, other = ir.create_empty_graph("a"), ir.create_empty_graph("b")
    with graph:
        mine = popxl.graph_input((2, 3), popxl.float32, "mine")
    with other:
        foreign = popxl.graph_input((2, 3), popxl.float32, "foreign")
    return graph, mine, foreign


def test_check_in_graph_names_the_tensor_and_its_graph(two_graphs):
    graph, mine, foreign = two_graphs
    utils.check_in_graph(graph, mine, w=mine)
    with pytest.raises(
        ValueError, match=r"got w = %foreign from graph 'b.*Pass it in as a graph input"
    ):
        utils.check_in_graph(graph, w=foreign)
    with pytest.raises(TypeError, match=r"got args\[0\] = float; expected a popxl.Tensor"):
        utils.check_in_graph(graph, 1.0)


@pytest.fixture
def placed(two_graphs):
    """(graph, a tensor of unknown place, results on device 0 and 1, a result on IO tiles)."""
    graph, mine, _ = two_graphs
    with graph:
        square = mine.T @ mine
        with popxl.ipu(0):
            first = square + 1.0
        with popxl.ipu(1):
            second = square + 2.0
        with popxl.io_tiles():
            loaded = ops.init((3, 3), popxl.float32)
    return graph, mine, first, second, loaded


def test_check_tensor_ipu_and_tile_set_refuses_two_places(placed):
    _, mine, first, second, loaded = placed
    utils.check_tensor_ipu_and_tile_set(a=first, b=first, c=mine)
    with pytest.raises(
        ValueError,
        match="a on virtual device 0, b on virtual device 1; expected one virtual device",
    ):
        utils.check_tensor_ipu_and_tile_set(a=first, b=second)
    with pytest.raises(
        ValueError, match="b on compute tiles, c on io tiles; expected one tile set"
    ):
        utils.check_tensor_ipu_and_tile_set(a=mine, b=first, c=loaded)


@pytest.mark.parametrize(
    "join", [ops.add, lambda a, b: ops.concat([a, b]), ops.scaled_add_, ops.matmul]
)
def test_operands_that_are_known_to_be_in_different_places_are_refused(placed, join):
    graph, mine, first, second, loaded = placed
    with graph:
        with pytest.raises(
            ValueError,
            match="virtual device 0, .* virtual device 1; .*Move operands with ops.ipu_copy",
        ):
            join(first, second)
        with pytest.raises(
            ValueError, match="compute tiles, .* io tiles; .*Move operands with ops.io_tile_copy"
        ):
            join(first, loaded)
        join(first, second.copy_to_ipu(0))
        join(first, ops.io_tile_copy(loaded))


def test_a_call_takes_arguments_from_everywhere_and_its_results_are_where_the_graph_leaves_them(
    placed,
):
    graph, _, first, second, loaded = placed
    with popxl.io_tiles(), graph.main_graph:
        inner = graph.ir.create_graph(
            lambda a, b, c: (ops.io_tile_copy(a + 1.0), c), first, second, loaded
        )
    with graph:
        results = ops.call(inner, first, second, loaded)
        assert results[0].tile_set == "compute"
        with pytest.raises(UndefinedValue, match="expected a known tile set"):
            _ = results[1].tile_set
        results[0] + first


def test_what_all_reduce_gives_to_each_device_is_on_that_device(placed):
    graph, _, first, second, _ = placed
    with graph:
        results = collectives.all_reduce([first, second])
        assert [t.ipu for t in results] == [0, 1]
        results[1] + second


def test_cast_if_needed_adds_no_op_for_the_same_dtype(two_graphs):
    graph, mine, _ = two_graphs
    with graph:
        assert utils.cast_if_needed(mine, popxl.float32) is mine
        assert utils.cast_if_needed(mine, popxl.float16).dtype is popxl.float16


def test_handle_negative_axis_counts_from_the_end(two_graphs):
    _, mine, _ = two_graphs
    assert [utils.handle_negative_axis(mine, axis) for axis in (0, 1, -1, -2)] == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="got axis 2"):
        utils.handle_negative_axis(mine, 2)

"""Views and references: what is written through one is seen through all, in calls and in loops."""

from collections.abc import Callable, Sequence

import numpy as np
import popxl
import pytest
from helpers.engine_runs import both, ones, prepare, run
from popart import popart_exception
from popxl import ops
from popxl.extensions import bfloat16
from popxl.ops import var_updates
from popxl.tensor import Tensor
from popxl_engine.lowering import outlining


def test_joined_views_that_nobody_writes_later_are_right() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        a, b = popxl.variable([1.0, 2.0], name="a"), popxl.variable([3.0], name="b")
        ops.add_(a, ones(2))
        joined = ops.concat_([a, b])
        return [joined * 2.0, joined]

    assert both(build)[1]["d2h_stream"] == [6, 8, 6]


@pytest.mark.parametrize(
    "dtype", [popxl.float32, popxl.float16, popxl.int32, popxl.uint32], ids=str
)
def test_what_is_written_to_joined_tensors_or_to_their_view_is_seen_in_all(
    dtype: popxl.dtype,
) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        a, b = (popxl.variable(v, dtype, name=n) for n, v in (("a", [[1, 2]]), ("b", [[3, 4]])))
        one = popxl.constant(np.ones((1, 2)), dtype)
        joined = ops.concat_([a, b.T_.reshape_((1, 2))], axis=-1)
        again = ops.concat_([ops.slice_(joined, 1, 3, axis=1), one * 5])
        ops.add_(ops.slice_(joined, 1, 4, 2, axis=1), one)
        seen = joined + again.reshape((1, 4))
        ops.add_(b, one)
        ops.var_updates.copy_var_update_(ops.slice_(again, 0, 1), one * 9)
        return [seen, joined, again]

    values = both(build)[0]
    # joined is 1 3 3 5 then, again 3 3 5 5
    assert values["d2h_stream"] == [[1 + 3, 3 + 3, 3 + 5, 5 + 5]]
    assert values["d2h_stream__1"] == [[1, 9, 9, 6]] and values["d2h_stream__2"] == [[9, 9], [5, 5]]
    assert values["a"] == [[1, 9]] and values["b"] == [[9, 6]]


def test_views_that_torch_has_none_for_are_written_through() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        v = popxl.variable(np.arange(6, dtype=np.float32).reshape(2, 3), name="v")
        columns = v.T_.reshape_((6,))
        backwards = ops.slice_(columns, step=-2)
        ops.add_(backwards, popxl.constant([10.0, 20.0, 30.0]))
        ops.add_(v, ones(2, 3))
        return [columns, backwards]

    values = both(build)[0]
    assert values["v"] == [[1, 2, 3], [34, 25, 16]]
    assert values["d2h_stream"] == [1, 34, 2, 25, 3, 16] and values["d2h_stream__1"] == [16, 25, 34]


@pytest.mark.parametrize("loop", [False, True])
def test_a_view_of_several_tensors_may_be_passed_by_reference(loop: bool) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def count(x: popxl.TensorByRef) -> None:
            ops.add_(x, ones(3))

        a, b = popxl.variable([1.0, 2.0], name="a"), popxl.variable([3.0], name="b")
        joined = ops.concat_([a, b])
        graph = ir.create_graph(count, joined)
        ops.repeat(graph, 3, joined) if loop else ops.call(graph, joined)
        return [a + 0.0, b + 0.0]

    first = both(build)[0]
    assert (first["d2h_stream"], first["d2h_stream__1"]) == (
        ([4, 5], [6]) if loop else ([2, 3], [4])
    )


def test_a_join_inside_a_loop_is_of_the_callers_tensors() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(a: popxl.TensorByRef, b: popxl.TensorByRef) -> None:
            joined = ops.concat_([a.T_.reshape_((4,)), b])
            ops.add_(joined, popxl.constant(np.arange(5, dtype=np.float32)))

        a, b = (
            popxl.variable(np.zeros((2, 2), np.float32), name="a"),
            popxl.variable([0.0], name="b"),
        )
        ops.repeat(ir.create_graph(body, a, b), 2, a.T_, b)
        return [a]

    assert both(build)[0]["a"] == [[0, 2], [4, 6]]


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.int32], ids=str)
@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("how", ["loop", "nested", "outlined"])
def test_a_tensor_lies_in_order_where_what_takes_it_by_reference_views_it(
    how: str, is_view: bool, dtype: popxl.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def add(y: popxl.TensorByRef) -> None:
            ops.add_(ops.reshape_(y, (6,)), popxl.constant(np.arange(6), dtype))

        def outer(y: popxl.TensorByRef) -> None:
            ops.repeat(ir.create_graph(add, y), 2, y)

        x = popxl.variable(np.arange(6).reshape(2, 3), dtype, name="x")
        y = ops.transpose(x + 1) if is_view else ops.transpose(x) * 2
        graph = ir.create_graph(outer if how == "nested" else add, y)
        ops.call(graph, y) if how == "outlined" else ops.repeat(graph, 3, y)
        return [y]

    if how == "outlined":
        for limit in ("MOST_INLINED", "MOST_INLINED_BELOW"):
            monkeypatch.setattr(outlining, limit, 0)
    both(build)


def test_a_write_to_a_view_that_shows_an_element_twice_is_ambiguous() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        a = popxl.variable([1.0, 2.0], name="a")
        joined = ops.concat_([a, ops.slice_(a, 0, 1)])
        ops.add_(joined, ones(3))
        return [joined]

    with pytest.raises(
        popart_exception,
        match="^Inplacing ambiguity detected. .*concat_.* shows an element more than",
    ):
        prepare(build)


def test_a_loop_may_take_a_join_and_a_part_of_it_by_reference() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: popxl.TensorByRef, y: popxl.TensorByRef) -> None:
            ops.add_(x, ops.concat([y, y]))

        a, b = popxl.variable([1.0], name="a"), popxl.variable([3.0], name="b")
        joined = ops.concat_([a, b])
        ops.repeat(ir.create_graph(body, joined, a), 65, joined, a)
        return []

    assert both(build, runs=1) == [{"a": [2.0**65], "b": [2.0**65 + 2]}]


def two_references(ir: popxl.Ir, a: Tensor, b: Tensor) -> popxl.Graph:
    def body(a: popxl.TensorByRef, b: popxl.TensorByRef) -> Tensor:
        var_updates.accumulate_(a, b)
        before = b + 0.0
        var_updates.accumulator_scale_(b, 3.0)
        return a + before

    return ir.create_graph(body, a, b)


@pytest.mark.parametrize("loop", [False, True])
def test_one_tensor_may_be_passed_by_reference_twice(loop: bool) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        v = popxl.variable([1.0, 2.0], name="v")
        graph = two_references(ir, v, v)
        if not loop:
            return ops.call(graph, v, v)
        outer = ir.create_empty_graph("outer")
        with outer:
            x, y = (popxl.graph_input((2,), popxl.float32, n, by_ref=True) for n in "xy")
            ops.call(graph, x, y)
        ops.repeat(outer, 2, v, v)
        return [v]

    assert both(build)[0]["v"] == ([36, 72] if loop else [6, 12])


def test_a_tensor_and_a_view_of_it_may_be_passed_to_a_call_by_reference() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        v = popxl.variable([[1.0, 2.0]], name="v")
        flat = v.reshape_((2,))
        graph = two_references(ir, flat, flat)
        return ops.call(graph, flat, v.reshape_((2,)))

    assert both(build)[0]["v"] == [[6, 12]]


def views_in_a_loop(count: int, joined: bool) -> Callable[[popxl.Ir], Sequence[Tensor]]:
    """A loop whose body gets two views of the same elements by reference, and writes to both."""

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(n: Tensor, x: popxl.TensorByRef, y: popxl.TensorByRef) -> Tensor:
            var_updates.accumulate_(x, y)
            ops.add_(y, n)
            return n + 1.0

        v, w = popxl.variable([[1.0, 2.0]], name="v"), popxl.variable([3.0, 4.0], name="w")
        a, b = v.reshape_((2,)), v.T_
        if joined:
            both = ops.concat_([w, v.reshape_((2,))])
            a, b = ops.slice_(both, 1, 3), w
        b = b.reshape_((2,))
        n = popxl.constant(1.0)
        return [*ops.repeat(ir.create_graph(body, n, a, b), count, n, a, b), v]

    return build


@pytest.mark.parametrize("joined", [False, True])
def test_a_loop_may_take_two_views_of_the_same_elements_by_reference(joined: bool) -> None:
    v, w = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    for n in (1, 2, 3):
        if joined:
            w[1], v[0] = w[1] + w[0], v[0] + w[1]
            w += n
        else:
            v = v + v + n
    found = both(views_in_a_loop(3, joined))[0]
    assert found["d2h_stream"] == 4 and found["v"] == [v.tolist()] and found["w"] == w.tolist()


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("count", [0, 1, 100])
@pytest.mark.parametrize("joined", [False, True])
def test_views_of_the_same_elements_may_be_passed_to_loops_of_any_length(
    joined: bool, count: int
) -> None:
    assert both(views_in_a_loop(count, joined))[0]["d2h_stream"] == 1 + count


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.int32])  # on the device and on the host
def test_loops_in_loops_may_take_views_that_were_written_between(dtype: popxl.dtype) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        one = popxl.constant(1, dtype)

        def inner(x: popxl.TensorByRef, reversed_y: popxl.TensorByRef, n: Tensor) -> None:
            ops.add_(reversed_y, x)
            ops.add_(x, n)

        def outer(x: popxl.TensorByRef, y: popxl.TensorByRef, n: Tensor) -> None:
            back = ops.slice_(y, step=-1, axis=1)
            ops.repeat(ir.create_graph(inner, x, back, n), 2, x, back, n)

        v = popxl.variable([[1, 2]], dtype, name="v")
        a, b = ops.add_(v.reshape_((1, 2)), one), ops.add_(v, one)
        ops.repeat(ir.create_graph(outer, a, b, one), 3, a, b, one)
        return []

    v = np.array([3, 4])
    for _ in range(6):
        v = v + v[::-1] + 1
    assert both(build, runs=1) == [{"v": [v.tolist()]}]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_carried_reference_is_the_callers_in_the_first_iteration_only(
    count: int, rounds: bool
) -> None:
    dtype = bfloat16 if rounds else popxl.float32

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: popxl.TensorByRef, y: popxl.TensorByRef) -> Tensor:
            ops.add_(x, popxl.constant(1.01, dtype))
            ops.add_(y, popxl.constant(10.01, dtype))
            return x * 0.5

        v = popxl.variable(np.ones((2, 2), np.float32), dtype, name="v")
        view = v.T_
        same = ops.repeat(ir.create_graph(body, v, v), count, v, v)
        return [*same, *ops.repeat(ir.create_graph(body, view, v), count, view, v)]

    found, wanted = (run(prepare(build, i, enableStochasticRounding=rounds)) for i in (False, True))
    assert found == wanted
    assert np.allclose(found["v"], 1 + count * 20.02 + (2.02 if count else 0), rtol=0.05)


def test_a_constant_that_is_written_is_fresh_in_every_run_and_call() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body() -> Tensor:
            c = ones(2)
            return ops.add_(c, c)

        graph = ir.create_graph(body)
        n = popxl.constant(1, popxl.int32)
        ops.add_(n, n)
        return [*ops.call(graph), *ops.call(graph), n]

    assert [list(values.values()) for values in both(build)] == [[[2, 2], [2, 2], 2]] * 2

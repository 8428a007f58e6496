"""What the engine does with a program: where it computes, what it drops, refuses and writes down."""

import gc
import linecache
import logging
import os
import re
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import numpy as np
import popxl
import pytest
import torch
from popart import popart_exception
from popxl import ops
from popxl.errors import GraphError
from popxl.extensions import bfloat16
from popxl.ops import var_updates
from popxl.values import Tensor
from popxl_engine.cache import save_source
from popxl_engine.engine import Engine
from popxl_engine.kernels.registry import KERNELS


def prepare(build: Callable[[popxl.Ir], Sequence[Tensor]], interpret: bool = False, **options: Any) -> Engine:
    """An engine for a main graph that is ``build(ir)``, whose results go to streams."""
    ir = popxl.Ir()
    for name, value in options.items():
        setattr(ir._pb_ir.getSessionOptions(), name, value)
    with ir.main_graph:
        for t in build(ir):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    return Engine(ir, range(1), interpret=interpret)


def run(engine: Engine) -> Dict[str, Any]:
    """Outputs and variables after a run."""
    outputs = {s: np.zeros((1, 1, *s.shape), s.dtype.as_numpy()) for s in engine.ir.get_all_d2h_streams()}
    engine.run({}, outputs)
    values: Dict[str, Any] = {
        s.tensor_id: outputs[s][0, 0].tolist() for s in sorted(outputs, key=lambda s: s.tensor_id)
    }
    values.update((v.name, engine.read(v).tolist()) for v in engine.ir.main_graph.variables)
    return values


def both(build: Callable[[popxl.Ir], Sequence[Tensor]], runs: int = 2) -> List[Dict[str, Any]]:
    """Values after each run, which are the interpreter's too."""
    engine, interpreter = prepare(build), prepare(build, interpret=True)
    found = [run(engine) for _ in range(runs)]
    assert found == [run(interpreter) for _ in range(runs)]
    return found


def source(engine: Engine) -> str:
    assert engine.program is not None
    return engine.program.source.text()


def ones(*shape: int) -> Tensor:
    return popxl.constant(np.ones(shape, np.float32))


# Where


def test_counters_offsets_and_seeds_are_computed_on_the_host() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((4,), popxl.float32, 4)
        for row in range(4):
            popxl.remote_variable(np.full(4, row, np.float32), buffer, row)

        def body(n: Tensor, seed: Tensor) -> Sequence[Tensor]:
            seed, own = ops.split_random_seed(seed)
            x = ops.dropout(ops.remote_load(buffer, n), own, 0.5)
            ops.remote_store(buffer, n, x)
            return n + 1, seed

        n, seed = popxl.constant(0, popxl.uint32), popxl.constant(np.array([3, 4], np.uint32))
        graph = ir.create_graph(body, n, seed)
        return ops.repeat(graph, 4, n, seed)

    text = source(prepare(build))
    assert re.search(r"host_add\w*\(", text) and re.search(r"host_split_random_seed\w*\(", text)
    assert not re.search(r"k_(add|split_random_seed)\w*\(", text)
    loads = [line for line in text.splitlines() if "k_remote_" in line]
    assert loads and not any("to_device" in line for line in loads)
    both(build)


def test_a_counter_that_the_device_changes_lives_on_the_device() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        n = popxl.variable(np.arange(3), popxl.int32)
        var_updates.copy_var_update_(n, ops.cast(ops.cast(n, popxl.float32) * 2.0, popxl.int32))
        return [n + 1]

    both(build)


# What is dropped


def test_a_temporary_is_dropped_after_its_last_use(monkeypatch: Any) -> None:
    alive, most = [], [0]
    plain = KERNELS["tanh"]

    def watched(t: torch.Tensor) -> torch.Tensor:
        result = plain(t)
        alive.append(weakref.ref(result))
        most[0] = max(most[0], sum(r() is not None for r in alive))
        return result

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: Tensor) -> Tensor:
            for _ in range(8):
                x = ops.tanh(x)
            return x

        x = popxl.variable(np.ones(4, np.float32))
        graph = ir.create_graph(body, x)
        (x,) = ops.call(graph, x)
        (x,) = ops.repeat(graph, 2, x)
        return [x]

    monkeypatch.setitem(KERNELS, "tanh", watched)
    run(prepare(build))
    # An op's operand and result, and in a loop the value that the iteration began with.
    assert len(alive) == 24 and most[0] <= 3
    assert not any(r() is not None for r in alive)


def test_what_nobody_reads_is_not_computed() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: Tensor) -> Sequence[Tensor]:
            return ops.exp(x), ops.tanh(x)

        x = popxl.variable(np.eye(3, dtype=np.float32))
        x @ x
        first, _ = ops.call(ir.create_graph(body, x), x)
        unread = ops.sin(x)
        unread += 1.0
        return [first]

    text = source(prepare(build))
    assert "k_exp" in text
    for name in ("matmul", "tanh", "sin", "add"):
        assert f"k_{name}" not in text
    both(build)


# Views and references


def test_joined_views_that_nobody_writes_later_are_right() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        a, b = popxl.variable([1.0, 2.0], name="a"), popxl.variable([3.0], name="b")
        ops.add_(a, ones(2))
        joined = ops.concat_([a, b])
        return [joined * 2.0, joined]

    assert both(build)[1]["d2h_stream"] == [6, 8, 6]


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16, popxl.int32, popxl.uint32], ids=str)
def test_what_is_written_to_joined_tensors_or_to_their_view_is_seen_in_all(dtype: popxl.dtype) -> None:
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
    assert values["d2h_stream"] == [[1 + 3, 3 + 3, 3 + 5, 5 + 5]]  # joined is 1 3 3 5 then, again 3 3 5 5
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
    assert (first["d2h_stream"], first["d2h_stream__1"]) == (([4, 5], [6]) if loop else ([2, 3], [4]))


def test_a_join_inside_a_loop_is_of_the_callers_tensors() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(a: popxl.TensorByRef, b: popxl.TensorByRef) -> None:
            joined = ops.concat_([a.T_.reshape_((4,)), b])
            ops.add_(joined, popxl.constant(np.arange(5, dtype=np.float32)))

        a, b = popxl.variable(np.zeros((2, 2), np.float32), name="a"), popxl.variable([0.0], name="b")
        ops.repeat(ir.create_graph(body, a, b), 2, a.T_, b)
        return [a]

    assert both(build)[0]["a"] == [[0, 2], [4, 6]]


def test_a_write_to_a_view_that_shows_an_element_twice_is_ambiguous() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        a = popxl.variable([1.0, 2.0], name="a")
        joined = ops.concat_([a, ops.slice_(a, 0, 1)])
        ops.add_(joined, ones(3))
        return [joined]

    with pytest.raises(popart_exception, match="^Inplacing ambiguity detected. .*concat_.* shows an element more than"):
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


@pytest.mark.parametrize("count", [0, 1, 100])
@pytest.mark.parametrize("joined", [False, True])
def test_views_of_the_same_elements_may_be_passed_to_loops_of_any_length(joined: bool, count: int) -> None:
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
def test_a_carried_reference_is_the_callers_in_the_first_iteration_only(count: int, rounds: bool) -> None:
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


# Messages


@pytest.mark.parametrize("interpret", [False, True])
def test_an_error_in_a_kernel_names_op_graph_and_line(interpret: bool, monkeypatch: Any) -> None:
    def broken(t: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the kernel broke")

    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def layer(x: Tensor) -> Tensor:
            return ops.tanh(x * 2.0)

        x = popxl.variable([1.0], name="x")
        return ops.repeat(ir.create_graph(layer, x), 2, x)

    monkeypatch.setitem(KERNELS, "tanh", broken)
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "ops.tanh(x * 2.0)" in text)
    words = (
        r"while executing %tanh = tanh\(%mul\) in graph 'layer_subgraph\(0\)', built at "
        rf".*{Path(__file__).name}:{line}: the kernel broke"
    )
    with pytest.raises(ArithmeticError, match=words) as caught:
        run(prepare(build, interpret))
    assert str(caught.value).count("while executing") == 1
    if not interpret:
        shown = "".join(traceback.format_exception(caught.value))
        assert re.search(rf"k_tanh\w*\(mul_\w+\)  # tanh, .*:{line}", shown)


@pytest.mark.parametrize("offset", [3, -1])
@pytest.mark.parametrize("through", ["int", "tensor", "call", "loop"])
def test_a_constant_offset_outside_its_buffer_is_found_before_the_first_run(offset: int, through: str) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)

        def load(n: Tensor) -> Tensor:
            return ops.remote_load(buffer, n)

        def store(x: Tensor, n: Tensor) -> Tensor:
            ops.remote_store(buffer, n, x)
            return x * 2.0

        n = popxl.constant(offset, popxl.int32)
        if through == "int":
            return [ops.remote_load(buffer, offset)]
        if through == "tensor":
            return [ops.remote_load(buffer, n)]
        if through == "call":
            return ops.call(ir.create_graph(load, n), n)
        return ops.repeat(ir.create_graph(store, ones(2), n), 2, ones(2), n)

    words = (
        rf"remote_(load|store)\(.*built at .*:\d+: got offset {offset}; expected 0 <= offset < 3 entries of remote "
        "buffer 1|remote_load: got offset -1; expected at least 0"
    )
    with pytest.raises(GraphError, match=words):
        prepare(build)


def test_an_offset_that_is_counted_is_found_when_it_is_reached() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)

        def body(n: Tensor) -> Tensor:
            ops.remote_store(buffer, n, ones(2))
            return n + 1

        n = popxl.constant(0, popxl.int32)
        return ops.repeat(ir.create_graph(body, n), 4, n)

    engine = prepare(build)
    with pytest.raises(IndexError, match=r"remote_store.*got offset 3; expected 0 <= offset < 3 entries"):
        run(engine)


def test_a_counter_that_starts_outside_and_is_changed_in_place_is_not_refused() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        popxl.remote_variable([1.0, 2.0], buffer, 2)
        n = popxl.constant(7, popxl.int32)
        ops.add_(n, popxl.constant(-5, popxl.int32))
        return [ops.remote_load(buffer, n)]

    assert both(build)[0]["d2h_stream"] == [1, 2]


# The cache folder


def small(ir: popxl.Ir) -> Sequence[Tensor]:
    return [ops.tanh(popxl.variable([1.0], name="x"))]


def test_generated_source_is_written_to_the_cache_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    engine = prepare(small, enableEngineCaching=True, cachePath=str(folder))
    prepare(small, enableEngineCaching=True, cachePath=str(folder))
    (path,) = folder.iterdir()
    assert path.name.startswith("program_") and path.suffix == ".py"
    text = path.read_text()
    assert text == source(engine) and re.search(
        r"tanh_\w+ = k_tanh\w*\(x_\w+\)  # tanh, .*test_engine_behaviour.py:", text
    )
    compile(text, str(path), "exec")


def test_the_environment_names_the_cache_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    run(prepare(small))
    assert len(list(tmp_path.glob("program_*.py"))) == 1


def test_without_a_cache_folder_nothing_is_written_and_nothing_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    engine = prepare(small, cachePath=str(tmp_path))
    assert engine.program is not None
    name = engine.program.filename
    assert not list(tmp_path.iterdir()) and linecache.getline(name, 1).startswith("def ")
    del engine
    gc.collect()
    assert name not in linecache.cache


def test_a_cache_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "popxl"):
        run(prepare(small, enableEngineCaching=True, cachePath=str(tmp_path / "file" / "cache")))
    assert "could not be written to" in caplog.text and "going on without" in caplog.text


def test_threads_that_write_the_same_source_at_a_time_leave_it_whole(tmp_path: Path, monkeypatch: Any) -> None:
    all_have_written, replace = threading.Barrier(4), os.replace

    def replace_together(part: Path, path: Path) -> None:
        all_have_written.wait(timeout=10)
        replace(part, path)

    monkeypatch.setattr(os, "replace", replace_together)
    with ThreadPoolExecutor(4) as threads:
        written = set(threads.map(lambda _: save_source(tmp_path, "x = 1\n"), range(4)))
    (path,) = written
    assert path is not None and path.read_text() == "x = 1\n" and list(tmp_path.iterdir()) == [path]

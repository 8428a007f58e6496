"""What the engine does with a program: where it computes, what it drops, refuses and writes
down.
"""

import gc
import linecache
import logging
import math
import os
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.engine_runs import both, ones, prepare, run, source
from popxl import ops
from popxl.errors import GraphError
from popxl.ops import var_updates
from popxl.tensor import Tensor
from popxl_engine.cache import save_source
from popxl_engine.codegen.op_writer import is_literal
from popxl_engine.kernels.registry import KERNELS
from popxl_engine.lowering import inlining

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
    loads = [line for line in text.splitlines() if "r.remote_" in line]
    assert loads and not any("to_device" in line for line in loads)
    both(build)


def test_a_counter_that_the_device_changes_lives_on_the_device() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        n = popxl.variable(np.arange(3), popxl.int32)
        var_updates.copy_var_update_(n, ops.cast(ops.cast(n, popxl.float32) * 2.0, popxl.int32))
        return [n + 1]

    both(build)


def test_all_counters_that_the_device_changes_move_there_at_once(monkeypatch: Any) -> None:
    def counted(counters: int) -> Callable[[popxl.Ir], Sequence[Tensor]]:
        def build(ir: popxl.Ir) -> Sequence[Tensor]:
            def count(n: popxl.TensorByRef) -> None:
                var_updates.accumulate_(n, popxl.constant(1, popxl.int32))

            found = [popxl.variable(i, popxl.int32) for i in range(counters)]
            graph = ir.create_graph(count, found[0])
            for i, n in enumerate(found):
                ops.call(graph, n) if i % 2 else ops.repeat(graph, 2, n)
            return found

        return build

    def lowerings(counters: int) -> int:
        lowered.clear()
        prepare(counted(counters))
        return lowered.count("main")

    lowered: list[str] = []
    inliner = inlining.Inliner

    def noted(program: Any, name: str) -> inlining.Inliner:
        lowered.append(name)
        return inliner(program, name)

    monkeypatch.setattr(inlining, "Inliner", noted)
    assert lowerings(20) == lowerings(2)
    both(counted(5))


def test_a_single_piece_and_a_single_seed_have_their_shapes_on_the_host() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        (x,) = ops.split(popxl.constant(np.arange(4), popxl.int32), 1)
        (seed,) = ops.split_random_seed(popxl.constant(np.array([3, 4], np.uint32)), 1)
        return [x[1:3] + 1, seed[1:]]

    text = source(prepare(build))
    assert re.search(r"host_split\w*\(", text) and re.search(r"host_slice\w*\(", text)
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
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "ops.tanh(x * 2.0)" in text
    )
    words = (
        r"while executing %tanh = tanh\(%mul\) in graph '.*\.build\.layer_subgraph\(0\)', built at "
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
def test_a_constant_offset_outside_its_buffer_is_found_before_the_first_run(
    offset: int, through: str
) -> None:
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
    with pytest.raises(
        IndexError, match=r"remote_store.*got offset 3; expected 0 <= offset < 3 entries"
    ):
        run(engine)


def test_a_counter_that_starts_outside_and_is_changed_in_place_is_not_refused() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        popxl.remote_variable([1.0, 2.0], buffer, 2)
        n = popxl.constant(7, popxl.int32)
        ops.add_(n, popxl.constant(-5, popxl.int32))
        return [ops.remote_load(buffer, n)]

    assert both(build)[0]["d2h_stream"] == [1, 2]


def test_offsets_of_one_element_are_numbers_as_scalars_are() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 4)

        def body(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            ops.remote_store(buffer, n, x)
            return n + 1, ops.remote_load(buffer, n) * 2

        first = popxl.constant([0], popxl.int32)
        ops.repeat(ir.create_graph(body, first, ones(2)), 4, first, ones(2))
        filled = ops.remote_load_(buffer, popxl.constant([2], popxl.int32), ones(2))
        return [filled, ops.remote_load(buffer, popxl.constant([[3]], popxl.uint32))]

    found = both(build)[0]
    assert [list(value) for value in found.values()] == [[4, 4], [8, 8]]


def test_a_row_may_hold_its_own_number() -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        numbers = popxl.remote_buffer((1,), popxl.int32, 4)

        def body(n: Tensor) -> Tensor:
            ops.remote_store(numbers, n, n)
            return n + 1

        n = popxl.constant([0], popxl.int32)
        ops.repeat(ir.create_graph(body, n), 4, n)
        return [ops.remote_load(numbers, row) for row in range(4)]

    assert list(both(build)[0].values()) == [[0], [1], [2], [3]]


# Names


@pytest.mark.parametrize("name", ["path", "start"])
def test_a_tensor_may_have_the_name_of_what_the_source_makes_itself(name: str) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        numbered = []
        for i in range(40):
            with popxl.name_scope(f"scope_{i}"):
                numbered.append(popxl.variable(np.full(2, i, np.float32), name=name))
        w = popxl.variable(np.ones(4, np.float16))

        def body(w: popxl.TensorByRef) -> None:
            ops.add_(w, popxl.constant(np.full(4, 0.01), popxl.float16))

        ops.repeat(ir.create_graph(body, w), 3, w)
        return [ops.sum(ops.concat(numbered))]

    engine = prepare(build, enableStochasticRounding=True)
    assert run(engine)["d2h_stream"] == 2 * sum(range(40))
    assert re.search(rf"\b{name}_\d+\b", source(engine))


@pytest.mark.parametrize(
    "name", ["x²", "½", "ﬁ", "２", "日本", "a b", "def", "", "a\n    raise", "a\r#", "a\u2028b\0"]
)
def test_names_may_hold_any_characters(name: str) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        with popxl.name_scope(name):
            x = popxl.variable([1.0], name=name) * 2.0
        graph = ir.create_empty_graph(name)
        with graph:
            popxl.graph_output(popxl.graph_input((1,), popxl.float32, name) * 2.0)
        return ops.repeat(graph, 3, x)

    both(build)
    engine = prepare(build)
    assert engine.program is not None
    assert all(n.isascii() for n in engine.program._main.__code__.co_varnames)


# The cache folder


def small(ir: popxl.Ir) -> Sequence[Tensor]:
    return [ops.tanh(popxl.variable([1.0], name="x"))]


class Axis(IntEnum):
    """An axis with a name."""

    LAST = 1


@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x: ops.scaled_add(x, x, a=-np.float64(0.5)), [[0.5, 1], [1.5, 2]]),
        (lambda x: ops.scaled_add(x, x, True, np.False_), [[1, 2], [3, 4]]),
        (lambda x: ops.var_updates.accumulate_(x, x, True), [[2, 4], [6, 8]]),
        (lambda x: ops.mean(x, np.int64(1)), [1.5, 3.5]),
        (lambda x: ops.mean(x, Axis.LAST), [1.5, 3.5]),
        (lambda x: ops.max(x, [np.int64(0)], keepdims=np.True_), [[3, 4]]),
        (lambda x: ops.max(x, 0, keepdims=1), [[3, 4]]),
        (lambda x: ops.print_tensor(x, np.str_("x")), [[1, 2], [3, 4]]),
        (lambda x: ops.histogram(x, list(np.linspace(0, 4, 3)), False), [0, 1, 2, 1]),
        (lambda x: ops.histogram(x, [2.0, math.inf], False), [1, 3, 0]),
    ],
)
def test_numbers_of_numpy_and_of_enumerations_are_numbers(fn: Any, expected: list) -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        into = popxl.h2d_stream((2, 2), popxl.float32)
        result = fn(ops.host_load(into))
        out = popxl.d2h_stream(result.shape, result.dtype)
        ops.host_store(out, result)
    with popxl.Session(ir) as session:
        found = session.run({into: np.array([[1, 2], [3, 4]], np.float32)})[out]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "value", [1, -0.5, True, "a'b", None, (1, (2.0, "c")), (), np.float64(1), Axis.LAST, math.inf]
)
@pytest.mark.parametrize("inside", [False, True])
def test_source_holds_only_what_its_text_says(value: Any, inside: bool) -> None:
    value = (value,) if inside else value
    plain = not isinstance(value[0] if inside else value, (np.float64, Axis))
    assert is_literal(value) == (plain and "inf" not in repr(value))
    assert not is_literal(value) or eval(repr(value), {}) == value


def test_generated_source_is_written_to_the_cache_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    engine = prepare(small, enableEngineCaching=True, cachePath=str(folder))
    prepare(small, enableEngineCaching=True, cachePath=str(folder))
    (path,) = folder.iterdir()
    assert path.name.startswith("program_") and path.suffix == ".py"
    text = path.read_text()
    assert text == source(engine) and re.search(
        r"tanh_\w+ = k_tanh\w*\(x_\w+\)  # tanh, .*test_behaviour.py:", text
    )
    compile(text, str(path), "exec")


def test_the_environment_names_the_cache_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path))
    run(prepare(small))
    assert len(list(tmp_path.glob("program_*.py"))) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_loop_that_runs_once_is_no_loop(count: int) -> None:
    def build(ir: popxl.Ir) -> Sequence[Tensor]:
        def body(x: Tensor, total: popxl.TensorByRef) -> Tensor:
            ops.add_(total, x)
            return x * 2.0

        x, total = popxl.variable([1.5], name="x"), popxl.variable([0.0], name="total")
        return ops.repeat(ir.create_graph(body, x, total), count, x, total)

    both(build)
    assert source(prepare(build)).count("for _ in range") == count - 1


def test_without_a_cache_folder_nothing_is_written_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: Any
) -> None:
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


def test_threads_that_write_the_same_source_at_a_time_leave_it_whole(
    tmp_path: Path, monkeypatch: Any
) -> None:
    all_have_written, replace = threading.Barrier(4), os.replace

    def replace_together(part: Path, path: Path) -> None:
        all_have_written.wait(timeout=10)
        replace(part, path)

    monkeypatch.setattr(os, "replace", replace_together)
    with ThreadPoolExecutor(4) as threads:
        written = set(threads.map(lambda _: save_source(tmp_path, "x = 1\n"), range(4)))
    (path,) = written
    assert path is not None and path.read_text() == "x = 1\n" and list(tmp_path.iterdir()) == [path]

"""Remote rows have memory as long as somebody may ask for what is in them, and numbers never
tell.
"""

from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.engine_programs import corpus
from helpers.engine_runs import both, engine_of, ones
from helpers.random_programs import COUNTED, Built, build
from popxl import ops
from popxl.context import _execution_context
from popxl_engine import residency
from popxl_engine.engine import Engine
from popxl_engine.machine.lifetimes import RULES, Lifetimes
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.replica import Replica
from popxl_engine.passes import LEGALIZATION

RUNS = 3
KINDS = (
    "add",
    "add_",
    "reshape_",
    "call",
    "repeat",
    "load",
    "store",
    "store",
    "load_change_store",
    "load_",
    "give",
)


def observe(built: Built, interpret: bool, readable: bool) -> list[dict[str, np.ndarray]]:
    """Every output after each of some runs, every variable on the device, and where they are
    readable all rows.
    """
    replicas = built.ir.replication_factor
    engine = Engine(built.ir, range(replicas), None if interpret else LEGALIZATION)
    seen = []
    for _ in range(RUNS):
        outputs = {
            s: np.zeros((1, replicas, *s.shape), s.dtype.as_numpy())
            for s in built.ir.get_all_d2h_streams()
        }
        engine.run({s: a.copy() for s, a in built.inputs.items()}, outputs)
        values = {s.tensor_id: a for s, a in outputs.items()}
        for v in built.ir.main_graph.variables:
            if v.location_info is None or readable:
                values[v.name] = engine.read(v)
        seen.append(values)
    return seen


def differs(program: Any, readable: bool, replicas: int = 1) -> bool:
    """Whether a program's numbers are not the interpreter's."""
    expected = observe(build(*program, replicas), True, readable)
    found = observe(build(*program, replicas), False, readable)
    pairs = [(a[n], b[n]) for a, b in zip(expected, found) for n in a]
    return any(not np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def with_rules(monkeypatch: Any, rules: frozenset[str], readable: bool) -> None:
    """Let sessions decide by some of the rules; with ``readable=False`` as if no row was a
    variable.
    """

    def lifetimes(events: Any, rows: Any) -> Lifetimes:
        return Lifetimes(events, rows if readable else frozenset(), rules)

    monkeypatch.setattr(residency, "Lifetimes", lifetimes)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "readable, replicas",
    [(True, 1), (False, 1), (False, 2)],
)
def test_rows_whose_memory_is_released_change_no_number(
    readable: bool, replicas: int, monkeypatch: Any
) -> None:
    with_rules(monkeypatch, RULES, readable)
    given_up: list[int] = []
    original = Rows.release

    def counting(self: Rows, index: int) -> None:
        given_up.append(index)
        original(self, index)

    monkeypatch.setattr(Rows, "release", counting)
    assert not any(differs(program, readable, replicas) for program in corpus(20, KINDS))
    assert len(given_up) > 200


@pytest.mark.slow
def test_rows_whose_numbers_are_counted_change_no_number() -> None:
    assert not any(differs(program, True) for program in corpus(20, KINDS + COUNTED * 2))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_any_one_rule_some_program_goes_wrong(rule: str, monkeypatch: Any) -> None:
    readable = rule == "readable"
    with_rules(monkeypatch, RULES - {rule}, readable)
    assert any(differs(program, readable) for program in corpus(100, KINDS))


LAYERS, SHAPE = 5, (3, 4)


class Layered:
    """Layers put a tensor each into a row, which is read in reverse order; what comes of it goes to
    other rows.
    """

    def __init__(self, variables: bool = True) -> None:
        self.ir = popxl.Ir()
        with self.ir.main_graph, popxl.in_sequence():
            self.kept, self.results = (
                popxl.remote_buffer(SHAPE, popxl.float32, LAYERS) for _ in range(2)
            )
            self.variables = [
                popxl.remote_variable(np.full(SHAPE, 7, np.float32), self.results, n)
                for n in range(LAYERS * variables)
            ]
            self.inputs = popxl.h2d_stream(SHAPE, popxl.float32)
            first, last = popxl.constant(0, popxl.uint32), popxl.constant(LAYERS - 1, popxl.uint32)
            x = ops.host_load(self.inputs)
            forward = self.ir.create_graph(self.forward, first, x)
            _, y = ops.repeat(forward, LAYERS, first, x)
            ops.repeat(self.ir.create_graph(self.backward, last, y), LAYERS, last, y)
        self.engine = engine_of(self.ir)
        self.rows: Any = self.engine.machine.replicas[0].rows

    def forward(self, n: popxl.Tensor, x: popxl.Tensor) -> Any:
        ops.remote_store(self.kept, n, x)
        return n + 1, x * 2

    def backward(self, n: popxl.Tensor, dy: popxl.Tensor) -> Any:
        dx = dy + ops.remote_load(self.kept, n)
        ops.remote_store(self.results, n, dx)
        return n - 1, dx

    def run(self, start: float) -> None:
        """A run on a tensor of one number."""
        self.engine.run({self.inputs: np.full((1, 1, *SHAPE), start, np.float32)}, {})

    def expected(self, start: float) -> list[float]:
        """What is in the rows of results after it."""
        return [start * (2**LAYERS + sum(2**i for i in range(n, LAYERS))) for n in range(LAYERS)]


def test_rows_of_one_run_have_no_memory_after_their_last_load() -> None:
    program = Layered()
    for start in (1.0, -3.0):
        program.run(start)
        assert program.rows[program.kept].held_bytes == 0
        assert program.rows[program.results].held_bytes == program.rows[program.results].nbytes
        found = [program.engine.read(v) for v in program.variables]
        np.testing.assert_array_equal(found, [np.full(SHAPE, e) for e in program.expected(start)])


def test_what_nobody_ever_reads_has_no_memory() -> None:
    program = Layered(variables=False)
    program.run(1.0)
    assert (
        not program.rows[program.kept].held_bytes and not program.rows[program.results].held_bytes
    )


def test_what_the_host_may_read_lasts_until_the_next_run_begins(monkeypatch: Any) -> None:
    program = Layered()
    program.run(1.0)
    held: list[int] = []
    original = Rows.donate

    def seen(self: Rows, index: int, tensors: Any) -> None:
        held.append(program.rows[program.results].held_bytes)
        original(self, index, tensors)

    monkeypatch.setattr(Rows, "donate", seen)
    program.run(2.0)
    row = 4 * int(np.prod(SHAPE))
    assert held == [0] * LAYERS + [n * row for n in range(LAYERS)]


def test_a_run_after_one_that_failed_starts_afresh(monkeypatch: Any) -> None:
    program = Layered()
    program.run(1.0)
    original = Rows.donate

    def failing(self: Rows, index: int, tensors: Any) -> None:
        if self is program.rows[program.results] and index == 2:
            raise RuntimeError("no more")
        original(self, index, tensors)

    with monkeypatch.context() as patches:
        patches.setattr(Rows, "donate", failing)
        with pytest.raises(RuntimeError, match="no more"):
            program.run(2.0)
    found = [program.engine.read(v)[0, 0] for v in program.variables]
    assert found == [0, 0, 0, *program.expected(2.0)[3:]], (
        "what the failed run has not written is zeros"
    )
    program.run(3.0)
    assert [program.engine.read(v)[0, 0] for v in program.variables] == program.expected(3.0)


def test_rows_whose_numbers_are_not_known_before_keep_their_memory() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer(SHAPE, popxl.float32, 2)
        number = popxl.variable(1, popxl.uint32)
        ops.remote_store(buffer, number, popxl.constant(np.ones(SHAPE, np.float32)))
        ops.host_store(popxl.d2h_stream(SHAPE, popxl.float32), ops.remote_load(buffer, number))
    engine = engine_of(ir)
    (stream,) = ir.get_all_d2h_streams()
    engine.run({}, {stream: np.zeros((1, 1, *SHAPE), np.float32)})
    (rows,) = engine.machine.replicas[0].rows.values()
    assert isinstance(rows, Rows) and rows.held_bytes == rows.row_bytes


def by_two(n: popxl.Tensor) -> None:
    """A counter's advance through a view of it."""
    ops.add_(n.reshape_(()), popxl.constant(2, popxl.int32))


def by_two_in_a_loop(n: popxl.Tensor) -> None:
    """A counter's advance by a loop that does nothing else."""

    def advance(n: popxl.TensorByRef) -> None:
        ops.add_(n, popxl.constant([1], popxl.int32))

    ops.repeat(popxl.gcg().ir.create_graph(advance, n), 2, n)


def by_a_variable(n: popxl.Tensor) -> None:
    """A counter's advance by what is not known before."""
    ops.add_(n, popxl.variable([2], popxl.int32))


def by_a_variable_in_a_call(n: popxl.Tensor) -> None:
    """The same by a graph that takes both."""

    def advance(n: popxl.TensorByRef, step: popxl.Tensor) -> None:
        ops.add_(n, step)

    step = popxl.variable([2], popxl.int32)
    ops.call(popxl.gcg().ir.create_graph(advance, n, step), n, step)


@pytest.mark.parametrize(
    "advance", [by_two, by_two_in_a_loop, by_a_variable, by_a_variable_in_a_call]
)
def test_rows_that_a_counter_in_place_leaves_alone_last(advance: Any) -> None:
    def program(ir: popxl.Ir) -> list[popxl.Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        popxl.remote_variable(np.array([5, 6], np.float32), buffer, 0)
        n = popxl.constant([0], popxl.int32)
        advance(n)
        ops.remote_store(buffer, n, ones(2))
        return [ops.remote_load(buffer, 0)]

    first, _ = both(program)
    assert [5, 6] in first.values()


def test_a_loop_whose_counter_advances_through_a_view_runs() -> None:
    def program(ir: popxl.Ir) -> list[popxl.Tensor]:
        buffer = popxl.remote_buffer((2,), popxl.float32, 4)

        def body(n: popxl.TensorByRef, x: popxl.Tensor) -> None:
            ops.remote_store(buffer, n, x)
            ops.add_(n.reshape_(()), popxl.constant(1, popxl.int32))

        n, x = popxl.constant([0], popxl.int32), ones(2)
        ops.repeat(ir.create_graph(body, n, x), 4, n, x)
        return [ops.remote_load(buffer, row) for row in range(4)]

    both(program)


def test_a_branch_that_does_not_run_may_ask_for_a_row_that_is_not_there() -> None:
    def program(ir: popxl.Ir) -> Any:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        for row in range(3):
            popxl.remote_variable(np.full(2, row, np.float32), buffer, row)

        def divided(n: popxl.Tensor, k: popxl.Tensor) -> popxl.Tensor:
            return ops.remote_load(buffer, ops.div(n, k))

        def plain(n: popxl.Tensor, k: popxl.Tensor) -> popxl.Tensor:
            return ops.remote_load(buffer, n)

        given = popxl.constant(2, popxl.int32), popxl.constant(0, popxl.int32)
        divides = ops.greater(popxl.variable(1.0), popxl.constant(5.0))
        graphs = ir.create_graph(divided, *given), ir.create_graph(plain, *given)
        return ops.conditional(divides, *graphs, given, given)

    both(program)


@pytest.mark.parametrize("interpret", [True, False])
def test_what_runs_after_an_upload_finds_what_the_last_run_left(interpret: bool) -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer(SHAPE, popxl.float32, 1)
        x = popxl.variable(np.ones(SHAPE, np.float32))
        found = popxl.variable(np.zeros(SHAPE, np.float32))
        with _execution_context(popxl.ExecutionContext.WeightsFromHostFragment):
            ops.var_updates.copy_var_update_(found, ops.remote_load(buffer, 0))
        ops.add_(x, x)
        ops.remote_store(buffer, 0, x)
    engine = engine_of(ir, interpret)
    engine.machine.replicas[0].rows[buffer].store(0, torch.zeros(SHAPE))
    seen = []
    for _ in range(3):
        engine.run({}, {})
        engine.upload()
        seen.append(engine.read(found)[0, 0])
    assert seen == [0, 2, 4]


def test_a_run_in_another_order_is_noticed() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((1,), popxl.float32, 2)
    lifetimes = Lifetimes(
        [((buffer, 0), True), ((buffer, 1), True), ((buffer, 0), False)], frozenset()
    )
    assert lifetimes.over_after == {2: (buffer, 1), 3: (buffer, 0)}
    replica = Replica(0, {buffer: Rows((1,), torch.float32, 2)})
    with replica.forgetting(lifetimes):
        replica.remote_load(buffer, 0)
        with pytest.raises(AssertionError, match="in the order that was found before"):
            replica.remote_load(buffer, 0)


def test_a_row_that_is_given_up_is_zeros_and_leaves_what_was_borrowed_as_it_is() -> None:
    rows, array = Rows((6,), torch.float32, 2), np.ones(6, np.float32)
    rows.store(0, torch.ones(6))
    rows.adopt(1, torch.from_numpy(array))
    borrowed = rows.load(0)
    for index in (0, 1):
        rows.release(index)
    assert borrowed.tolist() == [1] * 6 and rows.held_bytes == array.nbytes, (
        "a caller's memory stays a row"
    )
    assert rows.load(0).tolist() == [0] * 6 and rows.load(1).tolist() == [1] * 6
    rows.release(0)
    rows.store(0, torch.full((6,), 2.0))
    assert rows.load(0).tolist() == [2] * 6

"""Ops recorded with the transfers of weights: what programs see of them, and what is refused."""

import numpy as np
import popxl
import pytest
from popxl import ops
from popxl.context import _execution_context
from popxl.extensions import (
    device_needs,
    host_needs,
    keep_remote_memory_in_files,
    keep_state_once,
    limit_device_memory,
    plan,
    replica_digests,
    sequence,
    verify,
)

FROM_HOST = popxl.ExecutionContext.WeightsFromHostFragment
TO_HOST = popxl.ExecutionContext.WeightsToHostFragment
START = np.array([1, 2], np.float32)


def kept_in_a_row(store=True, slot=0):
    """State in a remote row that each run doubles: (ir, input, output, variable of the row)."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        variable = popxl.remote_variable(START, buffer, 0)
        if store:
            # Recorded before the program's own ops, and of a tensor that they change.
            with popxl.in_sequence(), _execution_context(FROM_HOST):
                state = ops.remote_load(buffer, 0)
            with popxl.in_sequence(), _execution_context(TO_HOST):
                ops.remote_store(buffer, slot, state)
        else:
            with _execution_context(FROM_HOST):
                state = ops.remote_load(buffer, 0)
        inputs, outputs = (
            popxl.h2d_stream((2,), popxl.float32),
            popxl.d2h_stream((2,), popxl.float32),
        )
        ops.add_(state.reshape_((1, 2)), ops.host_load(inputs).reshape((1, 2)))
        ops.host_store(outputs, state)
    return ir, inputs, outputs, variable


def test_state_in_remote_rows_is_kept_from_run_to_run_and_read_by_the_host():
    ir, inputs, outputs, variable = kept_in_a_row()
    one = {inputs: np.ones(2, np.float32)}
    session = popxl.Session(ir)
    assert [op.definition.name for op in ir.main_graph.ops][0] == "remote_load"
    assert [op.definition.name for op in ir.main_graph.ops][-1] == "remote_store"
    verify(ir)
    with session:
        for run in (1, 2):
            np.testing.assert_array_equal(session.run(one)[outputs], START + run)
        np.testing.assert_array_equal(session.get_tensor_data(variable), START + 2)
        session.write_variable_data(variable, np.zeros(2, np.float32))
        np.testing.assert_array_equal(session.run(one)[outputs], [1, 1])
    with session:
        np.testing.assert_array_equal(session.run(one)[outputs], [2, 2])
    np.testing.assert_array_equal(session.get_tensor_data(variable), [2, 2])


def test_weights_from_host_goes_back_to_the_hosts_state():
    ir, inputs, outputs, variable = kept_in_a_row()
    one = {inputs: np.ones(2, np.float32)}
    with popxl.Session(ir, weights_to_host_on_exit=False) as session:
        session.run(one)
        session.weights_from_host()
        np.testing.assert_array_equal(session.run(one)[outputs], START + 1)
        session.weights_to_host()
        session.weights_from_host()
        np.testing.assert_array_equal(session.run(one)[outputs], START + 2)


def test_the_normal_context_inside_a_fragment_is_the_program():
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.d2h_stream((2,), popxl.float32)
        with _execution_context(FROM_HOST):
            value = popxl.constant(START) * 2.0
            with _execution_context(popxl.ExecutionContext.Normal):
                ops.host_store(stream, value)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[stream], 2 * START)


def test_a_fragment_may_call_graphs_and_write_to_what_it_makes():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        rows = [
            popxl.remote_variable(START, buffer, 0),
            popxl.remote_variable(0 * START, buffer, 1),
        ]

        def double(t: popxl.TensorByRef):
            ops.add_(t, t)

        with _execution_context(FROM_HOST):
            loaded = ops.remote_load(buffer, 0)
            ops.add_(loaded.reshape_((1, 2)), popxl.constant([[10.0, 20.0]]))
            graph = ir.create_graph(double, loaded)
            ops.call(graph, loaded)
        total = popxl.variable(0 * START)
        ops.add_(total, loaded)
        with _execution_context(TO_HOST):
            result = total * 1.0
            ops.call(graph, result)
            ops.remote_store(buffer, 1, result)
    with popxl.Session(ir) as session:
        for run in (1, 2):
            session.run()
            np.testing.assert_array_equal(session.get_tensor_data(total), [22 * run, 44 * run])
            np.testing.assert_array_equal(session.get_tensor_data(rows[1]), [44 * run, 88 * run])
        np.testing.assert_array_equal(session.get_tensor_data(rows[0]), START)


def rows_that_move(ir, where, folder):
    """Keep so few rows of 64 KiB in memory that they move."""
    if where == "files":
        keep_remote_memory_in_files(ir, str(folder), 5 * 2**16)
    elif where == "host":
        limit_device_memory(ir, 7 * 2**16)


@pytest.mark.parametrize("where", ["files", "host"])
def test_fragments_find_rows_that_move(where, tmp_path):
    """One reads rows that runs left, of which each run replaces the contents, and stores one that a
    run loads.
    """

    def results(where):
        ir = popxl.Ir()
        rows_that_move(ir, where, tmp_path)
        with ir.main_graph, popxl.in_sequence():
            buffer = popxl.remote_buffer((2**14,), popxl.float32, 9)
            n = popxl.variable(np.ones(2**14, np.float32))
            state = popxl.remote_variable(np.full(2**14, 5, np.float32), buffer, 8)
            with _execution_context(FROM_HOST):
                left = ops.remote_load(buffer, 7) + ops.remote_load(buffer, 8)
                ops.remote_store(buffer, 6, left)
            outputs = popxl.d2h_stream((), popxl.float32)
            total = ops.remote_load(buffer, 6) * 100.0
            for i in (7, *range(6)):
                ops.remote_store(buffer, i, n + float(i))
            for i in reversed(range(6)):
                total = total + ops.remote_load(buffer, i)
            ops.host_store(outputs, total[0].reshape(()))
            with _execution_context(TO_HOST):
                ops.remote_store(buffer, 8, n * 2.0)
        with popxl.Session(ir) as session:
            session.run()
            found = []
            for data in (3, 4):
                session.weights_to_host()
                session.write_variable_data(n, np.full(2**14, data, np.float32))
                found += [float(session.run()[outputs]) for _ in range(2)]
            return [*found, session.get_tensor_data(state)[0]]

    plain = results("memory")
    # the row that the last run left, 7 more than its n, and twice that n; then six rows
    assert (
        plain[0] == 100 * (1 + 7 + 2) + 6 * 3 + 15
        and plain[2] == 100 * (3 + 7 + 6) + 6 * 4 + 15
        and plain[4] == 8
    )
    assert results(where) == plain


def refused(build, says):
    ir = popxl.Ir()
    with ir.main_graph:
        build(ir, popxl.remote_buffer((2,), popxl.float32, 2))
    with pytest.raises(ValueError, match=says):
        popxl.Session(ir)


@pytest.fixture(params=["0", "1"], ids=["engine", "interpreter"])
def both(request, monkeypatch):
    """Compiled, and by the interpreter."""
    monkeypatch.setenv("POPXL_INTERPRET", request.param)


@pytest.mark.parametrize(
    "arguments", [{"store": False}, {"slot": 1}], ids=["never stored", "stored elsewhere"]
)
def test_state_that_came_with_the_weights_is_kept_until_they_come_again(both, arguments):
    ir, inputs, outputs, variable = kept_in_a_row(**arguments)
    one = {inputs: np.ones(2, np.float32)}
    session = popxl.Session(ir)
    for _ in range(2):
        with session:
            for run in (1, 2):
                np.testing.assert_array_equal(session.run(one)[outputs], START + run)
            session.weights_from_host()
            for run in (1, 2):
                np.testing.assert_array_equal(session.run(one)[outputs], START + run)
        np.testing.assert_array_equal(session.get_tensor_data(variable), START)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_fragment_does_is_done_once_for_each_upload(both, replicas):
    ir = popxl.Ir(replicas)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        row, other = (
            popxl.remote_variable(data, buffer, i) for i, data in enumerate((START, 0 * START))
        )
        uploads = popxl.variable(0, popxl.int32)

        def count(n: popxl.TensorByRef):
            ops.add_(n, popxl.constant(1, popxl.int32))

        with _execution_context(FROM_HOST):
            state = ops.remote_load(buffer, 0)
            flat = state.reshape_((1, 2))
            ops.add_(flat, popxl.constant([[10.0, 10.0]]))
            ops.call(ir.create_graph(count, uploads), uploads)
            summed = ops.collectives.replicated_all_reduce(state)
            ops.remote_store(buffer, 1, summed)
        ops.add_(flat, summed.reshape((1, 2)) * (0.5 / replicas))
        ops.add_(state, popxl.constant([1.0, 1.0]))
        outputs = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(outputs, flat.reshape((2,)))
        with _execution_context(TO_HOST):
            ops.remote_store(buffer, 0, state)
    verify(ir)

    def runs(session, start):
        prepared = start + 10
        for run in (1, 2):
            found = session.run()[outputs].reshape(replicas, 2)
            np.testing.assert_allclose(found, [prepared + run * (prepared / 2 + 1)] * replicas)
        return found[0]

    session = popxl.Session(ir)
    with session:
        runs(session, START)
        session.weights_from_host()
        end = runs(session, START)
        assert session.get_tensor_data(uploads) == 1
        np.testing.assert_allclose(session.get_tensor_data(other), replicas * (START + 10))
    np.testing.assert_allclose(session.get_tensor_data(row), end)
    with session:
        runs(session, end)
    assert session.get_tensor_data(uploads) == 2


def test_what_somebody_would_see_run_is_refused():
    def streams(ir, buffer):
        with _execution_context(TO_HOST):
            ops.host_store(popxl.d2h_stream((2,), popxl.float32), popxl.constant(START))

    def prints(ir, buffer):
        with _execution_context(FROM_HOST):
            ops.print_tensor(popxl.constant(START))

    for build in (streams, prints):
        refused(build, "got a stream or a print by .*; expected ops that nobody sees run")

    def writes_to_a_constant(ir, buffer):
        with _execution_context(FROM_HOST):
            ops.add_(popxl.constant(START), popxl.constant(START))

    refused(writes_to_a_constant, "got a write to a constant by .*; expected a write to a variable")


def test_what_is_used_before_it_is_made_is_refused():
    def uses_the_program(ir, buffer):
        made = popxl.variable(START) + 1.0
        with _execution_context(FROM_HOST):
            ops.negate(made)

    def uses_what_is_made_at_the_end(ir, buffer):
        with _execution_context(TO_HOST):
            made = popxl.variable(START) + 1.0
        ops.negate(made)

    for build in (uses_the_program, uses_what_is_made_at_the_end):
        refused(build, "got a use of %add .*; expected a tensor that is made before")


READS = {
    "a value": lambda session, total: session.get_tensor_data(total),
    "all": lambda session, total: session.weights_to_host(),
    "hashes": lambda session, total: replica_digests(session, [total]),
}


def counting(once=False, replicas=1, folder=None):
    """A program whose downloads add what the last run has made, and a view of it, to a total in a
    row, and count themselves: (ir, input, total, count).
    """
    ir = popxl.Ir(replicas)
    if once:
        keep_state_once(ir)
    if folder is not None:
        keep_remote_memory_in_files(ir, str(folder), 5 * 2**16)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32, 1)
        total = popxl.remote_variable(0 * START, buffer, 0)
        count = popxl.variable(0, popxl.int32)
        inputs = popxl.h2d_stream((2,), popxl.float32)
        made = ops.host_load(inputs) * 10.0
        with _execution_context(TO_HOST):
            row = ops.remote_load(buffer, 0)
            ops.add_(row, made)
            ops.add_(row, ops.collectives.replicated_all_reduce(made) * (1 / replicas))
            ops.remote_store(buffer, 0, row)
            ops.add_(count, popxl.constant(1, popxl.int32))
        # after the download's ops, which see it nevertheless
        ops.add_(made.reshape_((1, 2)), popxl.constant([[1.0, 2.0]]))
    verify(ir)
    return ir, inputs, total, count


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_comes_with_a_download_is_done_once_for_what_runs_have_changed(
    both, replicas, read, tmp_path
):
    if read == "hashes" and replicas == 2:
        replicas = 1
    ir, inputs, total, count = counting(replicas=replicas, folder=tmp_path)
    one, two = ({inputs: np.full((replicas, 2)[replicas < 2 :], n, np.float32)} for n in (1, 2))
    with popxl.Session(ir) as session:
        assert session.get_tensor_data(count) == 0
        session.run(one)
        session.run(two)
        for _ in range(2):
            READS[read](session, total)
        assert session.get_tensor_data(count) == 1
        np.testing.assert_array_equal(session.get_tensor_data(total), 2 * (20 + START))
        session.run(one)
    assert session.get_tensor_data(count) == 2
    np.testing.assert_array_equal(session.get_tensor_data(total), 2 * (30 + 2 * START))


def test_a_block_that_an_exception_leaves_keeps_no_download_or_that_of_what_ran_before(both):
    for once in (False, True):
        ir, inputs, total, count = counting(once)
        session = popxl.Session(ir)
        with pytest.raises(KeyError), session:
            session.run({inputs: np.ones(2, np.float32)})
            raise KeyError
        assert session.get_tensor_data(count) == once
        np.testing.assert_array_equal(session.get_tensor_data(total), once * 2 * (10 + START))
        with session:
            assert session.get_tensor_data(count) == once


def test_what_is_written_after_a_run_is_not_changed_by_the_download_of_that_run(both):
    ir, inputs, total, count = counting(once=True)
    with popxl.Session(ir) as session:
        session.run({inputs: np.ones(2, np.float32)})
        session.write_variable_data(total, START)
        assert session.get_tensor_data(count) == 1
    np.testing.assert_array_equal(session.get_tensor_data(total), START)


def test_another_session_of_a_program_takes_over_what_a_download_made(both):
    ir, inputs, total, count = counting(once=True)
    first, second = popxl.Session(ir), popxl.Session(ir)
    with pytest.raises(KeyError), first:
        first.run({inputs: np.ones(2, np.float32)})
        raise KeyError
    with second:
        assert second.get_tensor_data(count) == 1
        np.testing.assert_array_equal(second.get_tensor_data(total), 2 * (10 + START))


def test_plans_leave_out_what_comes_with_a_download():
    ir, _, _, _ = counting()
    planned = plan(ir)
    assert planned.steps == 1 and sum(phase.stores for phase in planned.phases) == 0
    assert [event.kind for event in sequence(ir)] == []


@pytest.mark.parametrize("program", [kept_in_a_row, counting])
def test_needs_are_known_before_and_after_a_session_has_arranged_a_program(program):
    ir = program()[0]
    before = host_needs(ir), device_needs(ir, "cpu")
    popxl.Session(ir)
    after = host_needs(ir), device_needs(ir, "cpu")
    assert after[0].rows == before[0].rows > 0 and after[1].least >= before[1].least > 0


def test_other_contexts_are_refused():
    with pytest.raises(NotImplementedError, match="expected Normal, WeightsFromHostFragment"):
        with _execution_context(popxl.ExecutionContext.Subgraph):
            pass
    assert popxl.context.get_current_context().execution is popxl.ExecutionContext.Normal

"""Ops recorded with the transfers of weights: what programs see of them, and what is refused."""

import numpy as np
import popxl
import pytest
from popxl import ops
from popxl.context import _execution_context
from popxl.extensions import verify

FROM_HOST = popxl.ExecutionContext.WeightsFromHostFragment
TO_HOST = popxl.ExecutionContext.WeightsToHostFragment
START = np.array([1, 2], np.float32)


def kept_in_a_row(store=True, slot=0):
    """State in a remote row that each run doubles: (ir, input, output, variable of the row)."""
    ir = popxl.Ir()
    with ir.main_graph:
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
        inputs, outputs = popxl.h2d_stream((2,), popxl.float32), popxl.d2h_stream((2,), popxl.float32)
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
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        rows = [popxl.remote_variable(START, buffer, 0), popxl.remote_variable(0 * START, buffer, 1)]

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


def refused(build, says):
    ir = popxl.Ir()
    with ir.main_graph:
        build(ir, popxl.remote_buffer((2,), popxl.float32, 2))
    with pytest.raises(ValueError, match=says):
        popxl.Session(ir)


def test_what_would_differ_if_it_ran_with_every_run_is_refused():
    for arguments in ({"store": False}, {"slot": 1}):
        with pytest.raises(ValueError, match="WeightsFromHostFragment: got .*, which the program changes.*stored to"):
            popxl.Session(kept_in_a_row(**arguments)[0])

    def counts(ir, buffer):
        state = popxl.variable(START)
        with _execution_context(FROM_HOST):
            ops.add_(state, state)

    def streams(ir, buffer):
        with _execution_context(TO_HOST):
            ops.host_store(popxl.d2h_stream((2,), popxl.float32), popxl.constant(START))

    def counts_in_a_call(ir, buffer):
        def add(t: popxl.TensorByRef):
            ops.add_(t, t)

        state = popxl.variable(START)
        with _execution_context(FROM_HOST):
            ops.call(ir.create_graph(add, state), state)

    def loads_in_a_call(ir, buffer):
        graph = ir.create_graph(lambda: ops.remote_load(buffer, 0))
        with _execution_context(FROM_HOST):
            ops.call(graph)

    refused(streams, "got a stream or a print by .*; expected ops that give the same")
    refused(loads_in_a_call, "got a call that loads or stores by")
    for build in (counts, counts_in_a_call):
        refused(build, "got a write to a tensor that was made elsewhere by .*; expected ops that give the same")

    def counts_what_the_program_counts(ir, buffer):
        with _execution_context(FROM_HOST):
            state = ops.remote_load(buffer, 0)
            ops.add_(state, popxl.constant(START))
        ops.add_(state, state)
        with _execution_context(TO_HOST):
            ops.remote_store(buffer, 0, state)

    refused(counts_what_the_program_counts, "got %.*, which the program changes")

    def stores_to_what_was_loaded(ir, buffer):
        with _execution_context(FROM_HOST):
            state = ops.remote_load(buffer, 0)
        ops.call(ir.create_graph(lambda t: ops.remote_store(buffer, 0, t * 2.0), state), state)

    def stores_something_else_at_the_end(ir, buffer):
        with _execution_context(FROM_HOST):
            state = ops.remote_load(buffer, popxl.constant(0))
        with _execution_context(TO_HOST):
            ops.remote_store(buffer, 0, state * 2.0)

    for build in (stores_to_what_was_loaded, stores_something_else_at_the_end):
        refused(build, "got a slot that .*remote_store.* stores to by .*; expected it to keep its value")

    def stores(ir, buffer):
        with _execution_context(FROM_HOST):
            ops.remote_store(buffer, 0, popxl.constant(START))

    refused(stores, "among those of WeightsToHostFragment")

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


def test_other_contexts_are_refused():
    with pytest.raises(NotImplementedError, match="expected Normal, WeightsFromHostFragment"):
        with _execution_context(popxl.ExecutionContext.Subgraph):
            pass
    assert popxl.context.get_current_context().execution is popxl.ExecutionContext.Normal

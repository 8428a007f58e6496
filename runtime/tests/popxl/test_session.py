"""Sessions: attaching, several of one Ir, streams, runs."""

from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.session_programs import counter, echo
from popart import DeviceInfo, DeviceType
from popxl import extensions, ops

# Making one


def test_a_program_without_ops_is_refused() -> None:
    with pytest.raises(RuntimeError, match="without ops in its main graph"):
        popxl.Session(popxl.Ir())


@pytest.mark.parametrize("device", ["gpu", 1, None])
def test_an_unknown_device_is_refused(device: Any) -> None:
    ir, _, _ = counter()
    words = f"got device_desc {device!r}; expected one of ipu_hw, ipu_model, cpu"
    with pytest.raises(ValueError, match=words):
        popxl.Session(ir, device)


@pytest.mark.parametrize("device", ["cpu", "ipu_model", "ipu_hw", DeviceInfo(DeviceType.Cpu)])
def test_every_device_that_programs_name_runs(device: Any) -> None:
    ir, _, out = counter()
    with popxl.Session(ir, device) as session:
        assert session.run()[out] == 1


def test_a_session_freezes_its_ir() -> None:
    ir, _, _ = counter()
    session = popxl.Session(ir)
    assert session.ir is ir
    with ir.main_graph, pytest.raises(RuntimeError, match="after a Session was made of it"):
        popxl.variable(1.0)
    with pytest.raises(RuntimeError, match="num_host_transfers"):
        ir.num_host_transfers = 2
    with pytest.raises(RuntimeError, match="replication_factor"):
        ir.replication_factor = 2


# Attaching


def test_blocks_nest_and_only_the_outermost_acts() -> None:
    ir, v, _ = counter()
    session = popxl.Session(ir, weights_to_host_on_exit=False)
    assert not session.is_attached
    with session:
        with session:
            session.run()
        assert session.is_attached
        session.run()
        assert session.get_tensor_data(v) == 2
    assert not session.is_attached


@pytest.mark.parametrize(
    "call", ["run", "run_with_outputs", "weights_to_host", "weights_from_host"]
)
def test_outside_a_block_calls_are_refused(call: str) -> None:
    ir, _, _ = counter()
    with pytest.raises(ValueError, match="outside `with session:`"):
        getattr(popxl.Session(ir), call)()


def test_state_goes_on_from_block_to_block() -> None:
    ir, v, out = counter()
    session = popxl.Session(ir)
    for expected in (1, 2, 3):
        with session:
            assert session.run()[out] == expected
        assert session.get_tensor_data(v) == expected


def test_without_weights_to_host_on_exit_the_host_keeps_its_values() -> None:
    ir, v, out = counter(value=10)
    session = popxl.Session(ir, weights_to_host_on_exit=False)
    for _ in range(2):
        with session:
            assert session.run()[out] == 11
        assert session.get_tensor_data(v) == 10


def test_without_weights_to_host_on_exit_a_download_is_kept() -> None:
    ir, v, out = counter()
    session = popxl.Session(ir, weights_to_host_on_exit=False)
    with session:
        session.run()
        session.weights_to_host()
        session.run()
    assert session.get_tensor_data(v) == 1
    with session:
        assert session.run()[out] == 2
        assert session.get_tensor_data(v) == 2  # reading downloads what has run
        session.run()
    assert session.get_tensor_data(v) == 2


def test_weights_from_host_goes_back_to_the_values_kept_apart() -> None:
    ir, v, out = counter()
    with popxl.Session(ir, weights_to_host_on_exit=False) as session:
        session.run()
        session.weights_from_host()
        assert session.get_tensor_data(v) == 0
        assert session.run()[out] == 1


def test_weights_from_host_takes_back_what_has_run_since_the_host_had_the_values() -> None:
    ir, v, out = counter()
    with popxl.Session(ir) as session:
        for expected in (1, 2):
            assert session.run()[out] == expected
        session.weights_from_host()
        assert session.get_tensor_data(v) == 0 and session.run()[out] == 1
        session.weights_to_host()
        session.run()
        session.weights_from_host()
        assert session.get_tensor_data(v) == 1
        session.run()
        session.write_variable_data(v, 7)
        session.run()
        session.weights_from_host()
        assert session.run()[out] == 8
    assert session.get_tensor_data(v) == 8


def test_weights_from_host_after_a_reading_changes_nothing() -> None:
    ir, v, _ = counter()
    with popxl.Session(ir) as session:
        session.run()
        before = session.get_tensor_data(v)
        session.weights_from_host()
        np.testing.assert_array_equal(session.get_tensor_data(v), before)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_block_that_an_exception_leaves_keeps_the_hosts_values(to_host: bool) -> None:
    ir, v, out = counter()
    session = popxl.Session(ir, weights_to_host_on_exit=to_host)
    with pytest.raises(KeyError), session:
        session.run()
        session.weights_to_host()
        session.run()
        raise KeyError("a mistake")
    assert not session.is_attached and session.get_tensor_data(v) == 1
    with session:
        assert session.run()[out] == 2


def test_a_variable_says_whether_the_host_has_its_value() -> None:
    ir, v, _ = counter()
    assert v.in_sync_with_ipu
    with popxl.Session(ir) as session:
        assert v.in_sync_with_ipu
        session.run()
        assert not v.in_sync_with_ipu
        session.get_tensor_data(v)
        assert v.in_sync_with_ipu
        session.run()
    assert v.in_sync_with_ipu


def test_before_a_run_only_what_it_changes_is_copied_and_only_once(monkeypatch: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        buffers = [popxl.remote_buffer((), popxl.float32, 2) for _ in range(2)]
        rows = [popxl.remote_variable(1.0, buffer, 1) for buffer in buffers]
        read, changed = popxl.variable(1.0), popxl.variable([1.0])

        def body(x: popxl.TensorByRef, y: popxl.TensorByRef) -> None:
            ops.add_(x.reshape_((1,)), y.reshape((1,)))
            ops.remote_store(buffers[1], 1, ops.remote_load(buffers[0], 1) + y)

        ops.call(ir.create_graph(body, changed, read), changed, read)
    session = popxl.Session(ir)
    copied = []
    plain = session._engine.read
    monkeypatch.setattr(session._engine, "read", lambda v: copied.append(v) or plain(v))
    with session:
        for _ in range(3):
            session.run()
    assert set(copied) == {changed, rows[1]} and len(copied) == 2


@pytest.mark.parametrize("in_files", [False, True])
def test_state_that_is_kept_once_is_never_copied_and_there_is_nothing_to_go_back_to(
    in_files: bool, tmp_path: Any, monkeypatch: Any
) -> None:
    ir, v, out = counter()
    if in_files:
        extensions.keep_remote_memory_in_files(ir, str(tmp_path), 2**20)
    else:
        extensions.keep_state_once(ir)
    session = popxl.Session(ir)
    with (
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match="after a run.*state exists once"),
        session,
    ):
        patch.setattr(session._engine, "read", None)
        session.weights_from_host()
        session.run()
        assert v.in_sync_with_ipu
        session.weights_from_host()
    assert session.get_tensor_data(v) == 1
    with session:
        assert session.run()[out] == 2
        session.weights_to_host()
        session.weights_from_host()
        assert session.get_tensor_data(v) == 2
    with pytest.raises(RuntimeError, match="keep_state_once"):
        extensions.keep_state_once(ir)


# Several sessions of one Ir


def test_a_second_session_sees_the_hosts_present_values() -> None:
    ir, v, out = counter()
    first = popxl.Session(ir)
    with first:
        first.run()
    second = popxl.Session(ir)
    assert second.get_tensor_data(v) == 1
    with second:
        assert second.run()[out] == 2
    assert first.get_tensor_data(v) == 2
    with first:
        assert first.run()[out] == 3
    first.write_variable_data(v, 10.0)
    assert second.get_tensor_data(v) == 10
    with second:
        assert second.run()[out] == 11


def test_a_second_session_that_keeps_values_apart_changes_nothing() -> None:
    ir, v, out = counter()
    first, second = popxl.Session(ir), popxl.Session(ir, weights_to_host_on_exit=False)
    with first:
        first.run()
    with second:
        assert second.run()[out] == 2
    assert second.get_tensor_data(v) == first.get_tensor_data(v) == 1
    with first:
        assert first.run()[out] == 2


def test_remote_variables_of_a_second_session_are_the_hosts() -> None:
    ir, buffer_variable = popxl.Ir(), None
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float32, 3)
        buffer_variable = popxl.remote_variable(np.ones(2, np.float32), buffer, 2)
        x = ops.remote_load(buffer, 2)
        ops.remote_store(buffer, 2, x * 2)
    for expected in (2, 4, 8):
        session = popxl.Session(ir)
        with session:
            session.run()
        assert session.get_tensor_data(buffer_variable).tolist() == [expected] * 2


# Streams


@pytest.mark.parametrize(
    "value", [3.5, np.float64(3.5), [3.5], np.array([[3.5]]), torch.tensor(3.5), np.float16(3.5)]
)
def test_a_scalar_stream_takes_any_single_number(value: Any) -> None:
    ir, into, out = echo()
    with popxl.Session(ir) as session:
        result = session.run({into: value})[out]
    assert result == 3.5 and result.shape == () and result.dtype == np.float32


@pytest.mark.parametrize(
    "transfers, replication, shape",
    [(1, 1, (2,)), (3, 1, (3, 2)), (1, 4, (4, 2)), (3, 4, (3, 4, 2))],
)
def test_transfers_and_replicas_come_in_front(
    transfers: int, replication: int, shape: tuple[int, ...]
) -> None:
    ir, into, out = echo((2,), popxl.int32, transfers, replication)
    data = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    with popxl.Session(ir) as session:
        assert session._full_input_shape((2,)) == shape
        assert session.create_host_outputs()[out].shape == shape
        np.testing.assert_array_equal(session.run({into: data})[out], data)


def test_more_transfers_than_loads_are_allowed() -> None:
    ir, into, out = echo((2,), popxl.float32, 3, 2)
    data = np.arange(20, dtype=np.float32).reshape(5, 2, 2)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run({into: data})[out], data[:3])
        with pytest.raises(ValueError, match=r"got an input array of shape \[2, 2, 2\]"):
            session.run({into: data[:2]})


def test_scalars_may_have_extra_transfers_and_axes() -> None:
    ir, into, out = echo((), popxl.float32, 3)
    with popxl.Session(ir) as session:
        assert session.run({into: np.arange(5.0).reshape(5, 1)})[out].tolist() == [0, 1, 2]


def test_slots_that_no_store_reaches_keep_what_the_caller_had_there() -> None:
    ir, into, out = echo((2,), popxl.bfloat16, 2)
    given = np.full((4, 2), 7, np.float32)
    with popxl.Session(ir) as session:
        session.run_with_outputs({into: np.ones((2, 2), np.float32)}, {out: given})
    assert given.tolist() == [[1, 1], [1, 1], [7, 7], [7, 7]]


def test_slots_that_no_store_reaches_are_zeros() -> None:
    ir = popxl.Ir()
    ir.num_host_transfers = 2
    with ir.main_graph:
        out = popxl.d2h_stream((4096,), popxl.float32, "result")
        ops.host_store(out, popxl.constant(np.ones(4096, np.float32)))
    dirty = np.full((2, 4096), 7, np.float32)
    del dirty  # numpy hands out the same memory again
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], np.repeat([[1.0], [0.0]], 4096, 1))


@pytest.mark.parametrize(
    "given, says",
    [
        (np.zeros(2, np.int32), "int32 array .*'result' of float32.2.; expected a numpy array of"),
        (np.zeros(2, np.bool_), "bool array .*'result'"),
        ([0, 0], "got a list for output stream 'result'"),
        (torch.zeros(2), "got a Tensor for output stream 'result'"),
    ],
)
def test_an_output_of_another_kind_is_refused(given: Any, says: str) -> None:
    ir, into, out = echo((2,))
    with popxl.Session(ir) as session, pytest.raises(TypeError, match=says):
        session.run_with_outputs({into: [1, 2]}, {out: given})


def test_outputs_that_share_memory_are_refused() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        outs = [popxl.d2h_stream((2,), popxl.float32, name) for name in ("one", "other")]
        for i, out in enumerate(outs):
            ops.host_store(out, popxl.constant(np.full(2, i, np.float32)))
    given = np.zeros((2, 2), np.float32)
    with popxl.Session(ir) as session:
        session.run_with_outputs({}, dict(zip(outs, given.T)))  # interleaved, and apart
        assert given.tolist() == [[0, 1], [0, 1]]
        with pytest.raises(ValueError, match="streams 'one' and 'other' that share memory"):
            session.run_with_outputs({}, {outs[0]: given[0], outs[1]: given[:, 0]})


def test_outputs_may_be_of_any_layout() -> None:
    ir, into, out = echo((2, 3))
    given = np.zeros((3, 2), np.float32).T
    with popxl.Session(ir) as session:
        session.run_with_outputs({into: np.arange(6).reshape(2, 3)}, {out: given})
    np.testing.assert_array_equal(given, np.arange(6).reshape(2, 3))


def test_inputs_may_be_read_only_and_of_any_layout() -> None:
    ir, into, out = echo((2, 3))
    data = np.arange(6, dtype=np.float32).reshape(3, 2).T
    data.flags.writeable = False
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run({into: data})[out], data)


def test_a_read_only_output_is_refused() -> None:
    ir, into, out = echo((2,))
    given = np.zeros(2, np.float32)
    given.flags.writeable = False
    with (
        popxl.Session(ir) as session,
        pytest.raises(ValueError, match="got a read-only output array"),
    ):
        session.run_with_outputs({into: [1, 2]}, {out: given})


@pytest.mark.parametrize(
    "dtype, wide", [(popxl.int32, np.int64), (popxl.uint32, np.uint64), (popxl.float32, np.float64)]
)
def test_64_bit_inputs_are_narrowed_unless_that_is_forbidden(dtype: popxl.dtype, wide: Any) -> None:
    ir, into, out = echo((2,), dtype)
    with popxl.Session(ir) as session:
        result = session.run({into: np.array([1, 2], wide)})[out]
        assert result.tolist() == [1, 2] and result.dtype == dtype.as_numpy()
        with pytest.raises(
            ValueError,
            match=f"got {np.dtype(wide)} data for input stream 'words'.*downcast_inputs=True",
        ):
            session.run({into: np.array([1, 2], wide)}, downcast_inputs=False)


@pytest.mark.parametrize(
    "dtype, given",
    [
        (popxl.float32, [1e300, -1e300]),
        (popxl.float16, np.array([70000, -70000], np.float32)),
        (popxl.bfloat16, np.array([3.4e38, -3.4e38], np.float32)),
    ],
)
def test_numbers_that_become_infinite_are_told_of(dtype: popxl.dtype, given: Any) -> None:
    ir, into, out = echo((2,), dtype)
    with popxl.Session(ir) as session:
        with pytest.warns(RuntimeWarning, match=r"stream 'words': .* at \[0\] becomes infinite as"):
            result = session.run({into: given})[out]
    assert result.tolist() == [np.inf, -np.inf]
    with popxl.Ir().main_graph:
        with pytest.warns(RuntimeWarning, match="^variable 'v': .* becomes infinite"):
            popxl.variable(given, dtype, "v")


@pytest.mark.parametrize(
    "dtype, given, says",
    [
        (popxl.float32, [1j, 0], "got complex128 data for float32; expected real numbers"),
        (popxl.float32, ["1", "2"], "got <U1 data"),
        (popxl.float32, [[1], [1, 2]], "got a list that is no array .*expected lists of equal"),
    ],
)
def test_inputs_that_are_no_real_numbers_are_refused(
    dtype: popxl.dtype, given: Any, says: str
) -> None:
    ir, into, _ = echo((2,), dtype)
    with popxl.Session(ir) as session, pytest.raises((ValueError, TypeError), match=says) as caught:
        session.run({into: given})
    assert str(caught.value).startswith("Session.run: input stream 'words': got")


@pytest.mark.parametrize(
    "dtype, given, held",
    [
        (popxl.int32, [1.0, -(2.0**31)], [1, -(2**31)]),
        (popxl.uint32, [True, 2**32 - 1], [1, 2**32 - 1]),
        (popxl.float16, [np.inf, 1e-9], [np.inf, 0]),
        (popxl.bfloat16, [1 + 2**-9, -np.inf], [1, -np.inf]),
        (popxl.bool, [0.5, 0], [True, False]),
    ],
)
def test_inputs_that_are_whole_rounded_infinite_or_true_are_taken(
    dtype: popxl.dtype, given: Any, held: Any
) -> None:
    ir, into, out = echo((2,), dtype)
    with popxl.Session(ir) as session:
        assert session.run({into: given})[out].tolist() == held


def test_a_wrong_shape_names_stream_and_shapes() -> None:
    ir, into, _ = echo((2, 3))
    words = r"got an input array of shape \[3, 2\] for stream 'words'.*expected \[2, 3\]: 1 transfers, 1 replicas"
    with popxl.Session(ir) as session, pytest.raises(ValueError, match=words):
        session.run({into: np.zeros((3, 2))})


def test_streams_must_be_exactly_those_expected() -> None:
    ir, into, out = echo()
    other_ir, other, other_out = echo()
    with popxl.Session(ir) as session:
        assert session.expected_inputs() == {into}
        with pytest.raises(ValueError, match="unexpected input streams: none; missing: words"):
            session.run()
        with pytest.raises(ValueError, match="unexpected input streams: words; missing: none"):
            session.run({into: 1, other: 1})
        with pytest.raises(ValueError, match="unexpected output streams: none; missing: result"):
            session.run_with_outputs({into: 1}, {})
        with pytest.raises(ValueError, match="unexpected output streams: result; missing: result"):
            session.run_with_outputs({into: 1}, {other_out: np.zeros((), np.float32)})


def test_what_a_run_is_given_can_be_checked_alone() -> None:
    ir, into, out = echo((2, 3))
    session = popxl.Session(ir)
    session._validate_run_inputs({into: np.zeros((2, 3))})
    session._validate_run_outputs({out: np.zeros((2, 3), np.float32)})
    with pytest.raises(ValueError, match="missing: words"):
        session._validate_run_inputs({})
    with pytest.raises(ValueError, match=r"expected \[2, 3\]"):
        session._validate_run_inputs({into: np.zeros(6)})


def test_streams_that_no_op_uses_are_not_expected() -> None:
    ir, _, out = counter()
    ir2 = popxl.Ir()
    with ir2.main_graph:
        popxl.h2d_stream((), popxl.float32)
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, popxl.constant(2.0))
    with popxl.Session(ir2) as session:
        assert session.expected_inputs() == set()
        assert session.run() == {out: 2}


def test_more_loads_than_transfers_are_an_error_that_names_the_stream() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        into = popxl.h2d_stream((), popxl.float32, "words")
        ops.host_load(into)
        ops.host_load(into)
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, ops.host_load(into))
    with (
        popxl.Session(ir) as session,
        pytest.raises(RuntimeError, match="stream 'words'.*ir.num_host_transfers"),
    ):
        session.run({into: 1})


# Runs


def test_runs_are_counted_and_the_count_can_be_set() -> None:
    ir, _, _ = counter()
    with popxl.Session(ir) as session:
        assert extensions.run_count(session) == 0
        session.run()
        assert extensions.run_count(session) == 1
        extensions.set_run_count(session, 40)
        session.run()
        assert extensions.run_count(session) == 41
        with pytest.raises(ValueError, match="set_run_count: got -1"):
            extensions.set_run_count(session, -1)


def test_inits_and_loads_are_fresh_in_every_run() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = ops.init((2,), popxl.float32, init_type="zero")
        ops.add_(x, popxl.constant(np.ones(2, np.float32)))
        c = popxl.constant(np.ones(2, np.float32))
        out = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(out, x + c)
    with popxl.Session(ir) as session:
        results: dict[int, Any] = {i: session.run()[out].tolist() for i in range(2)}
    assert results == {0: [2, 2], 1: [2, 2]}


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ">f4"])
def test_an_output_of_another_floating_type_is_written(dtype: Any) -> None:
    ir, into, out = echo((2,))
    given = np.zeros(2, dtype)
    with popxl.Session(ir) as session:
        session.run_with_outputs({into: [1.5, 2]}, {out: given})
    assert given.tolist() == [1.5, 2]

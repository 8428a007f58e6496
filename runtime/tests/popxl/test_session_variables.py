"""A session's variables: on the host and on the device, of groups of replicas, sharded, remote, in
files.
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import popxl.extensions
import popxl_addons as addons
import pytest
from helpers.session_programs import counter
from popxl import ops
from popxl.errors import GraphError
from popxl.ops import collectives

ONE = np.float32(1)


# Variables


def variables_of(kind: str, ir: popxl.Ir) -> popxl.Tensor:
    """A variable of ones, made in one of the ways that there are, as its tensor on the device."""
    one = np.ones(2, np.float32)
    if kind == "variable":
        return popxl.variable(one)
    if kind == "remote":
        buffer = popxl.remote_buffer((2,), popxl.float32, 1)
        popxl.remote_variable(one, buffer)
        return ops.remote_load(buffer, 0)
    if kind == "factory":
        return addons.VariableFactory(lambda: one, name="v").create_tensor()
    if kind == "sharded":
        return popxl.replica_sharded_variable(one)[1]
    return popxl.variable(one, replica_grouping=ir.replica_grouping())


KINDS = ["variable", "remote", "factory", "sharded", "grouped"]


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_set_after_a_variable_is_made_have_it_or_are_refused(kind: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        v = variables_of(kind, ir)
        ir.replication_factor = 2
        out = popxl.d2h_stream(v.shape, v.dtype)
        ops.host_store(out, v)
    if kind in ("sharded", "grouped"):
        with pytest.raises(GraphError, match="groups of 1 replicas in a program for 2"):
            popxl.Session(ir)
        return
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == [[1, 1], [1, 1]]
    assert all(v.replica_grouping.group_size == 2 for v in ir.main_graph.variables)


def test_replicas_set_after_a_collective_over_groups_are_refused() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        collectives.replicated_all_reduce(popxl.constant(1.0), group=ir.replica_grouping())
    ir.replication_factor = 2
    with pytest.raises(GraphError, match="replicated_all_reduce with groups of 1"):
        popxl.Session(ir)


def test_reading_gives_copies() -> None:
    ir, v, _ = counter(value=[1, 2])
    with popxl.Session(ir) as session:
        session.get_tensor_data(v)[:] = 9
        assert session.get_tensor_data(v).tolist() == [1, 2]


def test_constants_and_variables_are_read_together() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v, c = popxl.variable(np.arange(3, dtype=np.int32)), popxl.constant([[1.5]], popxl.float16)
        x = ops.host_store(popxl.d2h_stream(v.shape, v.dtype), v)
    session = popxl.Session(ir)
    values = session.get_tensors_data([v, c])
    assert (
        values[v].tolist() == [0, 1, 2]
        and values[c].tolist() == [[1.5]]
        and values[c].dtype == np.float16
    )
    with pytest.raises(TypeError, match="expected a Variable or Constant"):
        session.get_tensor_data(x)


@pytest.mark.parametrize("attached", [False, True])
def test_written_values_are_those_of_the_next_run(attached: bool) -> None:
    ir, v, out = counter(value=[1, 2])
    session = popxl.Session(ir)
    if not attached:
        session.write_variable_data(v, np.array([5, 6], np.float32))
    with session:
        if attached:
            session.run()
            session.write_variables_data({v: np.array([5, 6], np.float32)})
        assert session.get_tensor_data(v).tolist() == [5, 6]
        assert session.run()[out].tolist() == [6, 7]


def test_written_values_are_those_of_a_host_that_keeps_them_apart() -> None:
    ir, v, out = counter()
    session = popxl.Session(ir, weights_to_host_on_exit=False)
    session.write_variable_data(v, 3)
    with session:
        assert session.run()[out] == 4
        session.write_variable_data(v, 7)
        assert session.run()[out] == 8
    assert session.get_tensor_data(v) == 7


def test_what_does_not_fit_a_variable_is_refused_before_anything_is_written() -> None:
    ir, v, _ = counter(value=[1, 2])
    session = popxl.Session(ir)
    where = "Session.write_variables_data: got "
    with pytest.raises(TypeError, match=where + "float64 data for %v.*expected float32"):
        session.write_variable_data(v, np.zeros(2))
    with pytest.raises(ValueError, match=where + r"shape \[3\] for %v; expected \[2\]"):
        session.write_variable_data(v, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=where + r"shape \[\] for %v; expected \[2\]"):
        session.write_variable_data(v, 1.0)
    with pytest.raises(TypeError, match="expected a Variable"):
        session.write_variables_data({v: np.zeros(2, np.float32), "v": ONE})  # type: ignore[dict-item]
    assert session.get_tensor_data(v).tolist() == [1, 2]


@pytest.mark.parametrize(
    "dtype, number",
    [
        (popxl.float16, np.float32(0.1)),
        (popxl.float16, np.float64(0.1)),
        (popxl.int32, np.int64(3)),
        (popxl.float32, np.True_),
        (popxl.uint8, np.int16(3)),
    ],
)
def test_numbers_of_numpy_are_cast_as_plain_ones(dtype: popxl.dtype, number: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(0, dtype)
        ops.host_store(popxl.d2h_stream((), dtype), v)
    session = popxl.Session(ir)
    session.write_variable_data(v, number)
    assert session.get_tensor_data(v) == number.astype(dtype.as_numpy())


def test_float32_arrays_stand_for_bfloat16_and_are_rounded() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.float32(1 + 2**-9), popxl.bfloat16)
        ops.host_store(popxl.d2h_stream((), popxl.bfloat16), v)
    session = popxl.Session(ir)
    assert session.get_tensor_data(v) == 1
    session.write_variable_data(v, np.asarray(1 + 2**-6 + 2**-9, np.float32))
    assert session.get_tensor_data(v) == 1 + 2**-6
    with session:
        assert session.run().popitem()[1] == 1 + 2**-6


# Replicas


def test_each_group_of_replicas_has_its_value() -> None:
    ir = popxl.Ir(4)
    with ir.main_graph, popxl.in_sequence():
        strided = ir.replica_grouping(stride=2)
        v = popxl.variable(np.array([1, 10], np.float32), replica_grouping=strided, name="v")
        ops.var_updates.accumulate_(v, popxl.constant(ONE))
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, v)
    session = popxl.Session(ir)
    assert v.shape == () and v.shape_on_host == (2,)
    with session:
        assert session.run()[out].tolist() == [2, 11, 2, 11]
        session.write_variable_data(v, np.array([5, 6], np.float32))
        assert session.run()[out].tolist() == [6, 7, 6, 7]
    assert session.get_tensor_data(v).tolist() == [6, 7]


def diverging(mode: str, **session: Any) -> tuple[popxl.Session, Any, Any]:
    """A variable that one group shares, to which every replica adds something else."""
    ir = popxl.Ir(4)
    with ir.main_graph, popxl.in_sequence():
        into = popxl.h2d_stream((), popxl.float32)
        v = popxl.variable(np.float32(100), retrieval_mode=mode)
        ops.var_updates.accumulate_(v, ops.host_load(into))
        ops.host_store(popxl.d2h_stream((), popxl.float32), v)
    return popxl.Session(ir, **session), v, into


def test_one_per_group_reads_the_first_replica_of_each_group() -> None:
    session, v, into = diverging("one_per_group")
    with session:
        session.run({into: np.arange(1, 5)})
    assert session.get_tensor_data(v) == 101


def test_replicas_that_came_to_differ_get_the_hosts_value_when_it_is_uploaded() -> None:
    session, v, into = diverging("one_per_group")
    out = session.create_host_outputs().popitem()[0]
    for go_back in (False, True):
        with session:
            start = session.get_tensor_data(v)
            assert session.run({into: np.arange(1, 5)})[out].tolist() == [
                start + n for n in (1, 2, 3, 4)
            ]
            if go_back:
                session.weights_from_host()
                assert session.run({into: np.zeros(4)})[out].tolist() == [start] * 4
                session.run({into: np.arange(1, 5)})
                session.weights_to_host()
                session.weights_from_host()
                assert session.run({into: np.zeros(4)})[out].tolist() == [start + 1] * 4


@pytest.mark.parametrize("to_host", [True, False])
def test_all_replicas_reads_every_replica_and_may_not_be_written(to_host: bool) -> None:
    session, v, into = diverging("all_replicas", weights_to_host_on_exit=to_host)
    with session:
        session.run({into: np.arange(1, 5)})
        assert session.get_tensor_data(v).tolist() == [101, 102, 103, 104]
    with session:  # replicas go on with what each of them had
        assert session.get_tensor_data(v).tolist() == [101, 102, 103, 104]
        session.run({into: np.ones(4)})
        assert session.get_tensor_data(v).tolist() == [102, 103, 104, 105]
        with pytest.raises(NotImplementedError, match="retrieval mode 'all_replicas'"):
            session.write_variable_data(v, 1.0)


@pytest.mark.parametrize("shape, shard_over", [((2, 3), 4), ((2, 3), 2), ((8,), None), ((2, 2), 1)])
def test_a_sharded_variable_is_whole_on_the_host(shape: tuple[int, ...], shard_over: Any) -> None:
    ir = popxl.Ir(8)
    groups = ir.replica_grouping(stride=2)  # two groups of four
    data = np.arange(2 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    with ir.main_graph, popxl.in_sequence():
        v, piece = popxl.replica_sharded_variable(
            data, replica_grouping=groups, shard_over=shard_over, name="v"
        )
        assert piece.meta_shape == shape
        ops.var_updates.accumulate_(piece, popxl.constant(np.ones(piece.shape, np.float32)))
        out = popxl.d2h_stream(piece.shape, piece.dtype)
        ops.host_store(out, piece)
    over = 4 if shard_over is None else shard_over
    session = popxl.Session(ir)
    np.testing.assert_array_equal(session.get_tensor_data(v), data)
    with session:
        pieces = session.run()[out]
        for r in range(8):
            padded = np.zeros(over * piece.nelms)
            padded[: np.prod(shape)] = data[r % 2].reshape(-1)
            expected = padded.reshape(over, -1)[r // 2 % over] + 1
            np.testing.assert_array_equal(pieces[r], expected)
        np.testing.assert_array_equal(session.get_tensor_data(v), data + 1)
        session.write_variable_data(v, data * 2)
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), data * 2 + 1)


def test_sharded_remote_variables_are_whole_on_the_host() -> None:
    ir = popxl.Ir(4)
    data = np.arange(2 * 5, dtype=np.float32).reshape(2, 5)
    with ir.main_graph:
        groups = ir.replica_grouping(stride=1, group_size=2)
        buffer = popxl.replica_sharded_buffer((2, 5), popxl.float32, groups, entries=2)
        v = popxl.remote_replica_sharded_variable(data, buffer, 1, replica_grouping=groups)
        piece = ops.remote_load(buffer, 1)
        ops.remote_store(buffer, 1, piece * 2)
        whole = collectives.replicated_all_gather(piece, group=groups)
        out = popxl.d2h_stream((5,), popxl.float32)
        ops.host_store(out, whole)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], data[[0, 0, 1, 1]])
        np.testing.assert_array_equal(session.get_tensor_data(v), data * 2)


def remote_variables(*offsets: int) -> popxl.Ir:
    """A program with a remote variable in each of these slots of one buffer."""
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((2,), popxl.float32, 2)
        for i, offset in enumerate(offsets):
            popxl.remote_variable(np.zeros(2, np.float32), buffer, offset, name=f"v{i}")
        ops.remote_load(buffer, 0)
    return ir


def test_two_remote_variables_in_one_slot_are_refused() -> None:
    with pytest.raises(ValueError, match="got remote variables %v0 and %v2 at offset 1 of one"):
        popxl.Session(remote_variables(1, 0, 1))
    popxl.Session(remote_variables(1, 0))


def test_a_slot_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="remote variable %v0: got offset -1; expected a slot's"):
        remote_variables(-1)


def test_a_row_that_nothing_has_stored_is_zeros() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        buffer = popxl.remote_buffer((1000,), popxl.float32, 3)
        out = popxl.d2h_stream((1000,), popxl.float32)
        ops.host_store(out, ops.remote_load(buffer, 2))
    np.full(1000, 7, np.float32)  # whose memory is free again
    with popxl.Session(ir) as session:
        assert not session.run()[out].any()


@pytest.mark.parametrize("elements, shard_over", [(9, None), (9, 2), (3, None), (3, 2), (3, 1)])
@pytest.mark.parametrize("made_for_it", [True, False])
def test_slots_of_a_sharded_remote_variable_are_padded(
    elements: int, shard_over: Any, made_for_it: bool
) -> None:
    ir = popxl.Ir(4)
    data, over = np.arange(1, elements + 1, dtype=np.float32), shard_over or 4
    with ir.main_graph:
        if made_for_it:
            buffer = popxl.replica_sharded_buffer((elements,), popxl.float32, shard_over=shard_over)
        else:
            buffer = popxl.remote_buffer((-(-elements // over),), popxl.float32)
        v = popxl.remote_replica_sharded_variable(data, buffer)
        piece = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 0, piece * 2)
        out = popxl.d2h_stream(piece.shape, piece.dtype)
        ops.host_store(out, piece)
    padded = np.zeros(over * piece.nelms)
    padded[:elements] = data
    with popxl.Session(ir) as session:
        pieces = session.run()[out]
        for r in range(4):
            np.testing.assert_array_equal(pieces[r], padded.reshape(over, -1)[r % over])
        np.testing.assert_array_equal(session.get_tensor_data(v), data * 2)


def test_slots_without_room_for_the_pieces_of_a_group_are_refused() -> None:
    ir = popxl.Ir(4)
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), popxl.float32)
        popxl.remote_replica_sharded_variable(np.zeros(13, np.float32), buffer, name="v")
        ops.init((), popxl.float32)
    words = (
        "Session: got remote variable %v: float32[13] in a buffer with slots of float32[3], of which "
        "4 hold a piece each; expected at most 12 elements. Make the buffer with the value's shape: "
        "replica_sharded_buffer."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        popxl.Session(ir)


FILLED: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [
    ((6,), (2, 3), 1, 1),
    ((2, 3), (6,), 1, 1),
    ((3, 2), (2, 3), 1, 1),
    ((), (1, 1), 1, 1),
    ((1, 2), (2,), 1, 1),
    ((1, 2), (2,), 2, 1),
    ((2, 2, 3), (6,), 2, 2),
    ((4, 1, 3), (3, 1), 4, 4),
    ((2,), (5,), 1, 1),
    ((2, 2), (3, 2), 3, 1),
    ((0,), (2,), 1, 1),
]
"""Shapes of values and slots, replicas, and groups of them."""


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.uint8, popxl.bool], ids=lambda d: d.name)
@pytest.mark.parametrize("kind", ["array", "file", "rows in files"])
@pytest.mark.parametrize("shape, slot, replicas, groups", FILLED)
def test_elements_of_remote_variables_fill_their_slots_whatever_the_shapes(
    shape: Any, slot: Any, replicas: int, groups: int, kind: str, dtype: Any, tmp_path: Path
) -> None:
    numbers = np.arange(1, 1 + math.prod(shape)).reshape(shape)
    data = (numbers % 2 == 1 if dtype is popxl.bool else numbers).astype(dtype.as_numpy())
    is_file = kind == "file" and data.size > 0 and shape != ()
    if is_file:
        file = np.memmap(tmp_path / "v", data.dtype, "w+", shape=shape)
        file[...] = data
    ir = popxl.Ir(replicas)
    with ir.main_graph, popxl.in_sequence():
        grouping = ir.replica_grouping(group_size=replicas // groups)
        buffer = popxl.remote_buffer(slot, dtype, 2)
        given = file if is_file else data.copy()
        v = popxl.remote_variable(given, buffer, 1, name="v", replica_grouping=grouping)
        out = popxl.d2h_stream(slot, dtype)
        ops.host_store(out, ops.remote_load(buffer, 1))
        fresh = popxl.variable(np.ones(slot, dtype.as_numpy()))
        ops.remote_store(buffer, 1, fresh)
    if kind == "rows in files":
        popxl.extensions.keep_remote_memory_in_files(ir, str(tmp_path), 2**20)
    if is_file:
        popxl.extensions.keep_state_once(ir)
    assert v.shape == (shape[1:] if groups > 1 else shape)
    assert v.shape_on_host == shape
    values = data.reshape(groups, -1)
    size = math.prod(slot)
    rows = [np.pad(value, (0, size - value.size)).reshape(slot) for value in values]
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.get_tensor_data(v), data)
        loaded = session.run()[out].reshape(replicas, *slot)
        for replica, group in enumerate(grouping.assignment):
            np.testing.assert_array_equal(loaded[replica], rows[group])
        np.testing.assert_array_equal(session.get_tensor_data(v), np.ones_like(data))
        session.write_variable_data(v, data)
        loaded = session.run()[out].reshape(replicas, *slot)
        for replica, group in enumerate(grouping.assignment):
            np.testing.assert_array_equal(loaded[replica], rows[group])
    if is_file:
        assert (np.fromfile(tmp_path / "v", data.dtype) == 1).all()


@pytest.mark.parametrize("elements, slot, over", [(8, (3,), 4), (5, (2, 2), 4), (3, (1,), 4)])
def test_elements_of_sharded_remote_variables_fill_slots_that_no_equal_cut_does(
    elements: int, slot: Any, over: int
) -> None:
    """The elements come together again where the pieces are gathered."""
    data = np.arange(1, elements + 1, dtype=np.float32)
    ir = popxl.Ir(over)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer(slot, popxl.float32)
        v = popxl.remote_replica_sharded_variable(data, buffer)
        piece = ops.remote_load(buffer, 0)
        out = popxl.d2h_stream(slot, popxl.float32)
        ops.host_store(out, piece)
        ops.remote_store(buffer, 0, piece * 2)
    size = math.prod(slot)
    padded = np.pad(data, (0, over * size - elements)).reshape(over, *slot)
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], padded)
        np.testing.assert_array_equal(session.get_tensor_data(v), data * 2)


@pytest.mark.parametrize("replicas", [8, 16])
@pytest.mark.parametrize("over_all", [False, True], ids=["over the refinement", "over the group"])
def test_shards_of_a_group_without_a_constant_stride_gather_to_the_whole_again(
    replicas: int, over_all: bool
) -> None:
    ir = popxl.Ir(replicas)
    with ir.main_graph, popxl.in_sequence():
        # 0 1 4 5 .. and 2 3 6 7 ..
        groups = ir.replica_grouping(stride=2, group_size=2).transpose()
        assert not groups.is_const and groups.groups[0][:4] == [0, 1, 4, 5]
        data = np.arange(2 * 24, dtype=np.float32).reshape(2, 24)
        held = groups if over_all else groups.const_rg
        v, piece = popxl.replica_sharded_variable(
            data, replica_grouping=groups, shard_over=held.group_size
        )
        ops.var_updates.accumulate_(piece, popxl.constant(np.ones(piece.shape, np.float32)))
        out = popxl.d2h_stream((24,), popxl.float32)
        ops.host_store(out, collectives.replicated_all_gather(piece, group=held))
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run()[out], data[groups.assignment] + 1)
        np.testing.assert_array_equal(session.get_tensor_data(v), data + 1)


# Files


def memmap_program(
    path: Path, mode: str, remote: bool, replication: int = 1
) -> tuple[popxl.Ir, Any]:
    """A program that adds one to a variable whose host value is a file."""
    ir = popxl.Ir(replication)
    file: np.ndarray = np.memmap(path, np.float32, "w+", shape=(2,))
    file[:] = [1, 2]
    del file
    with ir.main_graph, popxl.in_sequence():
        data = np.memmap(path, np.float32, mode, shape=(2,))
        if remote:
            buffer = popxl.remote_buffer((2,), popxl.float32, 1)
            v = popxl.remote_variable(data, buffer, 0, name="v")
            x = ops.remote_load(buffer, 0)
            ops.var_updates.accumulate_(x, popxl.constant(np.ones(2, np.float32)))
            ops.remote_store(buffer, 0, x)
        else:
            v = popxl.variable(data, name="v")
            ops.var_updates.accumulate_(v, popxl.constant(np.ones(2, np.float32)))
    return ir, v


def on_disk(path: Path) -> list:
    return np.fromfile(path, np.float32).tolist()


@pytest.mark.parametrize("remote, replication", [(False, 1), (True, 1), (True, 2)])
def test_a_file_has_the_new_values_when_the_session_is_left(
    tmp_path: Path, remote: bool, replication: int
) -> None:
    ir, v = memmap_program(tmp_path / "v", "r+", remote, replication)
    session = popxl.Session(ir)
    with session:
        session.run()
        found = session.get_tensor_data(v)
        assert isinstance(found, np.memmap) and found.tolist() == [2, 3]
        session.weights_to_host()
        assert on_disk(tmp_path / "v") == [2, 3]
        session.run()
    assert on_disk(tmp_path / "v") == [3, 4]
    session.write_variable_data(v, np.array([7, 8], np.float32))
    with session:
        session.run()
    assert on_disk(tmp_path / "v") == [8, 9]


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_is_left_alone_without_weights_to_host_on_exit(tmp_path: Path, remote: bool) -> None:
    ir, v = memmap_program(tmp_path / "v", "r+", remote)
    session = popxl.Session(ir, weights_to_host_on_exit=False)
    with session:
        session.run()
    assert on_disk(tmp_path / "v") == [1, 2] == session.get_tensor_data(v).tolist()
    with session:
        session.run()
        session.weights_to_host()
        assert on_disk(tmp_path / "v") == [2, 3]


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_is_that_of_the_last_download_when_an_exception_leaves_the_block(
    tmp_path: Path, remote: bool
) -> None:
    ir, v = memmap_program(tmp_path / "v", "r+", remote)
    session = popxl.Session(ir)
    with pytest.raises(KeyError), session:
        session.run()
        session.weights_to_host()
        session.run()
        assert on_disk(tmp_path / "v") == [2, 3]
        raise KeyError("a mistake")
    assert on_disk(tmp_path / "v") == [2, 3] == session.get_tensor_data(v).tolist()
    with session:
        session.run()
    assert on_disk(tmp_path / "v") == [3, 4]


def test_where_state_is_kept_once_a_file_is_the_memory_that_runs_change(tmp_path: Path) -> None:
    ir, v = memmap_program(tmp_path / "v", "r+", True)
    popxl.extensions.keep_state_once(ir)
    session = popxl.Session(ir)
    assert session._engine.is_file(v)
    with pytest.raises(KeyError), session:
        session.run()
        raise KeyError("a mistake")
    assert session.get_tensor_data(v).tolist() == [2, 3]


@pytest.mark.parametrize("remote", [False, True])
def test_a_read_only_file_is_never_written(tmp_path: Path, remote: bool) -> None:
    ir, v = memmap_program(tmp_path / "v", "r", remote)
    session = popxl.Session(ir)
    assert session.weights_to_host_on_exit is False
    with session:
        session.run()
        assert session.get_tensor_data(v).tolist() == [2, 3]
        with pytest.raises(Exception, match="got read-only memory-mapped variable %v.*mode 'r\\+'"):
            session.weights_to_host()
    assert on_disk(tmp_path / "v") == [1, 2] == session.get_tensor_data(v).tolist()
    with pytest.raises(ValueError, match="read-only memory-mapped %v"):
        session.write_variable_data(v, np.zeros(2, np.float32))


@pytest.mark.parametrize("remote", [False, True])
def test_sessions_of_one_ir_share_a_file(tmp_path: Path, remote: bool) -> None:
    ir, v = memmap_program(tmp_path / "v", "r+", remote)
    for session in (popxl.Session(ir), popxl.Session(ir)) * 2:
        with session:
            session.run()
    assert on_disk(tmp_path / "v") == [5, 6]

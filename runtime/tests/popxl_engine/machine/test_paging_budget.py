"""Sessions of one process share its memory for rows: together never more than the limit, and the
same bits.
"""

import gc
import threading
import weakref

import numpy as np
import popxl
import pytest
import torch
from helpers.row_programs import ENTRIES, program
from popxl.errors import RemoteMemoryError
from popxl.extensions import file_traffic, keep_remote_memory_in_files, limit_device_memory
from popxl_engine.machine.device import PROCESSOR, Processor
from popxl_engine.machine.paging import Cache
from popxl_engine.machine.paging import budget as budgets
from popxl_engine.machine.paging.arena import Arena
from popxl_engine.machine.paging.budget import RowMemory
from popxl_engine.machine.paging.host import HostStore
from popxl_engine.machine.paging.row import Row, Staying
from popxl_engine.machine.paging.store import BLOCK

LIMIT = 80_000
KINDS = pytest.mark.parametrize("kind", ["files", "device"])


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Sessions that other tests left are not asked to make room."""
    gc.collect()
    monkeypatch.setattr(budgets, "BUDGETS", {})


class Taken:
    """The bytes that arenas have, and the most that they had at a time."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        take = Processor.memory

        def memory(device, nbytes):
            found = take(device, nbytes)
            self.add(nbytes)
            weakref.finalize(found._array, self.add, -nbytes)
            return found

        monkeypatch.setattr(Processor, "memory", memory)

    def add(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)


def limited(kind, folder, limit=LIMIT, replicas=1):
    ir, variables = program(replicas)
    if kind == "files":
        keep_remote_memory_in_files(ir, str(folder), limit)
    elif kind == "device":
        limit_device_memory(ir, limit)
    return popxl.Session(ir), variables


def run_and_read(session, variables, runs):
    with session:
        for _ in range(runs):
            session.run()
    return read(session, variables)


def read(session, variables):
    found = session.get_tensors_data(variables)
    return [found[v] for v in variables]


@pytest.mark.sampled(2)
@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("replicas", [1, 2])
def test_sessions_that_take_turns_have_the_limit_together_and_compute_what_each_does_alone(
    kind, replicas, tmp_path, monkeypatch
):
    expected = [run_and_read(*limited("", tmp_path, replicas=replicas), runs) for runs in (1, 2, 3)]
    taken, limit = Taken(monkeypatch), LIMIT * replicas
    sessions = [limited(kind, tmp_path, limit, replicas) for _ in range(3)]
    for turn in range(3):
        found = [run_and_read(session, variables, 1) for session, variables in sessions]
        for values in found:
            np.testing.assert_equal(values, expected[turn])
    row = 64 * 48 * 4
    assert limit / 4 < taken.most <= limit + row, "one that is parked is read a row at a time"
    assert taken.now <= limit


@pytest.mark.slow
@KINDS
def test_a_session_without_memory_is_read_and_written_where_its_rows_are(
    kind, tmp_path, monkeypatch
):
    first, variables = limited(kind, tmp_path)
    before = run_and_read(first, variables, 1)
    taken = Taken(monkeypatch)
    second, others = limited(kind, tmp_path)
    run_and_read(second, others, 1)
    held = taken.now
    np.testing.assert_equal(read(first, variables), before)
    new = {v: np.full(v.shape, i, v.dtype.as_numpy()) for i, v in enumerate(variables)}
    first.write_variables_data(new)
    assert taken.now == held, "nobody took memory to keep"
    np.testing.assert_equal(read(first, variables), list(new.values()))
    alone, same = limited("", tmp_path)
    alone.write_variables_data(dict(zip(same, new.values())))
    np.testing.assert_equal(run_and_read(first, variables, 2), run_and_read(alone, same, 2))


@pytest.mark.slow
@KINDS
def test_a_session_in_a_block_gives_its_memory_to_one_that_runs_meanwhile(
    kind, tmp_path, monkeypatch
):
    (session, variables), (other, others) = (limited(kind, tmp_path) for _ in range(2))
    alone = [run_and_read(*limited("", tmp_path), runs) for runs in (1, 4)]
    taken = Taken(monkeypatch)
    with session:
        for _ in range(2):
            session.run()
        np.testing.assert_equal(run_and_read(other, others, 1), alone[0])
        for _ in range(2):
            session.run()
    np.testing.assert_equal(read(session, variables), alone[1])
    assert taken.most <= LIMIT + 64 * 48 * 4


@KINDS
def test_sessions_for_which_there_is_room_together_keep_their_rows_in_memory(kind, tmp_path):
    limit = 10**6
    sessions = [limited(kind, tmp_path, limit) for _ in range(2)]
    for _ in range(3):
        for session, variables in sessions:
            run_and_read(session, variables, 1)
    assert [file_traffic(session).written_bytes for session, _ in sessions] == [0, 0]
    assert all(
        session._engine.machine.caches[0].transfers.traffic.reads == 0 for session, _ in sessions
    )
    assert not any(
        m.is_parked for b in budgets.BUDGETS.values() for s in b._alive() for m in s.memories
    )


def test_rows_that_all_fit_wait_in_a_file_while_another_session_has_the_memory(
    tmp_path, monkeypatch
):
    rows = ENTRIES * (64 * 48 * 4 + 8192)
    expected = run_and_read(*limited("", tmp_path), 2)
    taken = Taken(monkeypatch)
    sessions = [limited("files", tmp_path, rows + 4096) for _ in range(2)]
    for _ in range(2):
        found = [run_and_read(session, variables, 1) for session, variables in sessions]
    for values in found:
        np.testing.assert_equal(values, expected)
    assert rows <= taken.most <= rows + 4096 + 64 * 48 * 4


def test_a_session_whose_row_somebody_has_keeps_its_memory(tmp_path):
    (session, variables), alone = limited("files", tmp_path), limited("", tmp_path)
    expected = run_and_read(*alone, 1)
    run_and_read(session, variables, 1)
    buffer = variables[0].location_info.buffer
    numbers = [i for i, v in enumerate(variables) if v.location_info.buffer is buffer]
    held = session._engine.machine.replicas[0].rows[buffer].load(0)
    other, others = limited("files", tmp_path)
    np.testing.assert_equal(run_and_read(other, others, 1), expected)
    np.testing.assert_array_equal(held.numpy(), expected[numbers[0]])
    np.testing.assert_equal(read(session, variables), expected)


def test_a_session_that_is_gone_is_asked_for_nothing(tmp_path):
    session, variables = limited("files", tmp_path)
    run_and_read(session, variables, 1)
    gone = weakref.ref(session._engine.machine)
    session.ir._holder = None
    del session, variables
    gc.collect()
    assert gone() is None
    other, others = limited("files", tmp_path)
    run_and_read(other, others, 1)
    (budget,) = budgets.BUDGETS.values()
    assert len(budget._alive()) == 1


def test_a_disk_that_fails_while_a_session_gives_its_memory_up_is_told(tmp_path, monkeypatch):
    session, variables = limited("files", tmp_path)
    run_and_read(session, variables, 1)
    (cache,) = session._engine.machine.caches
    values = session.get_tensors_data(variables)

    def fails(start, data):
        raise RemoteMemoryError(
            "disk: got 'Input/output error' while writing; expected a disk that works."
        )

    monkeypatch.setattr(cache.transfers.store, "write", fails)
    with pytest.raises(RemoteMemoryError, match="Input/output error"):
        session.write_variables_data(values)  # these rows have never been on the disk
        limited("files", tmp_path)


@pytest.mark.parametrize("way", ["borrow", "borrow_to_fill"])
def test_a_row_that_a_thread_takes_stays_while_another_one_asks_for_the_memory(
    way, tmp_path, monkeypatch
):
    session, variables = limited("files", tmp_path)
    values = run_and_read(session, variables, 1)
    buffer = variables[0].location_info.buffer
    numbers = [i for i, v in enumerate(variables) if v.location_info.buffer is buffer]
    rows = session._engine.machine.replicas[0].rows[buffer]
    moving = next(i for i, slot in enumerate(rows._slots) if isinstance(slot, Row))
    (budget,) = budgets.BUDGETS.values()
    (tenant,), pin, turns = budget._alive(), getattr(Cache, way), []

    def asked_before(cache, row):
        turns.append(threading.Thread(target=tenant.park))
        turns[0].start()
        turns[0].join(0.1)  # as long as it takes, if nothing keeps it
        monkeypatch.undo()
        return pin(cache, row)

    monkeypatch.setattr(Cache, way, asked_before)
    expected = values[numbers[moving]]
    if way == "borrow_to_fill":
        expected = np.full_like(expected, 7)
        rows.store(moving, torch.from_numpy(expected.copy()))
    np.testing.assert_array_equal(rows.load(moving).numpy(), expected)
    turns[0].join()
    np.testing.assert_array_equal(rows.load(moving).numpy(), expected)


def test_memory_with_a_row_that_somebody_has_is_not_given_up(tmp_path):
    session, variables = limited("files", tmp_path)
    values = run_and_read(session, variables, 1)
    rows = session._engine.machine.replicas[0].rows[variables[0].location_info.buffer]
    moving = next(i for i, slot in enumerate(rows._slots) if isinstance(slot, Row))
    held = rows.load(moving)
    rows._memory.park()
    assert not rows._memory.is_parked
    del held
    rows._memory.park()
    assert rows._memory.is_parked
    np.testing.assert_equal(read(session, variables), values)


def test_rows_that_stay_share_no_memory_that_pytorch_knows_of():
    """Its compiler refuses to write to tensors of several types in one storage."""
    rows = [
        Staying(i * BLOCK, BLOCK, (4,), dtype)
        for i, dtype in enumerate((torch.bfloat16, torch.float32, torch.float32))
    ]
    rows.append(Staying(3 * BLOCK, 0, (0,), torch.float32))
    arena = Arena(0, PROCESSOR)
    cache = Cache([], arena, HostStore(0, PROCESSOR))
    memory = RowMemory(cache, 0, rows, lambda *_: HostStore(4 * BLOCK, PROCESSOR), PROCESSOR)
    try:
        tensors = [row.tensor for row in rows[:3]]
        assert len({t.untyped_storage()._cdata for t in tensors}) == 3
        for n, t in enumerate(tensors):
            t.fill_(n + 1)
        assert [t.tolist() for t in tensors] == [[n + 1] * 4 for n in range(3)]
        del tensors, t
        memory.park()
        memory.resume()
        assert [row.tensor.tolist() for row in rows] == [[1] * 4, [2] * 4, [3] * 4, []]
    finally:
        cache.close()

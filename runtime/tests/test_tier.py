"""Rows in files: the contents are right whatever is fetched, moved and written meanwhile, and waiting is short."""

import errno
import fcntl
import gc
import os
import time
import weakref

import numpy as np
import popxl
import pytest
import torch
from popxl import ops
from popxl.errors import RemoteMemoryError
from popxl.extensions import file_traffic, keep_remote_memory_in_files, limit_device_memory
from popxl_engine.machine.tier import ALL_RULES, BLOCK, Course, FileStore
from popxl_engine.machine.tier import cache as cache_module
from popxl_engine.machine.tier import store as store_module
from popxl_engine.machine.tier.arena import Arena
from tier_helpers import LOAD, STORE, Clock, Late, Rows

ROWS = 12


def random_program(seed):
    """Steps of a run as (what, row) and their events: rows are taken, held over others, changed and stored."""
    random = np.random.default_rng(seed)
    steps, events, held = [], [], []
    for _ in range(60):
        row = int(random.integers(ROWS))
        what = random.choice(["read", "change", "replace", "hold", "give back"])
        if what == "hold" and len(held) < 2 and row not in held:
            held.append(row)
            events.append((row, LOAD))
        elif what == "give back" and held:
            row = held.pop(int(random.integers(len(held))))
        elif row in held or what in ("hold", "give back"):
            continue
        else:
            events += {"read": [(row, LOAD)], "change": [(row, LOAD), (row, STORE)], "replace": [(row, STORE)]}[what]
        steps.append((str(what), row))
    return [*steps, *(("give back", row) for row in held)], events


def wrong_rows(seed, rules=ALL_RULES, with_course=True, memory=15, runs=3, device=None):
    """Reads that a random program gets wrong, beside the same program on plain numbers."""
    steps, events = random_program(seed)
    blocks = [1 + (seed + i) % 3 for i in range(ROWS)]
    # Transfers of some milliseconds make whoever does not wait for them too early.
    link = {"latency": 0.0005, "bandwidth": BLOCK / 0.0005, "duplex": True}
    rows = Rows(blocks, memory, events if with_course else None, rules=rules, device=device, **link)
    expected, wrong, count = [0] * ROWS, [], 0

    def check(number, memory_):
        right = expected[number]
        rows.device.ask(lambda: wrong.append(bool((memory_ != right).any())))

    for number in range(ROWS):
        rows.store(number, number)
        expected[number] = number
    for _ in range(runs):
        held = {}
        with rows.run():
            for what, number in steps:
                count += 1
                if what == "replace":
                    rows.store(number, count)
                    expected[number] = count
                elif what == "give back":
                    context, memory_ = held.pop(number)
                    check(number, memory_)
                    context.__exit__(None, None, None)
                elif what == "hold":
                    context = rows.borrowed(number)
                    held[number] = context, context.__enter__()
                else:
                    with rows.borrowed(number) as memory_:
                        check(number, memory_)
                        if what == "change":
                            rows.device.ask(lambda memory_=memory_: memory_.add_(1))
                            rows.store(number, memory_)
                            expected[number] += 1
    for number in range(ROWS):
        with rows.borrowed(number) as memory_:
            check(number, memory_)
    if (fence := rows.device.fence()) is not None:
        fence.wait()
    rows.cache.close()
    assert len(wrong) > 60 * runs // 4
    return sum(wrong)


@pytest.mark.parametrize("with_course", [True, False])
@pytest.mark.parametrize("memory", [10, 15, 40])
def test_random_programs_read_what_they_stored(with_course, memory):
    for seed in range(2):
        assert wrong_rows(seed, with_course=with_course, memory=memory) == 0


@pytest.mark.parametrize("memory", [10, 15, 40])
def test_random_programs_read_what_they_stored_on_a_device_that_works_behind_them(memory):
    assert wrong_rows(0, memory=memory, device=Late(0.002)) == 0


@pytest.mark.parametrize("rule", sorted(ALL_RULES))
def test_without_a_rule_a_random_program_reads_what_it_did_not_store(rule):
    device = Late(0.002) if rule == "fences" else None
    assert any(wrong_rows(seed, ALL_RULES - {rule}, device=device) for seed in range(8))


def sweep(count):
    """Rows one after the other, each changed."""
    return [event for row in range(count) for event in ((row, LOAD), (row, STORE))]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves on."""
    found = Clock()
    monkeypatch.setattr(cache_module, "threading", found)
    monkeypatch.setattr(cache_module, "time", found)
    return found


@pytest.mark.parametrize("look_ahead, least, most", [(True, 1.0, 1.1), (False, 1.8, 2.1)])
def test_transfers_hide_behind_work_where_the_two_balance(look_ahead, least, most, clock):
    count, memory, compute = 50, 4, 0.015
    moved = 2 * (count - memory + 2)  # a run finds two rows where the one before has left them
    bandwidth = BLOCK * moved / (count * compute)
    rows = Rows([1] * count, memory, sweep(count), look_ahead=look_ahead, bandwidth=bandwidth, clock=clock)
    for _ in range(3):
        begin, transfers = clock.perf_counter(), rows.link.seconds
        with rows.run():
            for number in range(count):
                with rows.borrowed(number) as memory:
                    clock.sleep(compute)
                    rows.store(number, memory)
    transfers, traffic = rows.link.seconds - transfers, rows.cache.traffic
    assert transfers == pytest.approx(count * compute, rel=0.05)
    taken = (clock.perf_counter() - begin) / max(count * compute, transfers)
    assert least <= taken <= most
    assert (traffic.waited < 0.2 * (traffic.read_seconds + traffic.write_seconds)) == look_ahead


def test_looking_ahead_moves_little_more_than_the_best_order_of_leaving(clock):
    count, memory = 24, 12
    moved = {}
    for look_ahead in (False, True):
        rows = Rows([1] * count, memory, sweep(count), look_ahead=look_ahead)
        for _ in range(2):
            rows.take(sweep(count), work=lambda: clock.sleep(0.001))
        before = rows.cache.traffic.reads
        for _ in range(4):
            rows.take(sweep(count), work=lambda: clock.sleep(0.001))
        moved[look_ahead] = (rows.cache.traffic.reads - before) / 4
    assert moved[False] == count - memory
    assert moved[True] <= moved[False] + memory / 2


def test_what_no_later_run_reads_is_never_written():
    events = [(row, STORE) for row in range(8)] + [(row, LOAD) for row in reversed(range(8))]
    written = {}
    for carries in (set(), set(range(8))):
        rows = Rows([1] * 8, 5, events, carries=carries)
        for _ in range(4):
            rows.take(events)
        with rows.run():
            for row, stores in events:
                if stores:
                    rows.store(row, 40 + row)
                else:
                    with rows.borrowed(row) as memory:
                        assert (memory == 40 + row).all()
        written[bool(carries)] = rows.cache.traffic.writes
    assert 0 < written[False] < written[True]


def test_rows_that_all_fit_are_never_moved():
    rows = Rows([1, 2, 3], 6, sweep(3))
    for number in range(3):
        rows.store(number, number)
    for _ in range(3):
        rows.take(sweep(3))
    assert rows.link.transfers == 0


def test_a_run_that_was_given_up_leaves_the_next_one_whole():
    rows = Rows([1] * 6, 3, sweep(6))
    for number in range(6):
        rows.store(number, number)
    with pytest.raises(ZeroDivisionError):
        with rows.run():
            with rows.borrowed(0):
                raise ZeroDivisionError
    rows.take(sweep(6))
    for number in range(6):
        with rows.borrowed(number) as memory:
            assert (memory == number).all()


def test_more_in_use_than_there_is_memory_for_is_an_error():
    rows = Rows([2, 2, 2], 5)
    with rows.borrowed(0), rows.borrowed(1):
        with pytest.raises(RemoteMemoryError, match="of which 16384 are in use, for a row of 8192; expected room"):
            rows.cache.borrow(rows.rows[2])
    with rows.borrowed(2):
        pass


@pytest.mark.parametrize("fails_at", [0, 5, 11])
def test_a_transfer_that_fails_ends_the_run_with_its_words(fails_at):
    rows = Rows([1] * 6, 3, sweep(6), fails_at=fails_at)
    with pytest.raises(RemoteMemoryError, match="Input/output error"):
        for number in range(6):
            rows.store(number, number)
        for _ in range(3):
            rows.take(sweep(6))
    with pytest.raises(RemoteMemoryError, match="Input/output error"):
        rows.cache.check()


def test_a_course_knows_the_uses_of_a_row_before_and_after_any_time():
    events = [(0, LOAD), (1, LOAD), (0, STORE)]
    course = Course(events, [10, 100, 1000])
    uses = {row: [t for t in range(-3, 12) if events[t % 3][0] == row] for row in (0, 1)}
    for time_ in range(0, 6):
        for row in (0, 1):
            assert course.next_use(row, time_) == min(t for t in uses[row] if t >= time_)
            assert course.last_use(row, time_) == max(t for t in uses[row] if t < time_)
    assert course.next_use(2, 1) == float("inf") and course.last_use(2, 1) == -float("inf")
    assert course.moved(1, 5) == 100 + 10 + 10 + 100
    assert not course.begins_with_store(0) and not course.begins_with_store(2)


def test_an_arena_takes_the_neighbours_that_are_missed_least():
    arena = Arena(6 * BLOCK)
    arena.bytes = torch.zeros(100 * BLOCK, dtype=torch.uint8)  # nothing is large for it
    for name, size in (("a", 2), ("b", 1), ("c", 1), ("d", 2)):
        arena.give(arena.find(size * BLOCK, lambda row: None, 0), size * BLOCK, name, [])
    worths = {"a": 5, "b": 9, "c": 7, "d": 8}
    assert arena.find(2 * BLOCK, worths.get, 0) == (3, 4)
    assert arena.find(3 * BLOCK, worths.get, 0) == (2, 4)
    assert arena.find(3 * BLOCK, {**worths, "c": None}.get, 0) == (0, 2)
    assert arena.find(3 * BLOCK, worths.get, 7) is None
    assert arena.give((1, 4), 3 * BLOCK, "e", ["write"]).nbytes == 3 * BLOCK
    assert arena.extents[-1].after == ["write"], "what is left over of a row's memory may still be read"
    assert [(e.start, e.size, e.row) for e in arena.extents] == [
        (0, 2 * BLOCK, "a"), (2 * BLOCK, 3 * BLOCK, "e"), (5 * BLOCK, BLOCK, None)
    ]  # fmt: skip


def test_memory_that_is_there_but_not_in_one_piece_serves_too():
    rows = Rows([1] * 8 + [4], 8)
    for number in range(8):
        rows.store(number, number)
    with rows.borrowed(1) as one, rows.borrowed(3) as three, rows.borrowed(5) as five:
        rows.store(8, 80)
        with rows.borrowed(8) as large:
            assert (large == 80).all() and rows.rows[8].is_apart
            assert (one == 1).all() and (three == 3).all() and (five == 5).all()
            with rows.borrowed(0) as zero, pytest.raises(RemoteMemoryError, match="of which 32768 are in use"):
                assert (zero == 0).all()
                rows.cache.borrow(rows.rows[2])
    for number in (*range(8), 8):
        with rows.borrowed(number) as memory:
            assert (memory == (80 if number == 8 else number)).all()
    assert not rows.rows[8].is_apart or rows.rows[8].memory is not None
    assert sum(extent.size for extent in rows.cache.arena.extents) == 8 * BLOCK


def test_large_rows_lie_side_by_side_and_leave_room_for_each_other():
    arena = Arena(12 * BLOCK)
    for number in range(12):
        arena.give(arena.find(BLOCK, lambda row: None, 0), BLOCK, number, [])
    worths = {4: 60, 5: 60, 6: 60, 7: 60}
    for name in "abc":
        window = arena.find(4 * BLOCK, lambda row: worths.get(row, 50) if isinstance(row, int) else None, 0)
        arena.give(window, 4 * BLOCK, name, [])
    assert [e.row for e in arena.extents] == ["a", "b", "c"]


# Files


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_gives_back_what_it_took(direct, tmp_path):
    store = FileStore(str(tmp_path / "made"), 8 * BLOCK, direct)
    data = Arena(2 * BLOCK)
    data.bytes.random_(0, 256)
    store.write(3 * BLOCK, data.bytes)
    back = Arena(2 * BLOCK)
    store.read(3 * BLOCK, back.bytes)
    assert (back.bytes == data.bytes).all()
    assert not store.is_direct or direct
    assert os.listdir(tmp_path / "made") == [], "nothing that could outlive the process"
    store.close()


def test_a_folder_that_takes_no_file_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RemoteMemoryError, match="below: got 'Not a directory' while making a file; expected a folder"):
        FileStore(str(tmp_path / "file" / "below"), BLOCK)


def test_a_disk_without_the_space_is_an_error_before_anything_runs(tmp_path):
    statistics = os.statvfs(tmp_path)
    too_much = statistics.f_frsize * statistics.f_blocks + 2**40
    with pytest.raises(RemoteMemoryError, match="while reserving .* bytes for remote memory; expected that much space"):
        FileStore(str(tmp_path), too_much)


class Refusing:
    """Functions of `os` on a file system that knows some ways only: a flag or a call fails with an error number."""

    def __init__(self, monkeypatch, **errors):
        for name, (error, applies) in errors.items():
            module = fcntl if name == "fcntl" else os
            monkeypatch.setattr(module, name, self.refusing(getattr(module, name), error, applies))

    @staticmethod
    def refusing(function, error, applies):
        def call(*arguments):
            if applies(*arguments):
                raise OSError(error, os.strerror(error))
            return function(*arguments)

        return call


def is_unnamed(path, flags, *mode):
    return flags & os.O_TMPFILE == os.O_TMPFILE


def asks_for_direct(file, command, *value):
    return command == fcntl.F_SETFL and bool(value[0] & os.O_DIRECT)


@pytest.mark.parametrize("direct_error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_unnamed_files_and_direct_transfers_serves_too(
    direct_error, tmp_path, monkeypatch, caplog
):
    Refusing(monkeypatch, open=(errno.EOPNOTSUPP, is_unnamed), fcntl=(direct_error, asks_for_direct))
    for _ in range(2):
        store = FileStore(str(tmp_path), 4 * BLOCK)
        data = torch.arange(2 * BLOCK).to(torch.uint8)
        store.write(BLOCK, data)
        back = torch.zeros_like(data)
        store.read(BLOCK, back)
        assert not store.is_direct and torch.equal(back, data) and os.listdir(tmp_path) == []
        store.close()
    assert [record.message.split("): ")[1] for record in caplog.records] == [
        "knows no direct transfers; rows go through the page cache, more slowly."
    ], "told once"


def test_a_file_system_that_is_read_only_is_an_error_in_its_words(tmp_path, monkeypatch):
    Refusing(monkeypatch, open=(errno.EROFS, lambda *_: True))
    with pytest.raises(RemoteMemoryError, match="got 'Read-only file system' while making a file; expected a folder"):
        FileStore(str(tmp_path), BLOCK)


MOUNTED = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /far rw - nfs4 server:/export rw
31 30 0:26 / /far/near\040here rw master:1 - xfs /dev/vdb rw
32 22 0:27 / /far/quick rw - ext4 /dev/vdc rw
33 22 0:28 / /far/quick rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    "folder, kind, words",
    [
        ("/home/rows", "ext4", None),
        ("/farther", "ext4", None),
        ("/far/rows", "nfs4", "lies on another machine (nfs4)"),
        ("/far/near here/rows", "xfs", None),
        ("/far/quick", "tmpfs", "lies in memory (tmpfs)"),
    ],
)
def test_folders_on_other_machines_and_in_memory_are_told_of(folder, kind, words, tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTED)
    assert store_module.file_system(folder, mounts) == kind
    assert store_module.file_system(folder, tmp_path / "nothing") == "unknown"
    monkeypatch.setattr(store_module, "file_system", lambda folder: kind)
    store_module.tell_of_slow_ways.__wrapped__(folder, True)
    assert [record.message.startswith(f"{folder}: {words}") for record in caplog.records] == [True] * bool(words)


# Programs

ENTRIES, SHAPE = 10, (64, 48)


def program(replicas=1):
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        random = np.random.default_rng(3)
        buffers = [popxl.remote_buffer(SHAPE, dtype, ENTRIES) for dtype in (popxl.float32, popxl.float16)]
        variables = [
            popxl.remote_variable(random.normal(size=SHAPE).astype(b.tensor_dtype.as_numpy()), b, i)
            for b in buffers
            for i in range(ENTRIES)
        ]
        graph = ir.create_graph(halving, popxl.constant(0, popxl.int32), buffers[1])
        ops.repeat(graph, ENTRIES, popxl.constant(0, popxl.int32))
        graph = ir.create_graph(mixing, popxl.constant(0, popxl.int32), buffers[0])
        ops.repeat(graph, ENTRIES - 1, popxl.constant(0, popxl.int32))
    return ir, variables


def halving(n: popxl.Tensor, buffer: popxl.RemoteBuffer):
    """Row n is changed in place."""
    t = ops.remote_load(buffer, n)
    ops.scaled_add_(t, t, b=-0.5)
    ops.remote_store(buffer, n, t)
    return n + 1


def mixing(n: popxl.Tensor, buffer: popxl.RemoteBuffer):
    """Row n + 1 gets row n's values beside its own."""
    first, second = ops.remote_load(buffer, n), ops.remote_load(buffer, n + 1)
    ops.remote_store(buffer, n + 1, first + second)
    ops.remote_store(buffer, n, second)
    return n + 1


def results(memory=None, folder=None, replicas=1, runs=3, device_memory=None):
    ir, variables = program(replicas)
    if memory is not None:
        keep_remote_memory_in_files(ir, str(folder), memory)
    if device_memory is not None:
        limit_device_memory(ir, device_memory)
    session = popxl.Session(ir)
    with session:
        for _ in range(runs):
            session.run()
        found = session.get_tensors_data(variables)
    return [found[v] for v in variables], file_traffic(session)


@pytest.mark.parametrize("interpret", ["0", "1"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("memory", [70_000, 120_000, 10**7])
def test_a_program_gives_the_same_bits_with_its_rows_in_files(memory, replicas, interpret, tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    expected, none = results(replicas=replicas)
    got, traffic = results(memory * replicas, tmp_path, replicas)
    for a, b in zip(expected, got):
        np.testing.assert_array_equal(a, b)
    assert none is None
    assert (traffic.reads > 0) == (traffic.writes > 0) == (traffic.file_bytes > 0) == (memory < 10**7)
    assert traffic.memory_bytes <= memory * replicas
    assert traffic.read_bytes % BLOCK == 0 and traffic.file_bytes <= 2 * ENTRIES * 4 * BLOCK * replicas


@pytest.mark.parametrize("interpret", ["0", "1"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("memory, with_files", [(120_000, False), (120_000, True), (10**7, False)])
def test_a_program_gives_the_same_bits_on_a_device_with_less_memory(
    memory, with_files, replicas, interpret, tmp_path, monkeypatch
):
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    files = (1, tmp_path) if with_files else ()
    got, traffic = results(*files, replicas=replicas, device_memory=memory * replicas)
    for a, b in zip(results(replicas=replicas)[0], got):
        np.testing.assert_array_equal(a, b)
    assert (traffic.reads > 0) == (traffic.writes > 0) == (traffic.file_bytes > 0) == (memory < 10**7)
    assert traffic.memory_bytes <= memory * replicas


def test_a_device_memory_that_does_not_hold_what_is_in_use_says_how_much_does():
    with pytest.raises(RemoteMemoryError, match=r"got 20000 bytes of cpu; expected at least \d+: (\d+) .* mixing") as e:
        results(device_memory=20_000)
    enough = int(str(e.value).split("at least ")[1].split(":")[0])
    got, traffic = results(device_memory=enough)
    assert traffic.reads > 0
    for a, b in zip(results()[0], got):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("memory", [0, -5, True, 0.0, 1.5, "2"])
def test_a_device_memory_that_is_neither_bytes_nor_a_share_is_refused(memory):
    with pytest.raises(ValueError, match="expected a number of bytes, at least 1, or a share as a float above 0"):
        limit_device_memory(popxl.Ir(), memory)


def test_looking_ahead_can_be_switched_off_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("POPXL_LOOK_AHEAD", "0")
    got, traffic = results(120_000, tmp_path)
    for a, b in zip(results()[0], got):
        np.testing.assert_array_equal(a, b)
    # Who fetches when asked waits for every read.
    assert traffic.reads > 0 and traffic.waited_for_reads > 0.8 * traffic.read_seconds


def test_a_memory_that_does_not_hold_what_is_in_use_says_how_much_does(tmp_path):
    with pytest.raises(RemoteMemoryError, match=r"got 20000 bytes .*; expected at least (\d+) .* in phase mixing") as e:
        results(20_000, tmp_path)
    enough = int(str(e.value).split("at least ")[1].split()[0])
    got, _ = results(enough, tmp_path)
    for a, b in zip(results()[0], got):
        np.testing.assert_array_equal(a, b)


def test_a_row_stays_where_it_is_while_a_tensor_has_its_memory(tmp_path):
    ir, _ = program()
    keep_remote_memory_in_files(ir, str(tmp_path), 80_000)
    session = popxl.Session(ir)
    (replica,) = session._engine.machine.replicas
    rows = replica.rows[ir.remote_buffers[0]]
    view = rows.load(0).reshape(-1)[5:]
    before = view.clone()
    for index in range(1, ENTRIES):
        rows.store(index, torch.zeros(SHAPE))
    assert torch.equal(view, before)
    with pytest.raises(IndexError, match="got offset 10; expected 0 <= offset < 10"):
        rows.load(10)


def test_a_session_that_is_gone_leaves_no_thread_and_no_file(tmp_path):
    ir, _ = program()
    keep_remote_memory_in_files(ir, str(tmp_path), 80_000)
    session = popxl.Session(ir)
    (cache,) = session._engine.machine.caches
    gone = weakref.ref(session._engine.machine)
    session = ir._holder = None
    gc.collect()
    assert gone() is None
    for _ in range(500):
        if cache._threads == 0:
            break
        time.sleep(0.01)
    assert cache._threads == 0
    with pytest.raises(OSError):
        os.fstat(cache.store._file)


def test_a_program_that_ends_waits_for_what_is_being_moved(monkeypatch):
    at_exit = []
    monkeypatch.setattr(cache_module.atexit, "register", lambda *call: at_exit.append(call))
    rows = Rows([1] * 8, 3, sweep(8), latency=0.05)
    with rows.run():
        with rows.borrowed(0):
            pass
    ((function, *arguments),) = at_exit
    function(*arguments)
    assert rows.link.is_closed and not any(worker.is_alive() for worker in rows.cache._workers)


def test_rows_whose_numbers_are_in_a_variable_are_fetched_when_they_are_asked_for(tmp_path):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer(SHAPE, popxl.float32, ENTRIES)
        rows = [popxl.remote_variable(np.full(SHAPE, i, np.float32), buffer, i) for i in range(ENTRIES)]
        n = popxl.variable(0, popxl.int32)
        t = ops.remote_load(buffer, n)
        ops.remote_store(buffer, n, t + 10)
        n += popxl.constant(1, popxl.int32)
    keep_remote_memory_in_files(ir, str(tmp_path), 80_000)
    with popxl.Session(ir) as session:
        for _ in range(ENTRIES):
            session.run()
        found = session.get_tensors_data(rows)
    assert [found[row][0, 0] for row in rows] == [10 + i for i in range(ENTRIES)]


@pytest.mark.parametrize("memory", [0, -5, True, 1.5])
def test_a_memory_that_is_no_number_of_bytes_is_refused(memory, tmp_path):
    with pytest.raises(ValueError, match="expected a number of bytes, at least 1"):
        keep_remote_memory_in_files(popxl.Ir(), str(tmp_path), memory)

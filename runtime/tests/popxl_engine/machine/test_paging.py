"""Rows in files: the contents are right whatever is fetched, moved and written meanwhile, and
waiting is short.
"""

import os
import signal
import threading
import weakref

import numpy as np
import pytest
import torch
from helpers.paging import LOAD, STORE, Clock, Late, Rows, sweep
from helpers.quick import cases
from popxl.errors import RemoteMemoryError
from popxl_engine.machine.paging import BLOCK, RULES, AccessTrace
from popxl_engine.machine.paging import transfers as transfers_module
from popxl_engine.machine.paging.arena import Arena

ROWS = 12


def random_program(seed):
    """Steps of a run as (what, row) and their events: rows are taken, held over others, changed and
    stored.
    """
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
            events += {
                "read": [(row, LOAD)],
                "change": [(row, LOAD), (row, STORE)],
                "replace": [(row, STORE)],
            }[what]
        steps.append((str(what), row))
    return [*steps, *(("give back", row) for row in held)], events


def wrong_rows(seed, rules=RULES, with_trace=True, memory=15, runs=3, device=None):
    """Reads that a random program gets wrong, beside the same program on plain numbers."""
    steps, events = random_program(seed)
    blocks = [1 + (seed + i) % 3 for i in range(ROWS)]
    # Transfers of some milliseconds make whoever does not wait for them too early.
    link = {"latency": 0.0005, "bandwidth": BLOCK / 0.0005, "duplex": True}
    rows = Rows(blocks, memory, events if with_trace else None, rules=rules, device=device, **link)
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


@pytest.mark.parametrize("with_trace", [True, False])
@pytest.mark.parametrize("memory", cases([10, 15, 40], lambda memory: memory == 15))
def test_random_programs_read_what_they_stored(with_trace, memory):
    for seed in range(2):
        assert wrong_rows(seed, with_trace=with_trace, memory=memory) == 0


@pytest.mark.slow
@pytest.mark.parametrize("memory", [10, 15, 40])
def test_random_programs_read_what_they_stored_on_a_device_that_works_behind_them(memory):
    assert wrong_rows(0, memory=memory, device=Late(0.002)) == 0


@pytest.mark.parametrize("rule", cases(sorted(RULES), lambda rule: rule != "fences"))
def test_without_a_rule_a_random_program_reads_what_it_did_not_store(rule):
    device = Late(0.002) if rule == "fences" else None
    assert any(wrong_rows(seed, RULES - {rule}, device=device) for seed in range(8))


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves on."""
    found = Clock()
    monkeypatch.setattr(transfers_module, "threading", found)
    monkeypatch.setattr(transfers_module, "time", found)
    yield found
    found.rest()  # threads that still sleep wake up, and end with the process: it waits for them


@pytest.mark.parametrize("look_ahead, least, most", [(True, 1.0, 1.1), (False, 1.8, 2.1)])
def test_transfers_hide_behind_work_where_the_two_balance(look_ahead, least, most, clock):
    count, memory, compute = 50, 4, 0.015
    moved = 2 * (count - memory + 2)  # a run finds two rows where the one before has left them
    bandwidth = BLOCK * moved / (count * compute)
    rows = Rows(
        [1] * count, memory, sweep(count), look_ahead=look_ahead, bandwidth=bandwidth, clock=clock
    )
    for _ in range(3):
        begin, transfers = clock.perf_counter(), rows.link.seconds
        with rows.run():
            for number in range(count):
                with rows.borrowed(number) as memory:
                    clock.sleep(compute)
                    rows.store(number, memory)
    transfers, traffic = rows.link.seconds - transfers, rows.cache.transfers.traffic
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
        before = rows.cache.transfers.traffic.reads
        for _ in range(4):
            rows.take(sweep(count), work=lambda: clock.sleep(0.001))
        moved[look_ahead] = (rows.cache.transfers.traffic.reads - before) / 4
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
        written[bool(carries)] = rows.cache.transfers.traffic.writes
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
        with pytest.raises(
            RemoteMemoryError, match="of which 16384 are in use, for a row of 8192; expected room"
        ):
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
    trace = AccessTrace(events, [10, 100, 1000])
    uses = {row: [t for t in range(-3, 12) if events[t % 3][0] == row] for row in (0, 1)}
    for time_ in range(0, 6):
        for row in (0, 1):
            assert trace.next_use(row, time_) == min(t for t in uses[row] if t >= time_)
            assert trace.last_use(row, time_) == max(t for t in uses[row] if t < time_)
    assert trace.next_use(2, 1) == float("inf") and trace.last_use(2, 1) == -float("inf")
    assert trace.moved_until(5) - trace.moved_until(1) == 100 + 10 + 10 + 100
    assert not trace.begins_with_store(0) and not trace.begins_with_store(2)


def test_what_a_row_is_worth_follows_from_the_course_wherever_it_is_looked_from():
    random = np.random.default_rng(4)
    events = [
        (int(row), bool(store))
        for row, store in zip(random.integers(0, 9, 60), random.integers(0, 2, 60))
    ]
    rows = Rows(random.integers(1, 5, 10), 12, events)
    read_ahead, trace = rows.cache.read_ahead, rows.cache.replacement.trace
    for time_ in [*range(60, 130), 3, 200, *random.integers(0, 500, 200)]:
        read_ahead.time, read_ahead.moved = int(time_), trace.moved_until(int(time_))
        for row in rows.rows:
            next_use, last = trace.next_use(row.index, time_), trace.last_use(row.index, time_)
            is_recent = trace.moved_until(time_) - trace.moved_until(last) < read_ahead.margin
            assert read_ahead.priority(row) == (None if is_recent else next_use)


def test_an_arena_takes_the_neighbours_that_are_missed_least():
    arena = Arena(6 * BLOCK)
    arena.bytes = torch.zeros(100 * BLOCK, dtype=torch.uint8)  # nothing is large for it
    for name, size in (("a", 2), ("b", 1), ("c", 1), ("d", 2)):
        arena.allocate(arena.find(size * BLOCK, lambda row: None, 0), size * BLOCK, name, [])
    worths = {"a": 5, "b": 9, "c": 7, "d": 8}
    assert arena.find(2 * BLOCK, worths.get, 0) == (3, 4)
    assert arena.find(3 * BLOCK, worths.get, 0) == (2, 4)
    assert arena.find(3 * BLOCK, {**worths, "c": None}.get, 0) == (0, 2)
    assert arena.find(3 * BLOCK, worths.get, 7) is None
    assert arena.allocate((1, 4), 3 * BLOCK, "e", ["write"]).nbytes == 3 * BLOCK
    assert arena.extents[-1].after == ["write"], (
        "what is left over of a row's memory may still be read"
    )
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
            with (
                rows.borrowed(0) as zero,
                pytest.raises(RemoteMemoryError, match="of which 32768 are in use"),
            ):
                assert (zero == 0).all()
                rows.cache.borrow(rows.rows[2])
    for number in (*range(8), 8):
        with rows.borrowed(number) as memory:
            assert (memory == (80 if number == 8 else number)).all()
    assert not rows.rows[8].is_apart or rows.rows[8].memory is not None
    assert sum(extent.size for extent in rows.cache.placement.arena.extents) == 8 * BLOCK


def test_large_rows_lie_side_by_side_and_leave_room_for_each_other():
    arena = Arena(12 * BLOCK)
    for number in range(12):
        arena.allocate(arena.find(BLOCK, lambda row: None, 0), BLOCK, number, [])
    worths = {4: 60, 5: 60, 6: 60, 7: 60}
    for name in "abc":
        window = arena.find(
            4 * BLOCK, lambda row: worths.get(row, 50) if isinstance(row, int) else None, 0
        )
        arena.allocate(window, 4 * BLOCK, name, [])
    assert [e.row for e in arena.extents] == ["a", "b", "c"]


def test_a_fork_ends_although_a_thread_had_the_lock_that_is_not_in_it():
    transfers = Rows([1, 1], memory=1).cache.transfers
    has_lock, may_give_back = threading.Event(), threading.Event()

    def hold():
        with transfers.lock:
            has_lock.set()
            may_give_back.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    has_lock.wait()
    if not (child := os.fork()):
        signal.alarm(5)
        transfers_module.end(weakref.ref(transfers))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    may_give_back.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0

"""Sessions whose rows are in files, or outside a small device: the same bits, within their memory,
nothing left.
"""

import gc
import os
import time
import weakref

import numpy as np
import popxl
import pytest
import torch
from helpers.paging import Rows, sweep
from helpers.quick import cases
from helpers.row_programs import ENTRIES, SHAPE, program
from popxl import ops
from popxl.errors import RemoteMemoryError
from popxl.extensions import (
    device_needs,
    file_traffic,
    keep_remote_memory_in_files,
    limit_device_memory,
)
from popxl_engine.machine.paging import (
    BLOCK,
    Cache,
    FileStore,
    Paging,
    make_paged_buffer,
    transfers,
)
from popxl_engine.machine.paging.budget import RowMemory
from popxl_engine.machine.paging.read_ahead import ReadAhead


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


INTERPRETED = pytest.mark.parametrize(
    "interpret", cases(["0", "1"], lambda interpret: interpret == "0")
)


@pytest.mark.sampled(2)
@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("memory", cases([70_000, 120_000, 10**7], lambda memory: memory == 70_000))
def test_a_program_gives_the_same_bits_with_its_rows_in_files(
    memory, replicas, interpret, tmp_path, monkeypatch
):
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    expected, none = results(replicas=replicas)
    got, traffic = results(memory * replicas, tmp_path, replicas)
    for a, b in zip(expected, got):
        np.testing.assert_array_equal(a, b)
    assert none is None
    assert (
        (traffic.reads > 0) == (traffic.writes > 0) == (traffic.file_bytes > 0) == (memory < 10**7)
    )
    assert traffic.memory_bytes <= memory * replicas
    assert (
        traffic.read_bytes % BLOCK == 0 and traffic.file_bytes <= 2 * ENTRIES * 4 * BLOCK * replicas
    )


@pytest.mark.sampled(2)
@INTERPRETED
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "memory, with_files",
    [(120_000, False), (120_000, True), pytest.param(10**7, False, marks=pytest.mark.slow)],
)
def test_a_program_gives_the_same_bits_on_a_device_with_less_memory(
    memory, with_files, replicas, interpret, tmp_path, monkeypatch
):
    monkeypatch.setenv("POPXL_INTERPRET", interpret)
    files = (1, tmp_path) if with_files else ()
    got, traffic = results(*files, replicas=replicas, device_memory=memory * replicas)
    for a, b in zip(results(replicas=replicas)[0], got):
        np.testing.assert_array_equal(a, b)
    assert (
        (traffic.reads > 0) == (traffic.writes > 0) == (traffic.file_bytes > 0) == (memory < 10**7)
    )
    assert traffic.memory_bytes <= memory * replicas


@pytest.mark.slow
def test_a_device_memory_that_does_not_hold_what_is_in_use_says_how_much_does():
    with pytest.raises(
        RemoteMemoryError, match=r"got 20000 bytes of cpu; expected at least \d+: (\d+) .* mixing"
    ) as e:
        results(device_memory=20_000)
    enough = int(str(e.value).split("at least ")[1].split(":")[0])
    got, traffic = results(device_memory=enough)
    assert traffic.reads > 0
    for a, b in zip(results()[0], got):
        np.testing.assert_array_equal(a, b)


def test_no_program_needs_more_memory_than_all_its_rows_take():
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence(True):
        buffer = popxl.remote_buffer((1000,), popxl.float32, 1)
        v = popxl.remote_variable(np.arange(1000, dtype=np.float32), buffer, 0)
        zero = popxl.constant(0, popxl.int32)
        ops.remote_store(buffer, zero, ops.remote_load(buffer, zero) + 1.0)
    needs = device_needs(ir)
    assert needs.least == needs.resident
    limit_device_memory(ir, needs.least)
    with popxl.Session(ir) as session:
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(v), np.arange(1000) + 1)


@pytest.mark.parametrize("memory", [0, -5, True, 0.0, 1.5, "2"])
def test_a_device_memory_that_is_neither_bytes_nor_a_share_is_refused(memory):
    with pytest.raises(
        ValueError, match="expected a number of bytes, at least 1, or a share as a float above 0"
    ):
        limit_device_memory(popxl.Ir(), memory)


@pytest.mark.parametrize("looks", ["0", "1"])
def test_looking_ahead_can_be_switched_off_by_name(looks, tmp_path, monkeypatch):
    rows, make_room = [], ReadAhead._make_room

    def noted(cache, row):
        rows.append(row)
        return make_room(cache, row)

    monkeypatch.setattr(ReadAhead, "_make_room", noted)
    monkeypatch.setenv("POPXL_LOOK_AHEAD", looks)
    got, traffic = results(120_000, tmp_path)
    for a, b in zip(results()[0], got):
        np.testing.assert_array_equal(a, b)
    assert traffic.reads > 0 and bool(rows) == (looks == "1")


def test_a_memory_that_does_not_hold_what_is_in_use_says_how_much_does(tmp_path):
    with pytest.raises(
        RemoteMemoryError, match=r"got 20000 bytes .*; expected at least (\d+) .* in phase mixing"
    ) as e:
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


@pytest.mark.slow
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
        if cache.transfers._running == 0:
            break
        time.sleep(0.01)
    assert cache.transfers._running == 0
    with pytest.raises(OSError):
        os.fstat(cache.transfers.store._file)


def test_a_session_that_fails_for_its_memory_leaves_no_thread_and_no_file(tmp_path, monkeypatch):
    caches, make = [], Cache.__init__

    def noted(cache, *arguments):
        caches.append(cache)
        make(cache, *arguments)

    def fails(memory):
        raise RemoteMemoryError("remote memory: got 4096 bytes; expected no more.")

    monkeypatch.setattr(Cache, "__init__", noted)
    monkeypatch.setattr(RowMemory, "_cut", fails)
    ir, _ = program()
    keep_remote_memory_in_files(ir, str(tmp_path), 80_000)
    with pytest.raises(RemoteMemoryError, match="got 4096 bytes"):
        popxl.Session(ir)
    (cache,) = caches
    cache.transfers.join(10)
    assert cache.transfers._running == 0
    with pytest.raises(OSError):
        os.fstat(cache.transfers.store._file)


class Compared(popxl.RemoteBuffer):
    """A buffer that knows how often one was compared with another."""

    times = 0
    __hash__ = object.__hash__

    def __eq__(self, other):
        Compared.times += 1
        return self is other


@pytest.mark.parametrize("memory", [10**6, 10**7])
def test_rows_are_not_looked_for_among_each_other(memory, tmp_path):
    with popxl.Ir().main_graph:
        buffers = [Compared((4,), popxl.float32, 300) for _ in range(4)]
    store = lambda nbytes, largest: FileStore(str(tmp_path), nbytes)  # noqa: E731
    found, shared = make_paged_buffer(Paging("memory", "files", memory, store), buffers, 1)
    shared.cache.close()
    assert [found[b].entries for b in buffers] == 4 * [300]
    assert Compared.times < 1200, "fewer than there are rows"


def test_a_program_that_ends_waits_for_what_is_being_moved(monkeypatch):
    at_exit = []
    monkeypatch.setattr(transfers.atexit, "register", lambda *call: at_exit.append(call))
    rows = Rows([1] * 8, 3, sweep(8), latency=0.05)
    with rows.run():
        with rows.borrowed(0):
            pass
    ((function, *arguments),) = at_exit
    function(*arguments)
    assert rows.link.is_closed and not any(
        thread.is_alive() for thread in rows.cache.transfers._threads
    )


def test_rows_whose_numbers_are_in_a_variable_are_fetched_when_they_are_asked_for(tmp_path):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer(SHAPE, popxl.float32, ENTRIES)
        rows = [
            popxl.remote_variable(np.full(SHAPE, i, np.float32), buffer, i) for i in range(ENTRIES)
        ]
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

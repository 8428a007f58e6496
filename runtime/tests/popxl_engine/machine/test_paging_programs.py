"""Rows that come and go under harder programs: memory just enough, rows apart from the arena, runs
that are given up.

And a device that fails, or that still writes to memory which it gives.
"""

import threading

import numpy as np
import pytest
import torch
from helpers.paging import LOAD, STORE, Late, Rows
from helpers.quick import cases
from popxl.errors import RemoteMemoryError
from popxl_engine.machine.device import Processor
from popxl_engine.machine.paging import BLOCK

KINDS = ("read", "change", "replace", "copy", "hold", "hold", "give back", "change what is held")


class Program:
    """A random program over rows of several sizes, and the memory that it needs: what is in use at
    a time.

    Steps are (what, row, another row), events those of their loads and stores.
    """

    def __init__(self, random):
        self.blocks = [int(n) for n in random.choice([1, 1, 2, 3, 5], random.integers(5, 14))]
        self.steps, self.events, held = [], [], []
        for what in random.choice(KINDS, 80):
            row, other = (int(n) for n in random.integers(len(self.blocks), size=2))
            if what in ("give back", "change what is held"):
                if not held:
                    continue
                row = (
                    held.pop(other % len(held)) if what == "give back" else held[other % len(held)]
                )
            elif (
                row in held
                or what == "copy"
                and (other in held or other == row)
                or what == "hold"
                and len(held) > 2
            ):
                continue
            held += [row] * (what == "hold")
            self.events += [(other if what == "copy" else row, LOAD)] * (
                what in ("copy", "read", "change", "hold")
            )
            self.events += [(row, STORE)] * (
                what in ("change", "replace", "copy", "change what is held")
            )
            self.steps.append((str(what), row, other))
        self.steps += [("give back", row, 0) for row in held]

    @property
    def needed(self):
        """Blocks."""
        held, most = set(), 0
        for what, row, other in self.steps:
            held.discard(row) if what == "give back" else held.add(row)
            most = max(
                most, sum(self.blocks[r] for r in held | ({other} if what == "copy" else set()))
            )
            if what not in ("hold", "give back", "change what is held"):
                held.discard(row)
        return most


class GivenUp(Exception):
    """A run that was given up."""


class Run:
    """A program on rows beside the same one on plain numbers."""

    def __init__(self, rows, program):
        self.rows, self.program, self.held, self.count, self.was_apart = rows, program, {}, 0, 0
        self.expected, self.wrong = list(range(len(program.blocks))), []
        for number in self.expected:
            rows.store(number, number)

    def check(self, number, memory):
        right = self.expected[number]
        self.rows.device.ask(lambda: self.wrong.append(bool((memory != right).any())))

    def change(self, number, memory):
        self.rows.device.ask(lambda: memory.add_(1))
        self.expected[number] += 1

    def replace(self, number):
        self.count += 1
        self.expected[number] = 100 + self.count
        self.rows.store(number, 100 + self.count)

    def look(self, number):
        with self.rows.borrowed(number) as memory:
            self.check(number, memory)

    def step(self, what, number, other):
        rows = self.rows
        if what == "replace":
            self.replace(number)
        elif what == "hold":
            context = rows.borrowed(number)
            self.held[number] = context, context.__enter__()
            self.check(number, self.held[number][1])
        elif what == "change what is held":
            self.change(number, self.held[number][1])
            rows.cache.filled(self.filling(number))
        elif what == "give back":
            context, memory = self.held.pop(number)
            self.check(number, memory)
            context.__exit__(None, None, None)
        elif what == "copy":
            with rows.borrowed(other) as source:
                self.check(other, source)
                row = self.filling(number)
                target = row.memory.view(torch.int64)
                rows.device.ask(lambda: target.fill_(int(source[0])))
                rows.cache.filled(row)
            self.expected[number] = self.expected[other]
        else:
            with rows.borrowed(number) as memory:
                self.check(number, memory)
                if what == "change":
                    self.change(number, memory)
                    rows.store(number, memory)
        self.was_apart += rows.rows[number].is_apart

    def filling(self, number):
        self.rows.cache.borrow_to_fill(self.rows.rows[number])
        return self.rows.rows[number]

    def run(self, until=None):
        try:
            with self.rows.run():
                for place, step in enumerate(self.program.steps):
                    if place == until:
                        raise GivenUp
                    self.step(*step)
        except GivenUp:
            for context, _ in self.held.values():
                context.__exit__(None, None, None)
            self.held.clear()

    def end(self):
        for number in range(len(self.expected)):
            self.look(number)
        if (fence := self.rows.device.fence()) is not None:
            fence.wait()
        extents = self.rows.cache.placement.arena.extents
        for row in {e.row for e in extents if e.row is not None}:
            assert sum(e.size for e in extents if e.row is row) == row.size
            assert row.is_apart or sum(e.row is row for e in extents) == 1
        self.rows.cache.close()


@pytest.mark.slow
@pytest.mark.parametrize("with_trace, look_ahead", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("is_late", [False, True])
def test_programs_with_memory_just_enough_read_what_they_stored_whatever_is_given_up(
    is_late, with_trace, look_ahead
):
    was_apart = 0
    for seed in range(1, 4):
        random = np.random.default_rng(seed)
        program = Program(random)
        device, link = (
            Late(0.0003) if is_late else None,
            {"latency": 0.0003, "bandwidth": BLOCK / 0.0002},
        )
        events = program.events if with_trace else None
        memory = max(*program.blocks, program.needed)
        rows = Rows(
            program.blocks,
            memory,
            events,
            look_ahead=look_ahead,
            device=device,
            duplex=True,
            **link,
        )
        run = Run(rows, program)
        for until in (None, int(random.integers(len(program.steps))), None):
            run.run(until)
            run.look(int(random.integers(len(program.blocks))))  # by the host, between runs
            run.replace(int(random.integers(len(program.blocks))))
        run.end()
        assert len(run.wrong) > 60 and not any(run.wrong)
        was_apart += run.was_apart
    assert was_apart


def test_a_row_apart_takes_no_more_of_the_arena_than_its_size():
    rows = Rows([2, 1, 2, 1, 2, 3, 3], 8)
    for number in range(5):
        rows.store(number, number)
    with rows.borrowed(1), rows.borrowed(3):
        rows.store(5, 50)
        with rows.borrowed(5) as first:
            rows.store(6, 60)
            with rows.borrowed(6) as second:
                assert rows.rows[5].is_apart and rows.rows[6].is_apart
                assert (first == 50).all() and (second == 60).all()


def test_a_row_that_gets_no_memory_apart_leaves_the_others_whole(monkeypatch):
    rows = Rows([1] * 8 + [4], 8)
    for number in range(8):
        rows.store(number, number)

    def refuse(nbytes):
        raise RemoteMemoryError("got too many bytes")

    with rows.borrowed(1), rows.borrowed(3), rows.borrowed(5), monkeypatch.context() as context:
        context.setattr(rows.cache.device, "memory", refuse)
        with pytest.raises(RemoteMemoryError, match="got too many bytes"):
            rows.cache.borrow(rows.rows[8])
    for number in range(8):
        with rows.borrowed(number) as memory:
            assert (memory == number).all()


@pytest.mark.parametrize("apart", cases([False, True], lambda apart: not apart))
def test_nothing_is_read_into_memory_before_the_device_has_done_what_it_did_there(apart):
    rows = Rows([1] * 8 + [4], 8, device=Late(0.02))
    found = []
    for number in (8, *range(8)) if apart else ():
        rows.store(number, 0)
    held = [rows.borrowed(number) for number in (1, 3, 5) * apart]
    for context in held:
        context.__enter__()
    with rows.borrowed(8) as memory:
        assert rows.rows[8].is_apart == apart
        rows.device.ask(lambda: found.append(int(memory.abs().max())))
        rows.device.fence().wait()
    assert found == [0]


class Failed:
    """A fence of a device that does no more."""

    is_done = False

    def wait(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Failing(Processor):
    """A device whose fences all fail."""

    def ask(self, request):
        request()

    def fence(self):
        return Failed()


@pytest.mark.parametrize("stores", [False, True])
def test_a_device_that_fails_ends_the_run_with_its_words_and_keeps_nobody_waiting(stores):
    rows, raised = Rows([1] * 4, 2, device=Failing()), []

    def run():
        try:
            for number in range(4):
                rows.store(number, number) if stores else rows.cache.borrow(rows.rows[number])
        except RemoteMemoryError as error:
            raised.append(str(error))

    program = threading.Thread(target=run, daemon=True)
    program.start()
    program.join(10)
    assert raised == ["CUDA error: an illegal memory access was encountered"]

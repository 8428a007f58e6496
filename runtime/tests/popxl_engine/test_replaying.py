"""`extensions.replay_phases`: phases that run twice give the same, and what they gave wrong is
found.
"""

from typing import Any

import numpy as np
import popxl
import pytest
import torch
from popxl import extensions, ops
from popxl.ops import collectives

ROWS, SIZE = 3, 6


def phase(n: popxl.Tensor, seed: popxl.Tensor, buffer: popxl.RemoteBuffer) -> Any:
    """Changes a row in place, from the next word and a draw. Returns n + 1 and the next seed."""
    own, later = ops.split_random_seed(seed)
    row = ops.remote_load(buffer, n)
    ops.add_(row, ops.dropout(ops.host_load(WORDS[0]), own, 0.5))
    ops.remote_store(buffer, n, row)
    return n + 1, later


def last(buffer: popxl.RemoteBuffer) -> Any:
    """Tells the host the sum of a row."""
    row = ops.remote_load(buffer, popxl.constant(1, popxl.int32))
    total = ops.sum(row)
    ops.host_store(TOTALS[0], collectives.replicated_all_reduce(total))


WORDS: list[popxl.HostToDeviceStream] = []
TOTALS: list[popxl.DeviceToHostStream] = []


def session_of(replicas: int) -> popxl.Session:
    """A program of a phase that is repeated, and of one that is called."""
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = ROWS
    with ir.main_graph, popxl.in_sequence(True):
        WORDS[:] = [popxl.h2d_stream((SIZE,), popxl.float32, "words")]
        TOTALS[:] = [popxl.d2h_stream((), popxl.float32, "total")]
        buffer = popxl.remote_buffer((SIZE,), popxl.float32, ROWS)
        for number in range(ROWS):
            value = np.full(SIZE, number, np.float32)
            popxl.remote_variable(value, buffer, number, name=f"row_{number}")
        seed = popxl.variable(np.array([7, 5], np.uint32), popxl.uint32)
        number = popxl.constant(0, popxl.int32)
        graph = ir.create_graph(phase, number, seed, buffer)
        ops.repeat(graph, ROWS, number, seed)
        ops.call(ir.create_graph(last, buffer))
    return popxl.Session(ir)


def words(replicas: int) -> np.ndarray:
    shape = (ROWS, SIZE) if replicas == 1 else (ROWS, replicas, SIZE)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("replicas", [1, 2])
def test_phases_that_run_twice_change_no_number_and_find_nothing(replicas):
    told = []
    for numbers in ([], range(4), [1, 7]):
        with session_of(replicas) as session:
            with extensions.replay_phases(session, numbers) as found:
                results = [session.run({WORDS[0]: words(replicas)}) for _ in range(2)]
            rows = session.get_tensors_data(session.ir.main_graph.variables)
        assert found == []
        told.append([*(r[TOTALS[0]][0].tobytes() for r in results), *map(bytes, rows.values())])
    assert told[0] == told[1] == told[2]


def test_a_flipped_bit_in_a_row_or_a_stream_is_found_in_the_phase_that_is_wanted(monkeypatch):
    with session_of(1) as session:
        (own,) = session._engine.machine.replicas
        seen: list[int] = []
        for name in ("remote_store", "host_store"):
            plain = getattr(type(own), name)

            def flipping(self, *arguments, plain=plain):
                if self is own:
                    held = arguments[-1]
                    t = held[0] if isinstance(held, list) else held
                    if len(seen) == wanted:
                        t.reshape(-1).view(torch.uint8)[0] ^= 1
                    seen.append(1)
                plain(self, *arguments)

            monkeypatch.setattr(type(own), name, flipping)
        for wanted in range(4):
            for number in range(4):
                seen.clear()
                with extensions.replay_phases(session, [number]) as found:
                    session.run({WORDS[0]: words(1)})
                assert bool(found) == (number == wanted)
                for one in found:
                    is_last = wanted == ROWS
                    assert one.phase == ("last" if is_last else "phase")
                    assert one.loops == (() if is_last else (("phase", wanted),))
                    assert (
                        (one.row is None and one.tensor == "total")
                        if is_last
                        else (one.row is not None and one.row[1] == wanted)
                    )


def test_a_session_that_is_interpreted_is_refused(monkeypatch):
    monkeypatch.setenv("POPXL_INTERPRET", "1")
    with session_of(1) as session, pytest.raises(RuntimeError, match="interprets its program"):
        with extensions.replay_phases(session, [0]):
            pass

"""Messages that move while a program computes."""

import pytest
from helpers.processes import launch

from tests import warm

PROGRAM = """
import time
import numpy as np
import popdist
import popxl
import torch
from popxl import ops
from popxl.ops.collectives import replicated_all_gather, replicated_all_reduce
from popxl_engine.kernels.registry import ALTERNATES, KERNELS
from popxl_engine.machine.fabric import Fabric

begin, begun, moved = Fabric.begin, [], []

def noted(self, arrivals):
    begun.append(begin(self, arrivals))
    return begun[-1]

def have_moved():
    return [exchange.has_moved for exchange in begun]

def exp(t):
    until = time.monotonic() + 60
    while not all(have_moved()) and time.monotonic() < until:
        time.sleep(0.001)
    moved.extend(have_moved())
    return torch.exp(t)

Fabric.begin, KERNELS["exp"] = noted, exp
ALTERNATES["cpu"].pop("exp", None)
ir = popxl.Ir(replication="popdist")
with ir.main_graph, popxl.in_sequence():
    x = popxl.variable(np.arange(2**18, dtype=np.float32) / 2**18, name="x")
    total, whole = replicated_all_reduce(x), replicated_all_gather(x)
    results = total, whole, ops.exp(x)
    streams = [popxl.d2h_stream(t.shape, t.dtype) for t in results]
    for stream, t in zip(streams, results):
        ops.host_store(stream, t)
with popxl.Session(ir, "cpu") as session:
    found = session.run()
assert moved == [True, True], moved
values = np.arange(2**18, dtype=np.float32) / 2**18
assert (found[streams[0]] == 2 * values).all() and (found[streams[1]] == np.tile(values, 2)).all()
"""


@pytest.mark.multi
def test_messages_move_while_nothing_waits_for_them() -> None:
    """Both halves of a large reduction, and a gather."""
    ended = launch(["--num-instances", 2], ["-c", PROGRAM], python=warm.python())
    assert ended.code == 0, ended.said

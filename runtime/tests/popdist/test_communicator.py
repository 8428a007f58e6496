"""Collectives where every replica has a process and a device of its own, and where it turns out to
have none.
"""

from pathlib import Path
from time import monotonic

import pytest
import torch
from helpers import communicator_program
from helpers.processes import finish, free_port, launch, start
from popxl.op_records import OPS
from popxl_engine.kernels.collectives import APART
from popxl_engine.machine.communicator import Home, shared_devices

from tests import warm

SCRIPT = Path(communicator_program.__file__)
CPU = Home("cpu", None, 1)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What the interpreter gives four replicas in one process."""
    file = tmp_path_factory.mktemp("collectives") / "expected.npz"
    alone = finish(start([], [SCRIPT, file], python=warm.python()), monotonic())
    assert alone.code == 0, alone.said
    return file


@pytest.mark.multi
@pytest.mark.parametrize("instances", [2, 4])
def test_every_transport_gives_the_numbers_of_one_process(instances, expected):
    """Bit for bit by messages; by the devices' own collectives to 1e-6."""
    options = ["--num-instances", instances, "--num-replicas", 4]
    ended = launch(options, [SCRIPT, expected], python=warm.python())
    assert ended.code == 0, ended.said


@pytest.mark.multi
def test_devices_of_several_machines_meet_by_the_runs_own_store(expected):
    options, begin = (
        ["--num-instances", 4, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"],
        monotonic(),
    )
    machines = [
        start([*options, "--node-rank", index], [SCRIPT, expected], python=warm.python())
        for index in range(2)
    ]
    ended = [finish(machine, begin) for machine in machines]
    assert [(e.code, e.said) for e in ended] == [(0, "")] * 2, [print(e.said) for e in ended]


HANG = """
import sys, time
import numpy as np, popdist, popxl
from popxl.ops.collectives import replicated_all_reduce_
from popxl_engine.machine import communicator
communicator.BACKENDS = {"cpu": "gloo"}
ir = popxl.Ir(replication="popdist")
with ir.main_graph:
    replicated_all_reduce_(popxl.variable(np.ones(4), name="w"), "mean")
with popxl.Session(ir, "cpu") as session:
    session.run()
    if popdist.getInstanceIndex() == 1:
        time.sleep(90)
    session.run()
"""


@pytest.mark.multi
def test_a_replica_that_does_not_come_to_a_devices_collective_ends_the_run_in_time():
    options = ["--num-instances", 2, "--timeout", 3]
    ended = launch(options, ["-c", HANG], python=warm.python())
    assert ended.code == 1 and ended.seconds < 40
    assert "replica 0 waits at %w_all_reduce = " in ended.last_line
    assert "did not answer in time" in ended.last_line


def test_every_collective_between_replicas_has_a_members_kernel():
    assert {
        name for name, definition in OPS.items() if "collective" in definition.effects
    } == APART.keys()


def gpu(name, replicas=1):
    return Home("cuda", name, replicas)


def test_devices_are_shared_or_not_as_all_processes_together_say():
    assert shared_devices([gpu("a"), gpu("b"), gpu("c")]) is None
    assert shared_devices([CPU, CPU]) is None
    assert shared_devices([gpu("a"), gpu("b"), gpu("a")]) == "instances 0 and 2 share a GPU"
    assert shared_devices([gpu("a", 2), gpu("b", 2)]) == "each instance runs 2 replicas"


def test_processes_on_devices_of_different_types_are_refused():
    with pytest.raises(
        RuntimeError,
        match="got devices 'cpu' in instance 1, 'cuda' in instance 0; expected one type",
    ):
        shared_devices([gpu("a"), CPU, CPU])


def test_the_identity_of_a_processor_is_no_ones_else():
    assert communicator_program.communicator.home(torch.device("cpu"), 1) == CPU

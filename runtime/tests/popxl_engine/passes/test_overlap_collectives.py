"""Collectives that begin early and end late: what runs in between, and what never does."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.processes import finish, free_port, start
from popxl import Tensor, extensions, ops
from popxl.ops.collectives import replicated_all_gather, replicated_all_reduce
from popxl_engine.analysis.effects import is_exchange
from popxl_engine.compiler import compile  # noqa: A004
from popxl_engine.ir import Block
from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.lockstep import run_lockstep
from popxl_engine.passes import (
    LEGALIZATION,
    LINKS,
    LINKS_ALL,
    LINKS_GPU,
    Pass,
    enabled_passes,
    overlap_collectives,
)
from popxl_engine.passes.overlap_collectives import leaves_machine, leaves_process

from tests import warm

Build = Callable[[Tensor], Any]


def shown(build: Build, chosen: Pass = LINKS_ALL[0]) -> list[str]:
    """What a program on two replicas does that is no copy, in order."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        build(popxl.variable(np.ones((4, 4), np.float32), name="x"))
    return list(names(compile(ir, passes=[chosen, *LEGALIZATION]).block))


def names(block: Block) -> Iterator[str]:
    for instr in block.instrs:
        if instr.definition is not None and not instr.host:
            kind = "" if instr.kind == "op" else f"{instr.kind} "
            yield kind + instr.definition.name.removeprefix("replicated_")


def kept(*ts: Tensor) -> None:
    for t in ts:
        ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


def independent(x: Tensor) -> None:
    total = replicated_all_reduce(x)
    kept(ops.gelu(total), ops.exp(x))


def two_chains(x: Tensor) -> None:
    for t in (x, ops.exp(x)):
        kept(ops.gelu(replicated_all_reduce(ops.gelu(replicated_all_reduce(t)))))


def needed_at_once(x: Tensor) -> None:
    kept(ops.exp(replicated_all_reduce(x)))


def written_meanwhile(x: Tensor) -> None:
    total = replicated_all_reduce(x)
    y = ops.exp(x)
    ops.add_(x, x)
    kept(total, y)


def in_laps(x: Tensor) -> None:
    extensions.begin_lap("sum")
    total = replicated_all_reduce(x)
    kept(ops.gelu(total))
    extensions.begin_lap("other")
    kept(ops.exp(x))


def rows(x: Tensor) -> None:
    buffer = popxl.remote_buffer((4, 4), popxl.float32, 4)
    number = popxl.variable(1, popxl.int32, name="number")
    for following in (1, 0):
        total = replicated_all_gather(ops.remote_load(buffer, number + 1 - following))
        ops.remote_store(buffer, number + following, ops.exp(x))
        kept(total)


def counted_rows(x: Tensor) -> None:
    """The row that is loaded is the one that is stored, by a counter that was written since."""
    buffer = popxl.remote_buffer((4, 4), popxl.float32, 4)
    number = popxl.variable(0, popxl.int32, name="number") + 0
    row = number + 1
    ops.remote_store(buffer, row, ops.exp(replicated_all_reduce(x)))
    ops.add_(number, popxl.constant(1, popxl.int32))
    kept(ops.gelu(ops.remote_load(buffer, number)))


@pytest.mark.parametrize(
    "build, expected",
    [
        (
            independent,
            "begin all_reduce, exp, end all_reduce, gelu, host_store, host_store",
        ),
        (
            two_chains,
            "begin all_reduce, exp, begin all_reduce, end all_reduce, gelu, begin all_reduce, "
            "end all_reduce, gelu, begin all_reduce, end all_reduce, gelu, host_store, "
            "end all_reduce, gelu, host_store",
        ),
        (needed_at_once, "all_reduce, exp, host_store"),
        (
            written_meanwhile,
            "begin all_reduce, exp, end all_reduce, add_, host_store, host_store",
        ),
    ],
)
def test_what_needs_no_result_runs_between_begin_and_end(build: Build, expected: str) -> None:
    assert ", ".join(shown(build)) == expected


def test_what_is_moved_stays_in_its_lap() -> None:
    found = shown(in_laps)
    assert found == (
        "begin_lap, begin all_reduce, begin_lap, exp, begin_lap, end all_reduce, gelu, host_store, "
        "begin_lap, host_store"
    ).split(", ")


def test_a_row_is_loaded_before_another_is_stored_and_never_before_the_same() -> None:
    found = [name for name in shown(rows) if name.startswith("remote") or "begin" in name]
    assert found == [
        "remote_load",
        "begin all_gather",
        "remote_store",
        "remote_load",
        "begin all_gather",
        "remote_store",
    ]


def test_a_row_is_not_loaded_before_it_is_stored_by_what_a_counter_was() -> None:
    found = [name for name in shown(counted_rows) if name.startswith("remote")]
    assert found == ["remote_store", "remote_load"]


def test_in_a_program_of_one_process_nothing_is_moved_and_no_other_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("machines", "getNumInstances"):
        monkeypatch.setattr(overlap_collectives, name, lambda: pytest.fail("others were asked"))
    for chosen in (LINKS[0], LINKS_GPU[0]):
        assert not [name for name in shown(two_chains, chosen) if "begin" in name]


def test_gpus_overlap_all_that_leaves_a_process_and_processors_what_leaves_a_machine() -> None:
    devices = {"cpu": LINKS, "cuda": LINKS_GPU}
    for device, expected in devices.items():
        found = enabled_passes(torch.device(device))
        assert tuple(each for each in found if each in (*LINKS, *LINKS_GPU)) == expected


PLACES = {
    "two machines": (["a", "a", "b", "b"], [False, True, True]),
    "one machine": (["a"] * 4, [False] * 3),
    "a machine each": (["a", "b", "c", "d"], [True] * 3),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_collective_is_split_where_some_group_of_it_is_on_several_machines(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, expected = PLACES[name]
    monkeypatch.setattr(overlap_collectives, "machines", lambda: hosts)
    monkeypatch.setattr(overlap_collectives, "getNumInstances", lambda: len(hosts))
    ir = popxl.Ir(replication=8)
    monkeypatch.setattr(ir, "_fixed_replicas", (8, 8 // len(hosts)))
    groups = [ir.replica_grouping(stride, size) for stride, size in ((1, 4), (4, 2), (1, 8))]
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((4, 4), np.float32), name="x")
        for group in [*groups, ir.replica_grouping(1, 2)]:
            kept(replicated_all_reduce(x, group=group))
    block = compile(ir, passes=LEGALIZATION).block
    found = [instr for instr in block.instrs if is_exchange(instr)]
    assert [leaves_machine(instr) for instr in found] == [*expected, False]
    assert [leaves_process(instr) for instr in found] == [True, True, True, False]


LAYERS = """
import json, os, sys
import numpy as np, popxl
from popdist import linking
from popxl import ops
from popxl.ops.collectives import replicated_all_gather, replicated_all_reduce
from popxl_engine.ir import blocks_of
folder, *hosts = sys.argv[1:]
linking.own_address = lambda first: hosts[int(os.environ["GROUP_RANK"])]
ir, draw = popxl.Ir(replication="popdist"), np.random.default_rng(7)
alone, here, apart = (ir.replica_grouping(s, n) for s, n in ((1, 1), (1, 2), (2, 2)))
def layer(n, x, shards):
    weight = replicated_all_gather(ops.remote_load(shards, n), group=apart)
    return n + 1, ops.tanh(replicated_all_reduce(x @ weight, group=here))
with ir.main_graph, popxl.in_sequence():
    shards = popxl.remote_buffer((4, 8), popxl.float32, 4)
    for row in range(4):
        data = draw.normal(size=(4, 4, 8)).astype(np.float32)
        popxl.remote_variable(data, shards, row, name=f"shard_{row}", replica_grouping=alone)
    data = draw.normal(size=(4, 8, 8)).astype(np.float32)
    x = popxl.variable(data, name="x", replica_grouping=alone)
    n = popxl.constant(0, popxl.int32)
    _, y = ops.repeat(ir.create_graph(layer, n, x, shards), 4, n, x + 0)
    total = replicated_all_reduce(y, group=apart)
    stream = popxl.d2h_stream(y.shape, y.dtype)
    ops.host_store(stream, ops.exp(y) + total)
with popxl.Session(ir, "cpu") as session:
    found = session.run()[stream]
    instrs = [i for b in blocks_of(session._engine.program.block) for i in b.instrs]
kinds = {"here": set(), "apart": set()}
for i in instrs:
    if i.definition and i.definition.name in ("replicated_all_gather", "replicated_all_reduce"):
        kinds["here" if i.arguments["group"].stride == 1 else "apart"].add(i.kind)
rank = os.environ["RANK"]
np.save(f"{folder}/{rank}.npy", found)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({name: sorted(found) for name, found in kinds.items()}, file)
"""
"""Weights are gathered between the machines of replicas 0 and 1, and 2 and 3; sums stay on each."""


def ran(folder: Path, machines: list[Any]) -> "tuple[list[Any], np.ndarray]":
    """What the processes of a run do, and the results of all replicas."""
    ended = [finish(machine, time.monotonic()) for machine in machines]
    assert [(e.code, e.said) for e in ended] == [(0, "")] * len(machines)
    count = len([*folder.glob("*.npy")])
    results = [np.load(folder / f"{rank}.npy") for rank in range(count)]
    done = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    return done, np.concatenate([np.reshape(r, (-1, 8, 8)) for r in results])


@pytest.mark.slow
@pytest.mark.multi
def test_messages_between_machines_run_beside_computation_and_those_within_one_do_not(
    tmp_path: Path,
) -> None:
    folders = {name: tmp_path / name for name in ("one", "together", "apart")}
    for folder in folders.values():
        folder.mkdir()
    options = ["--num-replicas", 4, "--num-instances"]
    alone = start([*options, 1], ["-c", LAYERS, folders["one"]], python=warm.python())
    _, expected = ran(folders["one"], [alone])
    for name, second, kinds in (
        ("together", "127.0.0.1", ["op"]),
        (
            "apart",
            "127.0.0.2",
            ["begin", "end", "op"],
        ),  # the loop's first gather has nothing beside
    ):
        hosts = ["127.0.0.1", second]
        several = [*options, 4, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        program = ["-c", LAYERS, folders[name], *hosts]
        machines = [
            start([*several, "--node-rank", index], program, python=warm.python())
            for index in range(2)
        ]
        done, found = ran(folders[name], machines)
        assert done == [{"here": ["op"], "apart": kinds}] * 4
        np.testing.assert_array_equal(found, expected)


def test_a_replica_goes_on_before_the_others_have_come() -> None:
    done: list[str] = []

    def arrival(site: str, replica: int, goes_on: bool) -> Arrival:
        def total(ts: Sequence[Any]) -> list[Any]:
            return [sum(ts)] * len(ts)

        return Arrival(
            site, (0, 1), [replica + 1], total, total, site, reads="all", goes_on=goes_on
        )

    def program(replica: int) -> Any:
        first = yield arrival("a", replica, True)
        second = yield arrival("b", replica, True)
        done.append(f"{replica} computes")
        total = yield arrival("c", replica, False)
        assert (yield second) == (yield first) == total == 3
        done.append(f"{replica} ends")
        return total

    assert run_lockstep({0: program(0), 1: program(1)}) == {0: 3, 1: 3}
    assert done == ["0 computes", "1 computes", "0 ends", "1 ends"]

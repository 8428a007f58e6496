"""Collectives that begin early and end late: what runs in between, and what never does."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from popxl import Tensor, extensions, ops
from popxl.ops.collectives import replicated_all_gather, replicated_all_reduce
from popxl_engine.compiler import compile  # noqa: A004
from popxl_engine.ir import Block
from popxl_engine.machine.arrival import Arrival
from popxl_engine.machine.lockstep import run_lockstep
from popxl_engine.passes import LEGALIZATION, LINKS, LINKS_ALL, Pass, enabled_passes

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


def test_in_one_process_nothing_is_moved() -> None:
    assert not [name for name in shown(two_chains, LINKS[0]) if "begin" in name]


@pytest.mark.parametrize(
    ("here", "device", "expected"),
    [(2, "cpu", []), (1, "cpu", [*LINKS]), (2, "cuda", [*LINKS])],
    ids=["one machine", "two machines", "GPUs of one machine"],
)
def test_messages_run_beside_computation_where_processors_do_not_move_them(
    here: int, device: str, expected: list[Pass], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "other"}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    found = enabled_passes(torch.device(device))
    assert [each for each in found if each in LINKS] == expected
    assert enabled_passes(passes=LINKS_ALL) == LINKS_ALL


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

"""Kernels that may write their result over an operand do so where nobody can tell."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import popxl
import pytest
import torch
from helpers.engine_programs import differences
from helpers.engine_runs import engine_of
from helpers.random_programs import Builder
from popxl import ops
from popxl.extensions import plan
from popxl_addons.ops.cross_entropy_sharded_loss import logsumexp_and_pick, logsumexp_and_pick_grad
from popxl_engine.codegen import BlockWriter, op_writer
from popxl_engine.kernels.linalg import rows_on_boundaries
from popxl_engine.kernels.registry import ALTERNATES, OVERWRITES
from popxl_engine.machine.memory import unshared
from popxl_engine.native import library as native

overwritten: list[int] = []
"""Elements of each operand that `adding` has written over."""


def adding(lhs: torch.Tensor, rhs: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A sum, which changes ``into`` before it has read ``rhs``."""
    if into is None or into.shape != torch.broadcast_shapes(lhs.shape, rhs.shape):
        return torch.add(lhs, rhs)
    assert into is lhs
    overwritten.append(into.numel())
    return into.neg_().sub_(rhs).neg_()


def observe_some(builder: Builder, pool: Any) -> None:
    """Store what was made last and the first variable where the host sees it; all else dies."""
    for t in (pool.tensors[0], *pool.tensors[-4:]):
        ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


@pytest.fixture(autouse=True)
def sums_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ops.add` write over its first operand, and tensors die."""
    monkeypatch.setattr(Builder, "observe", observe_some)
    monkeypatch.setitem(ALTERNATES["cpu"], "add", adding)
    monkeypatch.setitem(OVERWRITES, adding, "lhs")
    overwritten.clear()


VIEWS = ("reshape", "transpose", "slice", "detach", "split", "reshape_")
KINDS = (
    *["add"] * 6,
    "load",
    "host_load",
    "variable",
    "constant",
    "store",
    "give",
    "add_",
    "call",
    "repeat",
    *VIEWS,
)
"""Sums, and what has results that share memory."""


def programs(size: int, more: Sequence[str] = ()) -> Iterator[Any]:
    """Random programs, the same every time. Half of the steps take what was made last."""
    draw = random.Random(11)

    def steps(count: int) -> Any:
        kinds = [draw.choice((*KINDS, *more)) for _ in range(count)]
        return [
            (k, draw.choice((draw.randrange(32), i + 2)), *draw.choices(range(32), k=2))
            for i, k in enumerate(kinds)
        ]

    for _ in range(size):
        yield steps(20), [steps(8) for _ in range(2)]


@pytest.mark.slow
def test_random_programs_have_the_same_numbers() -> None:
    assert not any(differences(*program) for program in programs(30))
    assert len(overwritten) > 50


@pytest.mark.slow
def test_random_programs_have_the_same_numbers_on_four_replicas() -> None:
    assert not any(
        differences(*program, replicas=4) for program in programs(8, ("all_reduce", "all_gather"))
    )
    assert len(overwritten) > 20


def named(writer: BlockWriter, instr: Any) -> str:
    """The name of the operand of a sum."""
    adds = instr.definition.name == "add"
    return writer.python[instr.arguments["lhs"]] if adds else ""


def whatever_is_needed_later(writer: BlockWriter, instr: Any) -> str:
    name = named(writer, instr)
    return name if [writer.python[v] for v in instr.inputs()].count(name) == 1 else ""


def whatever_the_other_operand_is(writer: BlockWriter, instr: Any) -> str:
    name = named(writer, instr)
    return name if name in writer.last_uses else ""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [whatever_is_needed_later, whatever_the_other_operand_is])
def test_an_operand_that_is_needed_twice_is_not_overwritten(
    mutant: Callable[..., str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(BlockWriter, "_overwritten", mutant)
    assert goes_wrong()


def test_an_operand_whose_memory_others_have_is_not_overwritten(monkeypatch: Any) -> None:
    monkeypatch.setattr(op_writer, "unshared", lambda held: held[0])
    assert goes_wrong()


def test_rows_that_do_not_follow_one_another_are_overwritten_unless_they_are_a_part_of_something() -> (
    None
):
    apart = rows_on_boundaries(3, 1030, torch.empty(0))
    assert not apart.is_contiguous() and unshared([apart]) is None
    held = [apart]
    del apart
    assert unshared(held) is held[0]
    assert unshared([torch.empty(3, 1032)[:, :1030]]) is None


def goes_wrong() -> bool:
    """Whether some program shows another number, or needs what is gone."""
    for program in programs(100):
        try:
            if differences(*program):
                return True
        except NameError:
            return True
    return False


# The gradient of the cross entropy, in the logits' memory

ROWS, CLASSES = 64, 2000


def cross_entropy(logits_are_read: bool) -> popxl.Ir:
    """Logits, their gradient, and after it maybe the logits again."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((ROWS, 8), popxl.float32, name="x"))
        labels = ops.host_load(popxl.h2d_stream((ROWS,), popxl.int32, name="labels"))
        logits = x @ popxl.constant(
            np.random.default_rng(0).normal(size=(8, CLASSES)).astype(np.float32)
        )
        total, picked = logsumexp_and_pick(logits, labels)
        gradient = logsumexp_and_pick_grad(total, picked, total, logits, labels)
        results = [
            ops.sum(gradient * gradient, axis=0),
            *([ops.sum(logits, axis=0)] if logits_are_read else []),
        ]
        for t in results:
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    return ir


def results(ir: popxl.Ir, interpret: bool) -> list[np.ndarray]:
    """What a program gives to the host."""
    inputs, outputs = ir.get_all_h2d_streams(), ir.get_all_d2h_streams()
    draw = np.random.default_rng(1)
    values: dict[str, np.ndarray] = {
        "x": draw.normal(size=(1, 1, ROWS, 8)).astype(np.float32),
        "labels": draw.integers(0, CLASSES, (1, 1, ROWS)).astype(np.int32),
    }
    found = {s: np.zeros((1, 1, *s.shape), np.float32) for s in outputs}
    engine_of(ir, interpret).run({s: values[s.tensor_id] for s in inputs}, found)
    return [found[s] for s in sorted(outputs, key=lambda s: s.tensor_id)]


@pytest.mark.parametrize("logits_are_read", [False, True])
def test_logits_become_their_gradient_if_nothing_reads_them_after_it(logits_are_read: bool) -> None:
    ir = cross_entropy(logits_are_read)
    for ours, expected in zip(results(ir, interpret=False), results(ir, interpret=True)):
        np.testing.assert_array_equal(ours, expected)
    nbytes = 4 * ROWS * CLASSES
    # The squares of the gradient are there beside it, in any case.
    tensors = 2 + (logits_are_read or native.library() is None)
    assert tensors * nbytes < plan(ir, borrows_rows=True).peak_bytes < (tensors + 0.5) * nbytes

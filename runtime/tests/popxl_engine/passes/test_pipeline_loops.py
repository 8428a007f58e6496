"""Loops whose collectives run beside other iterations: what becomes of them, and what is left."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import popxl
import pytest
from popxl import Ir, Tensor, ops
from popxl.extensions import wide_all_reduce
from popxl.ops.collectives import (
    replicated_all_gather,
    replicated_all_reduce,
    replicated_reduce_scatter,
)
from popxl_engine.compiler import compile  # noqa: A004
from popxl_engine.engine import Engine
from popxl_engine.ir import Block, blocks_of, verify
from popxl_engine.passes import LEGALIZATION, LINKS, LINKS_ALL, Pass

ROWS = 8
Body = Callable[..., Any]


DRAWN = 24
"""Loops drawn at random."""


class Loop:
    """A loop over rows of buffers on two replicas, whose results the host sees."""

    def __init__(self, body: Body, times: int = ROWS, start: int = 0):
        self.ir = Ir(replication=2)
        self.kept: list[Tensor] = []
        self.outputs: dict[popxl.DeviceToHostStream, np.ndarray] = {}
        draw = np.random.default_rng(5)
        alone = self.ir.replica_grouping(1, 1)
        with self.ir.main_graph, popxl.in_sequence():
            self.shards = popxl.remote_buffer((2, 4), popxl.float32, ROWS)
            self.rows = popxl.remote_buffer((4, 4), popxl.float32, ROWS)
            for buffer, kind in ((self.shards, "shard"), (self.rows, "row")):
                for row in range(ROWS):
                    data = draw.normal(size=(2, *buffer.tensor_shape)).astype(np.float32)
                    name = f"{kind}_{row}"
                    self.kept.append(
                        popxl.remote_variable(data, buffer, row, name=name, replica_grouping=alone)
                    )
            x = popxl.variable(
                draw.normal(size=(2, 4, 4)).astype(np.float32), name="x", replica_grouping=alone
            )
            number = popxl.variable(start, popxl.int32, name="number")
            graph = self.ir.create_graph(body, number, x, self)
            for result in ops.repeat(graph, times, number + 0, x + 0):
                stream = popxl.d2h_stream(result.shape, result.dtype)
                self.outputs[stream] = np.zeros((1, 2, *result.shape), result.dtype.as_numpy())
                ops.host_store(stream, result)

    def compiled(self, links: "tuple[Pass, ...]" = LINKS_ALL) -> Block:
        """The program, verified."""
        block = compile(self.ir, passes=(*links, *LEGALIZATION)).block
        verify(block, "pipeline_loops", is_graph=False)
        return block

    def run(self, passes: "tuple[Pass, ...] | None") -> list[np.ndarray]:
        """Results and rows after two runs; of the interpreter where there are no passes."""
        engine = Engine(self.ir, range(2), passes)
        for _ in range(2):
            engine.run({}, self.outputs)
        found = [engine.read(v) for v in self.kept]
        return [*found, *(a.copy() for a in self.outputs.values())]


def gathering(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    weight = replicated_all_gather(ops.remote_load(loop.shards, n))
    return n + 1, ops.tanh(x @ weight)


def reducing(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    y = ops.tanh(x + ops.remote_load(loop.rows, n))
    ops.remote_store(
        loop.shards,
        n,
        replicated_reduce_scatter(y, configure_output_for_replicated_tensor_sharding=True).reshape(
            (2, 4)
        ),
    )
    return n + 1, y


def training(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    """Counts down, as backward phases do."""
    weight = replicated_all_gather(ops.remote_load(loop.shards, n))
    y = ops.tanh(x @ weight)
    ops.remote_store(loop.rows, n, replicated_all_reduce(x.transpose() @ y) * 0.5)
    return n - 1, y


def reducing_narrow(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    """What travels is rounded before, in the iteration that makes it."""
    y = ops.tanh(x + ops.remote_load(loop.rows, n))
    narrow = ops.cast(x.transpose() @ y, popxl.bfloat16)
    ops.remote_store(loop.rows, n, wide_all_reduce(narrow, "mean"))
    return n + 1, y


def updating(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    """What a row is updated by is in another buffer, and it is gathered after its update."""
    shard = ops.remote_load(loop.shards, n)
    ops.add_(shard, ops.remote_load(loop.rows, n)[:2])
    ops.remote_store(loop.shards, n, shard)
    weight = replicated_all_gather(ops.remote_load(loop.shards, n))
    return n + 1, ops.tanh(x @ weight)


def storing_next(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    """What the next iteration gathers is made in this one."""
    weight = replicated_all_gather(ops.remote_load(loop.shards, n))
    y = ops.tanh(x @ weight)
    ops.remote_store(loop.shards, n + 1, y[:2])
    return n + 1, y


def reducing_for_next(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    return n + 1, ops.tanh(replicated_all_reduce(x))


def reading_what_was_reduced(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    """What the next iteration loads is reduced in this one."""
    y = ops.tanh(x + ops.remote_load(loop.rows, n))
    ops.remote_store(loop.rows, n + 1, replicated_all_reduce(y))
    return n + 1, y


def summing_between(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    weight = replicated_all_gather(ops.remote_load(loop.shards, n))
    return n + 1, ops.tanh(replicated_all_reduce(x @ weight))


def counting_in_place(n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
    """What the next iteration gathers is stored where a counter of its own has come to."""
    own = n + 0
    row = own + 1
    weight = replicated_all_gather(ops.remote_load(loop.shards, n))
    y = ops.tanh(x @ weight)
    ops.remote_store(loop.shards, row, y[:2])
    ops.add_(own, popxl.constant(1, popxl.int32))
    return n + 1, y + replicated_all_gather(ops.remote_load(loop.shards, own))


class Drawn:
    """A loop's body that is drawn at random: rows that it gathers, computes with and stores, up to
    two after or before its own.
    """

    def __init__(self, seed: int):
        self._draw = random.Random(seed)
        self.step = self._draw.choice((1, -1))
        self.kinds = self._draw.choices(("gather", "reduce", "store", "update", "change"), k=5)

    def __call__(self, n: Tensor, x: Tensor, loop: Loop) -> "tuple[Tensor, Tensor]":
        """The body."""
        y = x
        for kind in self.kinds:
            row = n + self._draw.choice((0, 0, 0, 1, 2))
            fixed = self._draw.random() < 0.1
            y = getattr(self, kind)(loop, popxl.constant(1, popxl.int32) if fixed else row, y)
        return n + self.step, ops.tanh(y)

    def gather(self, loop: Loop, row: Tensor, y: Tensor) -> Tensor:
        return y @ replicated_all_gather(ops.remote_load(loop.shards, row))

    def reduce(self, loop: Loop, row: Tensor, y: Tensor) -> Tensor:
        total = replicated_all_reduce(y)
        if self._draw.random() < 0.3:
            ops.add_(total, y)
        ops.remote_store(loop.rows, row, total)
        return y + total if self._draw.random() < 0.2 else y

    def store(self, loop: Loop, row: Tensor, y: Tensor) -> Tensor:
        ops.remote_store(loop.rows, row, y)
        return y + ops.remote_load(loop.rows, row)

    def update(self, loop: Loop, row: Tensor, y: Tensor) -> Tensor:
        shard = ops.remote_load(loop.shards, row)
        ops.add_(shard, ops.remote_load(loop.rows, row)[:2])
        ops.remote_store(loop.shards, row, shard)
        return y

    def change(self, loop: Loop, row: Tensor, y: Tensor) -> Tensor:
        total = y + y
        ops.add_(total, ops.remote_load(loop.rows, row))
        return ops.tanh(total)


PIPELINED = {
    "gathering": gathering,
    "reducing": reducing,
    "reducing_narrow": reducing_narrow,
    "training": training,
    "updating": updating,
}
LEFT = {
    "storing_next": storing_next,
    "counting_in_place": counting_in_place,
    "reducing_for_next": reducing_for_next,
    "reading_what_was_reduced": reading_what_was_reduced,
    "summing_between": summing_between,
}


def shown(block: Block) -> str:
    return ", ".join(
        ("" if instr.kind == "op" else f"{instr.kind} ")
        + (
            ""
            if instr.definition is None or instr.bodies
            else instr.definition.name.removeprefix("replicated_")
        )
        for instr in block.instrs
        if instr.kind != "copy" and not instr.host
    )


def body_of(block: Block) -> Block:
    (body,) = [each for each in blocks_of(block) if each is not block]
    return body


def test_a_loop_gathers_for_its_next_iteration_while_one_is_computed() -> None:
    block = Loop(gathering, times=5).compiled()
    assert shown(body_of(block)) == "remote_load, begin all_gather, matmul, tanh, end all_gather"
    (loop,) = [instr for instr in block.instrs if instr.kind == "repeat"]
    assert loop.arguments["repeat_count"] == 4
    assert "remote_load, all_gather, repeat , matmul, tanh, host_store" in shown(block)


def test_a_loop_reduces_what_its_last_iteration_made_while_one_is_computed() -> None:
    found = shown(body_of(Loop(training, times=5, start=4).compiled()))
    assert found == (
        "begin all_reduce, remote_load, begin all_gather, transpose, matmul, tanh, matmul, "
        "end all_reduce, mul, remote_store, end all_gather"
    )


def test_a_reduction_of_rounded_numbers_carries_them_to_the_next_iteration() -> None:
    found = shown(body_of(Loop(reducing_narrow, times=5).compiled()))
    assert found == (
        "begin wide_all_reduce, remote_load, add, tanh, transpose, matmul, cast, "
        "end wide_all_reduce, remote_store"
    )


@pytest.mark.parametrize("name", LEFT)
def test_what_the_next_iteration_needs_is_not_moved(name: str) -> None:
    loop = Loop(LEFT[name], times=5)
    assert shown(loop.compiled()) == shown(loop.compiled(LINKS_ALL[:1]))


@pytest.mark.parametrize("times", range(1, 5))
@pytest.mark.parametrize("name", [*PIPELINED, *LEFT])
def test_numbers_are_the_interpreters_bit_for_bit(name: str, times: int) -> None:
    body = {**PIPELINED, **LEFT}[name]
    start = times - 1 if body is training else 0
    expected = Loop(body, times, start).run(None)
    for links in (LINKS_ALL, LINKS_ALL[:1], LINKS_ALL[1:]):
        found = Loop(body, times, start).run((*links, *LEGALIZATION))
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", PIPELINED)
def test_in_one_process_loops_stay_as_they_are(name: str) -> None:
    loop = Loop(PIPELINED[name], times=5)
    assert "begin" not in "".join(map(shown, blocks_of(loop.compiled(LINKS))))


@pytest.mark.slow
def test_loops_drawn_at_random_have_the_interpreters_numbers_bit_for_bit() -> None:
    changed = 0
    for seed in range(DRAWN):
        start = 0 if Drawn(seed).step > 0 else 3
        loops = [Loop(Drawn(seed), 4, start) for _ in range(2)]
        expected, found = loops[0].run(None), loops[1].run((*LINKS_ALL, *LEGALIZATION))
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other, f"seed {seed}")
        alone = Loop(Drawn(seed), 4, start).compiled(LINKS_ALL[:1])
        changed += shown(alone) != shown(Loop(Drawn(seed), 4, start).compiled())
    assert changed > DRAWN // 8

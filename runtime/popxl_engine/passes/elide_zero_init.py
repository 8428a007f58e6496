"""Zeros that nobody reads: accumulators of a mean whose first value replaces what is there."""

from collections.abc import Iterator
from dataclasses import replace

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.accumulate import (
    accumulate_column_sum_,
    accumulate_gather_grad_,
    accumulate_gemm_,
    accumulate_gemm_sumsq_,
)

MEANS = (
    "accumulate_mean_",
    accumulate_gemm_.name,
    accumulate_gemm_sumsq_.name,
    accumulate_gather_grad_.name,
    accumulate_column_sum_.name,
)
"""Ops that replace ``t`` where ``step`` is zero, whatever it holds."""


def elide_zero_init(block: Block) -> Block:
    """Memory of an accumulator is not cleared where a mean with a counter at zero is the first that
    accesses it.

    Both come fresh from `init`. A loop may take them instead, whose body first accesses the
    accumulator as the target of a mean, before it writes the counter.
    """
    if not any(map(is_zeros, block.instrs)):
        return block
    storage = block.find(MustAlias).storage
    untouched: dict[Value, Instr] = {}
    """Zeros that nothing has accessed yet, by their storage."""
    unwritten: dict[Value, Instr] = {}
    """Values that nothing has written yet."""
    elided: set[Instr] = set()
    for instr in block.instrs:
        if is_zeros(instr):
            cleared = storage(instr.outputs[0])
            untouched[cleared] = unwritten[cleared] = instr
            continue
        accessed = [storage(v) for v in instr.inputs()]
        for accumulator, step in _first_means(instr):
            zeros, counter = untouched.get(storage(accumulator)), unwritten.get(storage(step))
            if (
                zeros is not None
                and counter is not None
                and zeros is not counter
                and accessed.count(storage(accumulator)) == 1
            ):
                elided.add(zeros)
        for v in accessed:
            untouched.pop(v, None)
        for v in instr.may_write():
            unwritten.pop(storage(v), None)
    return block.with_instrs(
        replace(i, arguments={**i.arguments, "init_type": "undef"}) if i in elided else i
        for i in block.instrs
    )


def _first_means(instr: Instr) -> Iterator[tuple[Value, Value]]:
    """(target, counter) of a mean, or of the means with which a loop's body begins on what it takes
    by reference.
    """
    if instr.kind == "repeat":
        values = instr.arguments["inputs"]
        yield from ((values[i], values[step]) for i, step in instr.bodies[0].find(_means_of_body))
    elif instr.definition is not None and instr.definition.name in MEANS:
        if isinstance(instr.arguments["step"], Value):
            yield instr.arguments["t"], instr.arguments["step"]


def _means_of_body(body: Block) -> list[tuple[int, int]]:
    """Inputs that a body first accesses as the target of a mean, each with that of its counter."""
    aliases = body.find(MustAlias)
    steps = {i: _counter_of_first_mean(body, aliases, body.inputs[i]) for i in sorted(body.by_ref)}
    return [(i, step) for i, step in steps.items() if step is not None]


def is_zeros(instr: Instr) -> bool:
    """Whether an instruction makes zeros with `init`."""
    return instr.is_op("init") and instr.arguments["init_type"] == "zero"


def _counter_of_first_mean(body: Block, aliases: MustAlias, accumulator: Value) -> int | None:
    """The input that counts the mean by which a body first accesses an accumulator, if it is not
    written before.
    """
    target = aliases.storage(accumulator)
    written: list[Value] = []
    for instr in body.instrs:
        if any(aliases.storage(v) is target for v in instr.inputs()):
            if instr.definition is None or instr.definition.name not in MEANS:
                return None
            others = [
                v for name, v in instr.arguments.items() if name != "t" and isinstance(v, Value)
            ]
            step = instr.arguments["step"]
            if any(aliases.storage(v) is target for v in others) or not isinstance(step, Value):
                return None
            if aliases.storage(step) in written or step not in body.inputs:
                return None
            return body.inputs.index(step)
        written += [aliases.storage(v) for v in instr.may_write()]
    return None

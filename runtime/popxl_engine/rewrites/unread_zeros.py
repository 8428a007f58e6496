"""Zeros that nobody reads: accumulators of a mean whose first value replaces what is there."""

from typing import Dict, Iterator, List, Optional, Tuple

from popxl.opdef import OPS

from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.ops.accumulate import (
    accumulate_column_sum_,
    accumulate_gather_grad_,
    accumulate_gemm_,
    accumulate_gemm_sumsq_,
)

MEANS = (
    OPS["accumulate_mean_"],
    accumulate_gemm_,
    accumulate_gemm_sumsq_,
    accumulate_gather_grad_,
    accumulate_column_sum_,
)
"""Ops that replace ``t`` where ``step`` is zero, whatever it holds."""


def unread_zeros(block: Block) -> None:
    """Memory of an accumulator is not cleared where a mean with a counter at zero is the first that
    meets it.

    Both come fresh from `init`. A loop may take them instead, whose body first meets the
    accumulator as the target of a mean, before it writes the counter.
    """
    if not any(map(is_zeros, block.instrs)):
        return
    groups = storage_groups(block)
    unmet: Dict[Value, Instr] = {}
    """Zeros that nothing has met yet, by what shares their storage."""
    unwritten: Dict[Value, Instr] = {}
    """Those that nothing has written yet."""
    known: Dict[Block, List[Tuple[int, int]]] = {}
    for instr in block.instrs:
        if is_zeros(instr):
            storage = groups.get(instr.outputs[0], instr.outputs[0])
            unmet[storage] = unwritten[storage] = instr
            continue
        met = [groups.get(v, v) for v in instr.inputs()]
        for accumulator, step in _first_means(instr, known):
            target = groups.get(accumulator, accumulator)
            made, counter = unmet.get(target), unwritten.get(groups.get(step, step))
            if (
                made is not None
                and counter is not None
                and made is not counter
                and met.count(target) == 1
            ):
                made.arguments["init_type"] = "undef"
        for storage in met:
            unmet.pop(storage, None)
        for v in (*instr.written(), *instr.lent()):
            unwritten.pop(groups.get(v, v), None)


def _first_means(
    instr: Instr, known: Dict[Block, List[Tuple[int, int]]]
) -> Iterator[Tuple[Value, Value]]:
    """(target, counter) of a mean, or of the means with which a loop's body begins on what it takes
    by reference.

    ``known``: for loops' bodies, both as inputs.
    """
    if instr.kind == "repeat":
        body, values = instr.bodies[0], instr.arguments["inputs"]
        if body not in known:
            inside = storage_groups(body)
            steps = {
                i: _counter_of_first_mean(body, inside, body.inputs[i]) for i in sorted(body.by_ref)
            }
            known[body] = [(i, step) for i, step in steps.items() if step is not None]
        yield from ((values[i], values[step]) for i, step in known[body])
    elif instr.definition in MEANS:
        if isinstance(instr.arguments["step"], Value):
            yield instr.arguments["t"], instr.arguments["step"]


def is_zeros(instr: Instr) -> bool:
    """Whether an instruction makes zeros with `init`."""
    return instr.is_op("init") and instr.arguments["init_type"] == "zero"


def _counter_of_first_mean(
    body: Block, groups: Dict[Value, Value], accumulator: Value
) -> Optional[int]:
    """The input that counts the mean by which a body first meets an accumulator, if it is not
    written before.
    """
    target = groups.get(accumulator, accumulator)
    written: List[Value] = []
    for instr in body.instrs:
        if any(groups.get(v, v) is target for v in instr.inputs()):
            if instr.definition not in MEANS:
                return None
            others = [
                v for name, v in instr.arguments.items() if name != "t" and isinstance(v, Value)
            ]
            step = instr.arguments["step"]
            if any(groups.get(v, v) is target for v in others) or not isinstance(step, Value):
                return None
            if groups.get(step, step) in written or step not in body.inputs:
                return None
            return body.inputs.index(step)
        written += [groups.get(v, v) for v in instr.written()]
    return None

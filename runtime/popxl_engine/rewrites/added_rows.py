"""The gradient of a table whose rows are looked up, added to another gradient: its rows go there at
once.
"""

from typing import Dict, List, Set

from popxl import dtypes

from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.ops.accumulate import accumulate_gather_grad_, scatter_add_rows_
from popxl_engine.rewrites.match import fused_instr
from popxl_engine.rewrites.unread_zeros import is_zeros


def added_rows(block: Block) -> None:
    """add_ of zeros that nobody else meets but a mean of rows, with a counter at zero.

    Accumulator and counter come fresh from `init`, and nothing writes the rows or their indices
    before they are added.
    """
    means = [
        i for i, instr in enumerate(block.instrs) if instr.definition is accumulate_gather_grad_
    ]
    if not means:
        return
    groups = storage_groups(block)

    def storage(value: Value) -> Value:
        return groups.get(value, value)

    meeting: Dict[Value, List[int]] = {}
    for i, instr in enumerate(block.instrs):
        for value in {storage(v) for v in (*instr.inputs(), *instr.outputs)}:
            meeting.setdefault(value, []).append(i)
    leaving, gone = {storage(v) for v in block.outputs}, set()

    def changes(first: int, last: int, values: Set[Value]) -> bool:
        """Whether an instruction after the first and before the last one may write any of these."""
        between = block.instrs[first + 1 : last]
        return any(
            storage(v) in values for instr in between for v in (*instr.written(), *instr.lent())
        )

    for mean in means:
        a = block.instrs[mean].arguments
        sums = storage(a["t"])
        if sums in leaving or len(meeting[sums]) != 3 or not isinstance(a["step"], Value):
            continue
        made, _, adding = meeting[sums]
        add = block.instrs[adding]
        if (
            not block.instrs[made].is_op("init")
            or not _adds(add)
            or storage(add.arguments["rhs"]) is not sums
        ):
            continue
        counter, rows = storage(a["step"]), {storage(a["dy"]), storage(a["indices"])}
        start, target = meeting[counter][0], storage(add.arguments["lhs"])
        if not is_zeros(block.instrs[start]) or changes(start, mean, {counter}):
            continue
        if rows & {sums, target} or changes(mean, adding, rows):
            continue
        arguments = {
            "t": add.arguments["lhs"],
            **{name: a[name] for name in ("dy", "indices", "zero_OOR")},
        }
        block.instrs[adding] = fused_instr(add, scatter_add_rows_, arguments)
        gone |= {made, mean}
    block.instrs = [instr for i, instr in enumerate(block.instrs) if i not in gone]


def _adds(instr: Instr) -> bool:
    """Whether it adds a float32 to another of its shape."""
    if not instr.is_op("add_"):
        return False
    lhs, rhs = instr.arguments["lhs"].spec, instr.arguments["rhs"].spec
    return lhs.shape == rhs.shape and lhs.dtype is rhs.dtype is dtypes.float32

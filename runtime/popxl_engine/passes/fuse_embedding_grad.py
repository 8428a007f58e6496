"""The gradient of an embedding table, where it is added to another gradient: its rows are added
there, and no table holds their sums.
"""

from popxl import dtypes

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.accumulate import accumulate_gather_grad_, scatter_add_rows_
from popxl_engine.passes.elide_zero_init import is_zeros
from popxl_engine.passes.rewriter import fused


def fuse_embedding_grad(block: Block) -> Block:
    """The gradient of a word embedding is added row by row to the one that waits for it, in place
    of a table of zeros that is filled and then added.

    Accumulator and counter come fresh from `init`, and nothing writes the rows or their indices
    before they are added.
    """
    if not any(instr.definition is accumulate_gather_grad_ for instr in block.instrs):
        return block
    uses = _Uses(block)
    instrs: list[Instr | None] = list(block.instrs)
    for mean, instr in enumerate(block.instrs):
        if instr.definition is accumulate_gather_grad_ and (found := uses.match(mean)):
            clearing, adding = found
            add, a = block.instrs[adding], instr.arguments
            arguments = {name: a[name] for name in ("dy", "indices", "zero_OOR")}
            arguments["t"] = add.arguments["lhs"]
            at_once = fused(add, scatter_add_rows_, arguments)
            if at_once is not None:
                instrs[adding] = at_once
                instrs[clearing] = instrs[mean] = None
    return block.with_instrs(instr for instr in instrs if instr is not None)


class _Uses:
    """The positions where a block uses each storage."""

    def __init__(self, block: Block):
        self.block, self.storage = block, block.find(MustAlias).storage
        self.of: dict[Value, list[int]] = {}
        for i, instr in enumerate(block.instrs):
            for value in {self.storage(v) for v in (*instr.inputs(), *instr.outputs)}:
                self.of.setdefault(value, []).append(i)
        self.leaving = {self.storage(v) for v in block.outputs}

    def match(self, mean: int) -> tuple[int, int] | None:
        """The positions where the sums of a mean of rows are made, and where they are added, if its
        rows may go there at once.
        """
        a = self.block.instrs[mean].arguments
        sums = self.storage(a["t"])
        if sums in self.leaving or len(self.of[sums]) != 3 or not isinstance(a["step"], Value):
            return None
        clearing, _, adding = self.of[sums]
        add = self.block.instrs[adding]
        is_added = _adds(add) and self.storage(add.arguments["rhs"]) is sums
        if not self.block.instrs[clearing].is_op("init") or not is_added:
            return None
        counter, rows = self.storage(a["step"]), {self.storage(a["dy"]), self.storage(a["indices"])}
        start, target = self.of[counter][0], self.storage(add.arguments["lhs"])
        is_first = is_zeros(self.block.instrs[start]) and not self._changes(start, mean, {counter})
        if not is_first or rows & {sums, target} or self._changes(mean, adding, rows):
            return None
        return clearing, adding

    def _changes(self, first: int, last: int, values: set[Value]) -> bool:
        """Whether an instruction after the first and before the last one may write any of these."""
        return any(
            self.storage(v) in values
            for instr in self.block.instrs[first + 1 : last]
            for v in instr.may_write()
        )


def _adds(instr: Instr) -> bool:
    """Whether it adds a float32 to another of its shape."""
    if not instr.is_op("add_"):
        return False
    lhs, rhs = instr.arguments["lhs"], instr.arguments["rhs"]
    return lhs.shape == rhs.shape and lhs.dtype is rhs.dtype is dtypes.float32

"""Which values share storage by contract (*must* alias): alias forms, and what is written in place.
What could share it, as no one would notice (*may* alias), `passes.elide_copies` decides.
"""

from collections.abc import Iterable

from popxl_engine.analysis.union_find import UnionFind
from popxl_engine.ir import Block, Instr, Value, aliased, may_alias_or_write


class MustAlias:
    """The storage of each value of a block, and which of it is written."""

    def __init__(self, block: Block):
        self._classes: UnionFind[Value] = UnionFind()
        written: list[Value] = []
        for instr in block.instrs:
            if instr.bodies or may_alias_or_write(instr.definition):
                for source, result in must_alias_edges(instr):
                    self._classes.join(source, result)
                written += instr.may_write()
        self._written: set[Value] = set(map(self.storage, written))

    def storage(self, value: Value) -> Value:
        """One value for all that share storage."""
        return self._classes.find(value)

    def is_written(self, value: Value) -> bool:
        """Whether anything in the block writes the value's storage, or may."""
        return self.storage(value) in self._written


def must_alias_edges(instr: Instr) -> Iterable[tuple[Value, Value]]:
    """(operand, result) pairs that share storage by contract."""
    writes = instr.definition is not None and instr.definition.writes
    results = instr.outputs[:1] if writes else instr.outputs
    return [(v, result) for v in aliased(instr) for result in results]

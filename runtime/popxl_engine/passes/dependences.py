"""What of some instructions must stay after what: makers of operands, and what reads or writes the
same storage, the same row, or the outside.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from popxl_engine.analysis.affine import Affine, AffineForms
from popxl_engine.analysis.aliases import must_alias_edges
from popxl_engine.analysis.effects import effects_of_instr
from popxl_engine.analysis.union_find import UnionFind
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.passes.elide_copies import view_source

OUTSIDE = "outside"
"""The resource of what others see in the order in which it happens: streams of the host, prints."""


@dataclass
class _Uses:
    """The reads of a resource since it was last written, and the write."""

    written: int | None = None
    read: list[int] = field(default_factory=list)


class Dependences:
    """Which of some instructions of a block need which earlier ones, by their positions.

    An instruction depends on what makes its operands, and on what reads or writes, before it, the
    same storage, the same row, or the outside. Copies and views count as the storage that they may
    come to share, so that no copy becomes needed by another order.
    """

    def __init__(self, block: Block, instrs: Sequence[Instr]):
        self.instrs = instrs
        self.users: list[set[int]] = [set() for _ in instrs]
        """The instructions that depend on each one by themselves."""
        self._forms = block.find(AffineForms)
        self._storage: UnionFind[Any] = UnionFind()
        for instr in (*block.instrs, *instrs):  # aliases may be made before these instructions
            for source, result in _may_alias_edges(instr):
                self._storage.join(source, result)
        self._depend()

    @property
    def sources(self) -> list[set[int]]:
        """The instructions that each one depends on by itself."""
        found: list[set[int]] = [set() for _ in self.instrs]
        for position, users in enumerate(self.users):
            for user in users:
                found[user].add(position)
        return found

    def _after(self, position: int, earlier: int | None) -> None:
        if earlier is not None and earlier != position:
            self.users[earlier].add(position)

    def _depend(self) -> None:
        makers: dict[Value, int] = {}
        uses: defaultdict[Any, _Uses] = defaultdict(_Uses)
        rows: defaultdict[Any, list[tuple[int, bool, Affine | None]]] = defaultdict(list)
        for position, instr in enumerate(self.instrs):
            written = {self._storage.find(v) for v in instr.may_write()}
            read = {self._storage.find(v) for v in instr.inputs()} - written
            for value in instr.inputs():
                self._after(position, makers.get(value))
            if _is_seen_outside(instr):
                written.add(OUTSIDE)
            for resource in read:
                self._after(position, uses[resource].written)
                uses[resource].read.append(position)
            for resource in written:
                for earlier in (uses[resource].written, *uses[resource].read):
                    self._after(position, earlier)
                uses[resource] = _Uses(position)
            for buffer, is_store, row in self._rows(instr):
                for earlier, was_store, other in rows[buffer]:
                    if (is_store or was_store) and not _differ(row, other):
                        self._after(position, earlier)
                rows[buffer].append((position, is_store, row))
            makers.update(dict.fromkeys(instr.outputs, position))

    def _rows(self, instr: Instr) -> Iterator[tuple[Any, bool, Affine | None]]:
        """The rows that an instruction loads or stores: buffer, whether it stores, and which."""
        effects = effects_of_instr(instr)
        row = self._forms.of(instr.arguments["offset"]) if "offset" in instr.arguments else None
        for buffer in effects.loaded_buffers:
            yield buffer, False, row
        for buffer in effects.stored_buffers:
            yield buffer, True, row


def _differ(one: Affine | None, other: Affine | None) -> bool:
    """Whether two rows are surely not the same."""
    difference = None if one is None or other is None else one.minus(other)
    return difference is not None and difference != 0


def _is_seen_outside(instr: Instr) -> bool:
    if instr.effects & {"host", "print"}:
        return True
    return bool(instr.bodies) and effects_of_instr(instr).has_side_effects


def _may_alias_edges(instr: Instr) -> Iterator[tuple[Any, Any]]:
    yield from must_alias_edges(instr)
    source = view_source(instr)
    if isinstance(source, Value):
        for result in instr.outputs:
            yield source, result

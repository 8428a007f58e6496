"""What blocks do beyond their results, with the blocks that they run: each block is looked at once.

Make a `Summaries` for a pass. A block may be asked for when the pass is done with it: later changes
are not seen.
"""

from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, Iterable, Iterator, Optional, Set

from popxl.replica_grouping import ReplicaGrouping

from popxl_engine.blocks import Block, Instr
from popxl_engine.stochastic import NARROW, TRANSFERS

KEPT_EFFECTS = frozenset({"host", "remote", "print"})


@dataclass(frozen=True)
class Summary:
    """Of a block or an instruction, with everything that it runs."""

    loads: FrozenSet[Any] = frozenset()
    """Remote buffers that it loads from."""
    stores: FrozenSet[Any] = frozenset()
    """Remote buffers that it stores to."""
    lasts: bool = False
    """Whether it matters beyond its results: transfers and prints, but not remote loads."""
    meets: bool = False
    """Whether it waits for other replicas."""
    draws: bool = False
    """Whether its rounding may be stochastic."""


NOTHING = Summary()


class Summaries:
    """The summaries of one pass."""

    def __init__(self) -> None:
        self._known: Dict[Block, Summary] = {}

    def of(self, block: Block) -> Summary:
        """A block's summary."""
        if block not in self._known:
            self._known[block] = _joined(self.of_instr(instr) for instr in block.instrs)
        return self._known[block]

    def of_instr(self, instr: Instr) -> Summary:
        """An instruction's summary."""
        if instr.bodies:
            return _joined(map(self.of, instr.bodies))
        if instr.kind != "op":
            return NOTHING
        return _of_op(instr)


def _of_op(instr: Instr) -> Summary:
    assert instr.definition is not None
    name, effects = instr.definition.name, instr.definition.effects
    if not (effects or instr.definition.writes):
        return NOTHING
    draws = writes_narrow(instr)
    if not effects:
        return DRAWS if draws else NOTHING
    buffer = (
        frozenset((instr.arguments["remote_buffer"],))
        if "remote_buffer" in instr.arguments
        else frozenset()
    )
    return Summary(
        loads=buffer if name.startswith("remote_load") else frozenset(),
        stores=buffer if name.startswith("remote_store") else frozenset(),
        lasts=bool(effects & KEPT_EFFECTS) and name != "remote_load",
        meets=meets(instr),
        draws=draws,
    )


DRAWS = Summary(draws=True)


def _joined(summaries: Iterable[Summary]) -> Summary:
    found = list(dict.fromkeys(summary for summary in summaries if summary is not NOTHING))
    if len(found) < 2:
        return found[0] if found else NOTHING
    return Summary(
        loads=frozenset().union(*(s.loads for s in found)),
        stores=frozenset().union(*(s.stores for s in found)),
        lasts=any(s.lasts for s in found),
        meets=any(s.meets for s in found),
        draws=any(s.draws for s in found),
    )


def meets(instr: Instr) -> bool:
    """Whether an instruction is a collective over more than one replica."""
    if "collective" not in instr.effects:
        return False
    group: Optional[ReplicaGrouping] = instr.arguments.get("group")
    assert instr.source is not None
    return (group.group_size if group is not None else instr.source.graph.ir.replication_factor) > 1


def writes_narrow(instr: Instr) -> bool:
    """Whether an instruction updates a 16-bit tensor, so that its result is rounded."""
    if instr.kind != "op" or instr.host or instr.effects & TRANSFERS:
        return False
    return any(v.spec.dtype in NARROW for v in instr.written())


def instrs_run(main: Block) -> int:
    """How many instructions one run of a block runs, branches of a conditional both."""
    counts: Dict[Block, int] = {}
    for block in blocks_of(main):
        counts[block] = len(block.instrs)
        for instr in block.instrs:
            if instr.bodies:
                rounds = instr.arguments.get("repeat_count", 1)
                counts[block] += rounds * sum(counts[body] for body in instr.bodies)
    return counts[main]


def blocks_of(*mains: Block) -> Iterator[Block]:
    """Blocks and all that they run, at any depth; each once, after those that it runs."""
    found: Set[Block] = set()

    def visit(block: Block) -> Iterator[Block]:
        found.add(block)
        for instr in block.instrs:
            for body in instr.bodies:
                if body not in found:
                    yield from visit(body)
        yield block

    for main in mains:
        if main not in found:
            yield from visit(main)


def instrs_of(main: Block) -> Iterator[Instr]:
    """The instructions of a block and of all blocks that it runs."""
    for block in blocks_of(main):
        yield from block.instrs

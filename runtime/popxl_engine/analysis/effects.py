"""What blocks and instructions do beyond their results, with the blocks that they run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from popxl.replica_grouping import ReplicaGrouping

from popxl_engine.ir import Block, Instr, blocks_of
from popxl_engine.kernels.collectives import READS
from popxl_engine.stochastic import HALF_DTYPES, UNROUNDED_EFFECTS

KEPT_EFFECTS = frozenset({"host", "remote", "print", "clock"})


@dataclass(frozen=True)
class Effects:
    """The effects of a block or an instruction, with everything that it runs."""

    loaded_buffers: frozenset[Any] = frozenset()
    """Remote buffers that it loads from."""
    stored_buffers: frozenset[Any] = frozenset()
    """Remote buffers that it stores to."""
    has_side_effects: bool = False
    """Whether it matters beyond its results: transfers and prints, but not `remote_load`."""
    synchronizes: bool = False
    """Whether it waits for other replicas."""
    draws: bool = False
    """Whether its rounding may be stochastic."""


NOTHING = Effects()


def effects_of(block: Block) -> Effects:
    """What a block does."""
    return block.find(_of_block)


def _of_block(block: Block) -> Effects:
    return _joined(map(effects_of_instr, block.instrs))


def effects_of_instr(instr: Instr) -> Effects:
    """What an instruction does."""
    if instr.bodies:
        return _joined(map(effects_of, instr.bodies))
    return _of_op(instr) if instr.definition is not None else NOTHING


def _of_op(instr: Instr) -> Effects:
    assert instr.definition is not None
    name, effects = instr.definition.name, instr.definition.effects
    if not (effects or instr.definition.writes):
        return NOTHING
    if not effects:
        return DRAWS if draws_noise(instr) else NOTHING
    buffer = (
        frozenset((instr.arguments["remote_buffer"],))
        if "remote_buffer" in instr.arguments
        else frozenset()
    )
    return Effects(
        loaded_buffers=buffer if name.startswith("remote_load") else frozenset(),
        stored_buffers=buffer if name.startswith("remote_store") else frozenset(),
        has_side_effects=bool(effects & KEPT_EFFECTS) and name != "remote_load",
        synchronizes=synchronizes(instr),
        draws=draws_noise(instr),
    )


DRAWS = Effects(draws=True)


def _joined(several: Iterable[Effects]) -> Effects:
    found = list(dict.fromkeys(effects for effects in several if effects is not NOTHING))
    if len(found) < 2:
        return found[0] if found else NOTHING
    return Effects(
        loaded_buffers=frozenset().union(*(s.loaded_buffers for s in found)),
        stored_buffers=frozenset().union(*(s.stored_buffers for s in found)),
        has_side_effects=any(s.has_side_effects for s in found),
        synchronizes=any(s.synchronizes for s in found),
        draws=any(s.draws for s in found),
    )


def synchronizes(instr: Instr) -> bool:
    """Whether an instruction is a collective over more than one replica."""
    if "collective" not in instr.effects:
        return False
    group: ReplicaGrouping | None = instr.arguments.get("group")
    assert instr.source is not None
    return (group.group_size if group is not None else instr.source.graph.ir.replication_factor) > 1


def is_exchange(instr: Instr) -> bool:
    """Whether an instruction is a whole collective whose results depend on what others bring."""
    if instr.kind != "op" or not synchronizes(instr):
        return False
    return instr.definition is not None and READS.get(instr.definition.name) != "own"


def draws_noise(instr: Instr) -> bool:
    """Whether an instruction rounds what it updates: a 16-bit tensor, or what its op declares."""
    if instr.kind != "op" or instr.host or instr.effects & UNROUNDED_EFFECTS:
        return False
    assert instr.definition is not None
    return instr.definition.rounds or any(v.spec.dtype in HALF_DTYPES for v in instr.written())


def instrs_run(main: Block) -> int:
    """How many instructions one run of a block runs, branches of a conditional both."""
    counts: dict[Block, int] = {}
    for block in blocks_of(main):
        counts[block] = len(block.instrs)
        for instr in block.instrs:
            if instr.bodies:
                iterations = instr.arguments.get("repeat_count", 1)
                counts[block] += iterations * sum(counts[body] for body in instr.bodies)
    return counts[main]


def instrs_of(main: Block) -> Iterator[Instr]:
    """The instructions of a block and of all blocks that it runs."""
    for block in blocks_of(main):
        yield from block.instrs

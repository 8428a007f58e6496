"""The engine's passes over a lowered program, in order: views that must be copies, dead code, then
copies.
"""

from typing import Any, Dict, FrozenSet, List, Set

from popxl_engine.aliasing import ALL_RULES, Aliasing, storage_groups
from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.copied_views import copy_views
from popxl_engine.summaries import Summaries


def optimise(block: Block, rules: FrozenSet[str] = ALL_RULES) -> None:
    """Prepare a main block and its bodies for code generation."""
    copy_views(block, rules)
    _remove_copies(block, rules, Summaries(), set())


def _remove_copies(
    block: Block, rules: FrozenSet[str], summaries: Summaries, done: Set[Block]
) -> None:
    if block in done:
        return
    done.add(block)
    for instr in block.instrs:
        for body in instr.bodies:
            _remove_copies(body, rules, summaries, done)
    remove_dead_code(block, summaries)
    if "operands_apart" in rules:
        separate_operands(block)
    Aliasing(block, rules, summaries).run()


def remove_dead_code(block: Block, summaries: Summaries) -> None:
    """Drop instructions whose results nobody reads and that have no lasting effect, and constants
    that none reads.

    Args:
        summaries: of what it runs.
    """
    groups = storage_groups(block)
    live: Set[Any] = {groups.get(v, v) for v in block.outputs}
    live |= {groups.get(v, v) for v in block.state.values()}
    live |= {groups.get(block.inputs[i], block.inputs[i]) for i in block.by_ref}
    kept = []
    for instr in reversed(block.instrs):
        touches = (*instr.outputs, *instr.written())
        if summaries.of_instr(instr).lasts or any(groups.get(v, v) in live for v in touches):
            kept.append(instr)
            live |= {groups.get(v, v) for v in instr.inputs()}
    block.instrs = kept[::-1]
    read = {v for instr in block.instrs for v in instr.inputs()}.union(block.outputs)
    block.constants = {c: v for c, v in block.constants.items() if v in read}


def separate_operands(block: Block) -> None:
    """Copy operands that share storage with one that the same op writes: kernels may write before
    all is read.
    """
    groups = storage_groups(block)
    instrs: List[Instr] = []
    for instr in block.instrs:
        if instr.definition is not None and instr.definition.writes and not instr.host:
            written = {groups.get(v, v) for v in instr.written()}
            for name, argument in instr.arguments.items():
                if name not in instr.definition.writes:
                    instr.arguments[name] = _apart(argument, written, groups, instrs)
        instrs.append(instr)
    block.instrs = instrs


def _apart(
    argument: Any, written: Set[Value], groups: Dict[Value, Value], instrs: List[Instr]
) -> Any:
    """An argument with copies, appended to ``instrs``, of the values that share storage with
    written ones.
    """
    if isinstance(argument, (tuple, list)):
        return tuple(_apart(a, written, groups, instrs) for a in argument)
    if not isinstance(argument, Value) or groups.get(argument, argument) not in written:
        return argument
    result = Value(
        f"{argument.name}_before_{len(instrs)}", argument.spec, argument.host, argument.sharding
    )
    instrs.append(Instr("copy", {"t": argument}, [result], host=argument.host, own=True))
    return result

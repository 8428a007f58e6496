"""Copies of operands that share storage with one that the same op writes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value


def separate_operands(block: Block) -> Block:
    """Copy operands that share storage with one that the same op writes: kernels may write before
    all is read.
    """
    storage = block.find(MustAlias).storage
    instrs: list[Instr] = []
    for instr in block.instrs:
        if instr.definition is not None and instr.definition.writes and not instr.host:
            written = {storage(v) for v in instr.written()}
            arguments: dict[str, Any] = {}
            for name, argument in instr.arguments.items():
                is_target = name in instr.definition.writes
                arguments[name] = (
                    argument
                    if is_target
                    else _apart(argument, lambda v: storage(v) in written, instrs)
                )
            if arguments != instr.arguments:
                instr = replace(instr, arguments=arguments)
        instrs.append(instr)
    return block.with_instrs(instrs)


def _apart(argument: Any, is_written: Callable[[Value], bool], instrs: list[Instr]) -> Any:
    """An argument with copies, appended to ``instrs``, of the values that share storage with
    written ones.
    """
    if isinstance(argument, (tuple, list)):
        return tuple(_apart(a, is_written, instrs) for a in argument)
    if not isinstance(argument, Value) or not is_written(argument):
        return argument
    result = replace(argument, name=f"{argument.name}_before_{len(instrs)}")
    instrs.append(Instr("copy", {"t": argument}, (result,), host=argument.host, needs_copy=True))
    return result

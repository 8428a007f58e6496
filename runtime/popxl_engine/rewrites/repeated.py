"""Numbers that are computed again: each parameter's update derives the same few from norm and
learning rate.
"""

from dataclasses import replace
from typing import Any, Dict

from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value


def repeated_numbers(block: Block) -> None:
    """A result with one element, of an op without effects whose operands are the same, is a copy of
    the first.

    What the block writes anywhere is never the same.
    """
    groups = storage_groups(block)
    written = {
        groups.get(v, v) for instr in block.instrs for v in (*instr.written(), *instr.lent())
    }

    def is_written(value: Value) -> bool:
        return groups.get(value, value) in written

    names: Dict[Value, Any] = {
        value: (constant.host_value.tobytes(), constant.shape, constant.dtype, value.host)
        for constant, value in block.constants.items()
    }
    """What a value is, where that is known to be the same as another one's."""
    first: Dict[Any, Value] = {}

    def name(argument: Any) -> Any:
        if isinstance(argument, Value):
            return object() if is_written(argument) else names.get(argument, argument)
        if isinstance(argument, (tuple, list)):
            return tuple(map(name, argument))
        return type(argument), repr(argument) if isinstance(argument, (bool, int, float)) else id(
            argument
        )

    for i, instr in enumerate(block.instrs):
        if instr.kind == "copy":
            names[instr.outputs[0]] = name(instr.arguments["t"])
        elif _makes_a_number(instr):
            assert instr.definition is not None
            key = (
                instr.definition.name,
                instr.host,
                *((n, name(a)) for n, a in instr.arguments.items()),
            )
            made = first.get(key)
            if made is not None:
                block.instrs[i] = replace(
                    instr, kind="copy", arguments={"t": made}, definition=None
                )
                names[instr.outputs[0]] = name(made)
            elif not is_written(instr.outputs[0]):
                first[key] = instr.outputs[0]


def _makes_a_number(instr: Instr) -> bool:
    """Whether an instruction makes one element of its own, and does nothing else."""
    definition = instr.definition
    if (
        instr.kind != "op"
        or definition is None
        or definition.writes
        or definition.alias
        or definition.effects
    ):
        return False
    return len(instr.outputs) == 1 and all(n == 1 for n in instr.outputs[0].spec.shape)

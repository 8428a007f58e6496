"""Common subexpressions of one element: each parameter's update derives the same few from norm and
learning rate.
"""

from dataclasses import replace

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.analysis.value_numbers import ValueNumber, ValueNumbers
from popxl_engine.ir import Block, Instr, Value


def scalar_cse(block: Block) -> Block:
    """A result with one element, of an op without effects whose operands are the same, is a copy of
    the first.

    What the block writes anywhere is never the same.
    """
    numbers, aliases = block.find(ValueNumbers), block.find(MustAlias)
    first: dict[ValueNumber, Value] = {}
    instrs: list[Instr] = []
    for instr in block.instrs:
        if _makes_number(instr):
            number = numbers.result_of(instr)
            earlier = first.get(number)
            if earlier is not None:
                instr = replace(instr, kind="copy", arguments={"t": earlier}, definition=None)
            elif not aliases.is_written(instr.outputs[0]):
                first[number] = instr.outputs[0]
        instrs.append(instr)
    return block.with_instrs(instrs)


def _makes_number(instr: Instr) -> bool:
    """Whether an instruction makes one element of its own, and does nothing else."""
    definition = instr.definition
    if definition is None or definition.writes or definition.alias or definition.effects:
        return False
    return len(instr.outputs) == 1 and instr.outputs[0].nelms == 1

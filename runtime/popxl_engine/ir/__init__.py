"""The form in which the compiler keeps a program: values, instructions, blocks; how they print, and
what must hold of them.
"""

from popxl_engine.ir.block import (
    NO_NAME,
    Block,
    Instr,
    RngPath,
    Value,
    aliased,
    blocks_of,
    filled,
    map_blocks,
    may_alias_or_write,
    values_in,
)
from popxl_engine.ir.text import to_text
from popxl_engine.ir.verify import verify

__all__ = [
    "NO_NAME",
    "Block",
    "Instr",
    "RngPath",
    "Value",
    "aliased",
    "blocks_of",
    "filled",
    "map_blocks",
    "may_alias_or_write",
    "to_text",
    "values_in",
    "verify",
]

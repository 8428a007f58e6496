"""Blocks as text, an instruction a line, with what each block runs before it."""

from collections.abc import Iterator
from typing import Any

from popxl_engine.ir.block import Block, Instr, Value, blocks_of

_FLAGS = ("host", "needs_copy", "needs_contiguous", "must_view")


def to_text(program: Block) -> str:
    """A program as text: each block once, after those that it runs."""
    return "\n\n".join("\n".join(_block(block)) for block in blocks_of(program)) + "\n"


def _block(block: Block) -> Iterator[str]:
    inputs = (f"{'&' if i in block.by_ref else ''}{_typed(v)}" for i, v in enumerate(block.inputs))
    yield f"block {block.name}({', '.join(inputs)}) {{"
    for kind, values in (("state", block.state), ("constant", block.constants)):
        for tensor, value in values.items():
            yield f"  {_typed(value)} = {kind} {tensor.name}"
    for instr in block.instrs:
        yield f"  {instr_text(instr)}"
    yield f"  return {', '.join(map(repr, block.outputs))}"
    yield "}"


def _typed(value: Value) -> str:
    return f"{value!r}: {value.spec.dtype.name}{list(value.spec.shape)}"


def instr_text(instr: Instr) -> str:
    """One instruction as text."""
    name = instr.definition.name if instr.definition is not None else instr.kind
    if instr.kind in ("begin", "end"):
        name = f"{instr.kind} {name}"
    arguments = ", ".join(f"{n}={_argument(a)}" for n, a in instr.arguments.items())
    bodies = "".join(f" @{body.name}" for body in instr.bodies)
    flags = "".join(f" !{flag}" for flag in _FLAGS if getattr(instr, flag))
    results = ", ".join(map(_typed, instr.outputs))
    where = f"  # {instr.source.where}" if instr.source is not None else ""
    return f"{results}{' = ' if results else ''}{name}{bodies}({arguments}){flags}{where}"


def _argument(argument: Any) -> str:
    if isinstance(argument, (tuple, list)):
        return f"({', '.join(map(_argument, argument))})"
    return (
        str(getattr(argument, "name", argument))
        if not isinstance(argument, Value)
        else repr(argument)
    )

"""What can be refused before a program runs."""

from typing import Any, Dict, Set

from popxl.errors import GraphError

from popxl_engine.blocks import Block, Instr, Value


def check_offsets(block: Block, known: Dict[Value, int]) -> None:
    """Check the offsets of remote loads and stores that are constants, through calls, loops and branches.

    Args:
        known: values of the block's inputs, where they are constants.
    Raises:
        GraphError: an offset outside its buffer.
    """
    numbers = {v: c for c, v in block.constants.items() if c.nelms == 1 and c.dtype.is_int}
    known = {**known, **{v: int(c.host_value.reshape(-1)[0]) for v, c in numbers.items()}}
    changed = changing(block)
    for instr in block.instrs:
        if instr.kind == "copy":
            source, result = instr.arguments["t"], instr.outputs[0]
            if source in known and result not in changed:
                known[result] = known[source]
        elif "remote_buffer" in instr.arguments:
            _check(instr, known)
        for body, inputs in instr.calls():
            carried = len(body.outputs) if instr.kind == "repeat" else 0
            check_offsets(body, {b: known[v] for b, v in list(zip(body.inputs, inputs))[carried:] if v in known})


def changing(block: Block) -> Set[Value]:
    """Values that are written, or viewed by something through which they may be."""
    found = {v for instr in block.instrs for v in instr.written()}
    for instr in block.instrs:
        if instr.definition is not None and instr.definition.alias:
            found |= set(instr.inputs())
    return found


def _check(instr: Instr, known: Dict[Value, int]) -> None:
    given: Any = instr.arguments["offset"]
    offset = known.get(given) if isinstance(given, Value) else int(given)
    buffer, op = instr.arguments["remote_buffer"], instr.source
    assert op is not None
    if offset is not None and not 0 <= offset < buffer.entries:
        raise GraphError(
            f"{op} in graph '{op.graph.name or 'main'}', built at {op.where}: got offset {offset}; expected 0 <= "
            f"offset < {buffer.entries} entries of remote buffer {buffer.remote_buffer_id}. Allocate more entries."
        )

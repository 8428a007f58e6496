"""What can be refused before a program runs."""

from typing import Any, Dict, Iterator, Set

from popxl.errors import GraphError
from popxl.graph import Graph, called_first
from popxl.ir import Ir
from popxl.opdef import Op

from popxl_engine.blocks import Block, Instr, Value


def check_executable(ir: Ir) -> None:
    """Check that a program can be executed: more can be built.

    Raises:
        GraphError: an input of the main graph, to which nothing gives a value; a remote variable that does not fit its
            slot.
        popart_exception: an op that cannot be executed: the error that `popxl.ops.checks.refuse_to_execute` was given.
    """
    for t in ir.main_graph.inputs:
        raise GraphError(
            f"Session: got input %{t.name}: {t.spec} of the main graph, which has no value; expected a program whose "
            "main graph has no inputs. Make it a variable, or load it with ops.host_load."
        )
    for variable in ir.main_graph.variables:
        if variable.location_info is not None:
            variable.location_info.check(variable)
    for op in refused(ir.main_graph):
        where, refusal = f"in graph '{op.graph.name or 'main'}', built at {op.where}", op.refusal
        assert refusal is not None
        raise type(refusal)(f"cannot execute {op} {where}: {refusal}") from refusal


def refused(graph: Graph) -> Iterator[Op]:
    """Ops of a graph, and of those that it calls, that cannot be executed."""
    return (op for called in called_first(graph) for op in called.ops if op.refusal is not None)


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

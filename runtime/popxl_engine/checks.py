"""What can be refused before a program runs."""

from collections.abc import Iterable, Iterator

from popxl.errors import GraphError
from popxl.graph import Graph, called_first
from popxl.ir import Ir
from popxl.opdef import Op
from popxl.remote_buffer import RemoteBuffer
from popxl.tensor import Tensor, Variable

from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr, Value, blocks_of

Use = tuple[list[Instr], list[tuple[Block, int]]]
"""Transfers whose offset a value is, and inputs of bodies that it becomes."""


def check_executable(ir: Ir) -> None:
    """Check that a program can be executed: more can be built.

    Raises:
        GraphError: an input of the main graph, to which nothing gives a value; one that is read and
            that a call gives no value; a remote variable that does not fit its slot, or shares it.
        popart_exception: an op that cannot be executed: the error that
            `popxl.ops.checks.refuse_to_execute` was given.
    """
    for t in ir.main_graph.inputs:
        raise GraphError(
            f"Session: got input %{t.name}: {t.spec} of the main graph, which has no value; "
            "expected a program whose main graph has no inputs. Make it a variable, or load it "
            "with ops.host_load."
        )
    _check_remote(ir.main_graph.variables)
    for op, called, t in _missing(ir.main_graph):
        raise GraphError(
            f"cannot execute {op.described}: got no value for input %{t.name}: {t.spec} of graph "
            f"'{called.name}', which reads it; expected one. Give it at the call, also where the "
            "graph gains it later."
        )
    for op in refused(ir.main_graph):
        assert op.refusal is not None
        raise type(op.refusal)(f"cannot execute {op.described}: {op.refusal}") from op.refusal


def _check_remote(variables: Iterable[Variable]) -> None:
    """GraphError for a remote variable that does not fit its slot, or whose slot is another's."""
    slots: dict[tuple[RemoteBuffer, int], Variable] = {}
    for variable in variables:
        location = variable.location_info
        if location is None:
            continue
        location.check(variable)
        other = slots.setdefault((location.buffer, location.offset), variable)
        if other is not variable:
            raise GraphError(
                f"Session: got remote variables %{other.name} and %{variable.name} at offset "
                f"{location.offset} of one buffer; expected an offset of its own for each. Pass "
                "offset=, or use one variable."
            )


def _missing(graph: Graph) -> Iterator[tuple[Op, Graph, Tensor]]:
    """Calls, here and in what is called, with inputs that are read there and have no value."""
    for caller in called_first(graph):
        for op in caller.ops:
            for called, given in op.called():
                for t in called.inputs[len(given) :]:
                    if t in called.outputs or any(t in reader.inputs for reader in called.ops):
                        yield op, called, t


def refused(graph: Graph) -> Iterator[Op]:
    """Ops of a graph, and of those that it calls, that cannot be executed."""
    return (op for called in called_first(graph) for op in called.ops if op.refusal is not None)


def check_offsets(main: Block) -> None:
    """Check the offsets of remote loads and stores that are constants, through calls, loops and
    branches.

    Raises:
        GraphError: an offset outside its buffer.
    """
    seen: set[tuple[Block, int, int]] = set()

    def follow(use: Use, offset: int) -> None:
        transfers, inputs = use
        for instr in transfers:
            _check(instr, offset)
        for body, i in inputs:
            if (body, i, offset) not in seen:
                seen.add((body, i, offset))
                follow(body.find(_uses).get(body.inputs[i], ([], [])), offset)

    for block in blocks_of(main):
        for instr in block.instrs:
            if "remote_buffer" in instr.arguments:
                offset = instr.arguments["offset"]
                if not isinstance(offset, Value):
                    _check(instr, int(offset))
        for constant, value in block.constants.items():
            if constant.nelms == 1 and constant.dtype.is_int and value in block.find(_uses):
                follow(block.find(_uses)[value], int(constant.host_value.reshape(-1)[0]))


def _uses(block: Block) -> dict[Value, Use]:
    """How a block uses what it takes, and its constants, themselves or as copies that nothing
    writes.
    """
    uses, fixed = block.find(DefUse), {*block.inputs, *block.constants.values()}
    found: dict[Value, Use] = {}
    for instr in block.instrs:
        if "remote_buffer" in instr.arguments and isinstance(instr.arguments["offset"], Value):
            origin = uses.source(instr.arguments["offset"])
            if origin in fixed:
                found.setdefault(origin, ([], []))[0].append(instr)
        for body, inputs in instr.calls():
            carried = len(body.outputs) if instr.kind == "repeat" else 0
            for i, value in enumerate(inputs[carried:], carried):
                origin = uses.source(value)
                if origin in fixed:
                    found.setdefault(origin, ([], []))[1].append((body, i))
    return found


def _check(instr: Instr, offset: int) -> None:
    buffer, op = instr.arguments["remote_buffer"], instr.source
    assert op is not None
    if not 0 <= offset < buffer.entries:
        raise GraphError(
            f"{op.described}: got offset {offset}; expected 0 <= offset < {buffer.entries} entries "
            f"of remote buffer {buffer.remote_buffer_id}. Allocate more entries."
        )

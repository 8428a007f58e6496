"""The order of remote rows and collectives, found by running a lowered program on host scalars
alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from popxl.errors import GraphError
from popxl.ir import Ir
from popxl.op_records import call_arguments
from popxl.plan import Event

from popxl_engine.analysis.effects import effects_of, meets
from popxl_engine.compiler import compile_unfused
from popxl_engine.ir import Block, Instr, Value, filled
from popxl_engine.kernels.collectives import READS
from popxl_engine.planner.phases import MAIN, in_phases

Scalars = dict[Value, np.ndarray]


def sequence(ir: Ir, replica: int = 0) -> Iterator[Event]:
    """See `popxl.planning.sequence`. Small integer variables have their initial values."""
    block = compile_unfused(ir).block
    phases = {id(instr): phase for phase, instr, _ in in_phases(ir, block)}
    scalars: Scalars = {}
    for variable in ir.main_graph.variables:
        value = block.state.get(variable)
        if value is not None and value.host and variable.host_value is not None:
            grouping = variable.replica_grouping
            values = (
                variable.host_value if grouping.num_groups > 1 else variable.host_value[np.newaxis]
            )
            scalars[value] = np.array(values[grouping.assignment[replica]])
    yield from Walk(phases).block(block, scalars)


class Walk:
    """Goes through blocks. ``phases``: of the instructions that start one, by their identity."""

    def __init__(self, phases: dict[int, str]):
        self.phases, self.phase = phases, MAIN
        self._kept: dict[Block, list[Instr]] = {}

    def block(self, block: Block, scalars: Scalars) -> Iterator[Event]:
        """What happens in a block; its host scalars are added to those of its inputs."""
        for constant, value in block.constants.items():
            if value.host:
                scalars[value] = np.array(constant.host_value).reshape(constant.shape)
        if block not in self._kept:
            self._kept[block] = [instr for instr in block.instrs if self._matters(instr)]
        for instr in self._kept[block]:
            self.phase = self.phases.get(id(instr), self.phase)
            if instr.kind == "copy":
                if instr.outputs[0].host and instr.arguments["t"] in scalars:
                    scalar = scalars[instr.arguments["t"]]
                    scalars[instr.outputs[0]] = scalar.copy() if instr.needs_copy else scalar
            elif instr.kind in ("call", "repeat"):
                yield from self._repeat(instr, scalars)
            elif instr.kind == "conditional":
                yield from self._conditional(instr, scalars)
            elif instr.host:
                _evaluate(instr, scalars)
            else:
                yield from self._op(instr, scalars)

    def _matters(self, instr: Instr) -> bool:
        """Whether an instruction starts a phase, moves something or has to do with host scalars."""
        if id(instr) in self.phases or instr.host or any(v.host for v in instr.outputs):
            return True
        return any(not _is_silent(body) for body in instr.bodies) or _moves(instr)

    def _repeat(self, instr: Instr, scalars: Scalars) -> Iterator[Event]:
        body, inputs = instr.bodies[0], list(instr.arguments["inputs"])
        given: list[np.ndarray | None] = [scalars.get(v) for v in inputs]
        count, carried = (
            (instr.arguments["repeat_count"], len(body.outputs))
            if instr.kind == "repeat"
            else (1, 0)
        )
        if _is_silent(body) and not any(v.host for v in instr.outputs):
            return
        for _ in range(count):
            inner: Scalars = {v: g for v, g in zip(body.inputs, given) if g is not None}
            yield from self.block(body, inner)
            results = [inner.get(v) for v in body.outputs]
            given[:carried] = results[:carried]
        for value, result in zip(instr.outputs, results if count else given):
            if result is not None and value.host:
                scalars[value] = result

    def _conditional(self, instr: Instr, scalars: Scalars) -> Iterator[Event]:
        if all(_is_silent(body) for body in instr.bodies):
            return
        condition = scalars.get(instr.arguments["cond"])
        if condition is not None:
            yield from self._branch(instr, 0 if condition else 1, scalars)
            return
        then, other = (list(self._branch(instr, number, scalars)) for number in (0, 1))
        if then != other:
            raise GraphError(
                _unknown(
                    instr,
                    "a branch around transfers whose condition is on the device, and the other "
                    "branch has others",
                )
            )
        yield from then

    def _branch(self, instr: Instr, number: int, scalars: Scalars) -> Iterator[Event]:
        inputs: Sequence[Value] = instr.arguments[("then_inputs", "else_inputs")[number]]
        body = instr.bodies[number]
        known = {b: scalars[v] for b, v in zip(body.inputs, inputs) if v in scalars}
        yield from self.block(body, known)

    def _op(self, instr: Instr, scalars: Scalars) -> Iterator[Event]:
        definition, arguments = instr.definition, instr.arguments
        assert definition is not None
        if "remote" in definition.effects:
            row: Any = arguments["offset"]
            if isinstance(row, Value):
                if row not in scalars:
                    raise GraphError(_unknown(instr, "a row whose number is on the device"))
                row = scalars[row]
            kind = "load" if "load" in definition.name else "store"
            name = str(arguments["remote_buffer"].remote_buffer_id)
            yield Event(self.phase, kind, name, int(np.asarray(row).reshape(())))
        elif _moves(instr):
            yield Event(self.phase, "collective", definition.name)


def _is_silent(block: Block) -> bool:
    """Whether a block moves nothing."""
    effects = effects_of(block)
    return not (effects.loads or effects.stores or effects.meets)


def _moves(instr: Instr) -> bool:
    """Whether an instruction without bodies moves a row, or tensors between replicas."""
    definition = instr.definition
    if definition is None:
        return False
    return "remote" in definition.effects or (meets(instr) and READS.get(definition.name) != "own")


def _evaluate(instr: Instr, scalars: Scalars) -> None:
    definition = instr.definition
    assert definition is not None and definition.host is not None
    if any(v not in scalars for v in instr.inputs()):
        return
    args, kwargs = call_arguments(
        definition, {n: filled(a, scalars.__getitem__) for n, a in instr.arguments.items()}
    )
    result = definition.host(*args, **kwargs)
    if definition.writes:
        target = scalars[instr.arguments[definition.writes[0]]]
        target[...] = result
        scalars[instr.outputs[0]] = target
        return
    for value, found in zip(instr.outputs, [result] if len(instr.outputs) == 1 else result):
        scalars[value] = np.array(found, dtype=value.spec.dtype.as_numpy())


def _unknown(instr: Instr, what: str) -> str:
    op = instr.source
    assert op is not None
    return (
        f"sequence: got {what}: {op.described}; "
        "expected it to follow from constants and loop counters. Compute it from small integers."
    )

"""The order of remote rows and collectives, found by running a lowered program on host scalars
alone.

Each block is prepared once: what is left of it are actions, functions of the host scalars so far.
Scalars that no row and no branch follows from, such as seeds, are left out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
from popxl.errors import GraphError
from popxl.ir import Ir
from popxl.op_records import call_arguments
from popxl.plan import Event

from popxl_engine.analysis.effects import effects_of, instrs_of, is_exchange
from popxl_engine.compiler import compile_unfused
from popxl_engine.ir import Block, Instr, Value, filled
from popxl_engine.planner.phases import MAIN, in_phases

Scalars = dict[Value, np.ndarray]
Action = Callable[[Scalars], None]


def sequence(ir: Ir, replica: int = 0) -> Iterator[Event]:
    """See `popxl.planning.sequence`. Small integer variables have their initial values."""
    block = compile_unfused(ir).block
    scalars: Scalars = {}
    for variable in ir.main_graph.variables:
        value = block.state.get(variable)
        if value is not None and value.host and variable.host_value is not None:
            grouping = variable.replica_grouping
            values = (
                variable.host_value if grouping.num_groups > 1 else variable.host_value[np.newaxis]
            )
            scalars[value] = np.array(values[grouping.assignment[replica]])
    yield from events_of(ir, block, scalars)


def events_of(ir: Ir, block: Block, scalars: Scalars) -> list[Event]:
    """What happens in a run of a program's main block.

    Args:
        scalars: of the block's state, those that are known; others are added.
    """
    walk = Walk({id(instr): phase for phase, instr, _ in in_phases(ir, block)}, _needed(block))
    walk.run(block, scalars)
    return walk.events


class Walk:
    """Goes through blocks.

    Args:
        phases: of the instructions that start one, by their identity.
        needed: the host scalars that it follows.
    """

    def __init__(self, phases: dict[int, str], needed: set[Value]):
        self.events: list[Event] = []
        self._phases, self._phase, self._needed = phases, MAIN, needed
        self._prepared: dict[Block, tuple[Scalars, list[Action]]] = {}

    def run(self, block: Block, scalars: Scalars) -> None:
        """Add what happens in a block; its host scalars are added to those of its inputs."""
        if block not in self._prepared:
            constants = {
                value: np.array(constant.host_value).reshape(constant.shape)
                for constant, value in block.constants.items()
                if value in self._needed
            }
            actions = [action for instr in block.instrs for action in self._actions(instr)]
            self._prepared[block] = constants, actions
        constants, actions = self._prepared[block]
        for value, constant in constants.items():
            scalars[value] = constant.copy()  # some are written
        for action in actions:
            action(scalars)

    def _actions(self, instr: Instr) -> Iterator[Action]:
        """What an instruction does that starts a phase, moves something or makes what is
        needed.
        """
        if id(instr) in self._phases:
            yield self._entering(self._phases[id(instr)])
        made = (*instr.outputs, *instr.written())
        makes = any(value.host and value in self._needed for value in made)
        moves = any(not _is_silent(body) for body in instr.bodies)
        if instr.kind == "copy":
            if makes:
                yield _copying(instr)
        elif instr.kind in ("call", "repeat"):
            if makes or moves:
                yield self._repeating(instr)
        elif instr.kind == "conditional":
            if moves:
                yield self._choosing(instr)
        elif instr.host:
            if makes:
                yield _evaluating(instr)
        elif _moves(instr):
            yield self._moving(instr)

    def _entering(self, phase: str) -> Action:
        def enter(scalars: Scalars) -> None:
            self._phase = phase

        return enter

    def _repeating(self, instr: Instr) -> Action:
        body, inputs = instr.bodies[0], list(instr.arguments["inputs"])
        count = instr.arguments["repeat_count"] if instr.kind == "repeat" else 1
        given = self._needed_of(body.inputs, inputs)
        carried = self._needed_of(body.inputs, body.outputs) if instr.kind == "repeat" else []
        fixed = [pair for pair in given if pair[0] not in dict(carried)]
        taken = self._needed_of(instr.outputs, body.outputs)
        taken = [(to, of) for to, of in taken if to.host]

        def repeat(scalars: Scalars) -> None:
            inner = _passed(given, scalars)
            for i in range(count):
                if i:
                    inner = {**_passed(fixed, scalars), **_passed(carried, inner)}
                self.run(body, inner)
            scalars.update(_passed(taken, inner))

        return repeat

    def _choosing(self, instr: Instr) -> Action:
        condition, events = instr.arguments["cond"], self.events
        branches = [(body, self._needed_of(body.inputs, inputs)) for body, inputs in instr.calls()]

        def run(branch: int, scalars: Scalars) -> list[Event]:
            body, given = branches[branch]
            start = len(events)
            self.run(body, _passed(given, scalars))
            return events[start:]

        def choose(scalars: Scalars) -> None:
            if condition in scalars:
                run(0 if scalars[condition] else 1, scalars)
                return
            then = run(0, scalars)
            del events[len(events) - len(then) :]
            if run(1, scalars) != then:
                raise GraphError(
                    _unknown(
                        instr,
                        "a branch around transfers whose condition is on the device, and the other "
                        "branch has others",
                    )
                )

        return choose

    def _needed_of(self, to: Iterable[Value], of: Iterable[Value]) -> list[tuple[Value, Value]]:
        """Pairs whose first one is needed."""
        return [(t, o) for t, o in zip(to, of) if t in self._needed]

    def _moving(self, instr: Instr) -> Action:
        definition, arguments, events = instr.definition, instr.arguments, self.events
        assert definition is not None
        if "remote" not in definition.effects:
            return lambda scalars: events.append(Event(self._phase, "collective", definition.name))
        row: Any = arguments["offset"]
        kind = "load" if "load" in definition.name else "store"
        name = str(arguments["remote_buffer"].remote_buffer_id)

        def move(scalars: Scalars) -> None:
            if isinstance(row, Value) and row not in scalars:
                raise GraphError(_unknown(instr, "a row whose number is on the device"))
            offset = int(scalars[row].item() if isinstance(row, Value) else row)
            events.append(Event(self._phase, kind, name, offset))

        return move


def _needed(main: Block) -> set[Value]:
    """The values that rows and branches follow from, and what is written: others may share it."""
    sources: defaultdict[Value, list[Value]] = defaultdict(list)
    left: list[Value] = []
    for instr in instrs_of(main):
        for value, source in _follows_from(instr):
            sources[value].append(source)
        if instr.kind == "conditional":
            left.append(instr.arguments["cond"])
        elif "remote" in instr.effects and isinstance(instr.arguments["offset"], Value):
            left.append(instr.arguments["offset"])
        elif instr.host and instr.written():
            left += instr.outputs
    found: set[Value] = set()
    while left:
        value = left.pop()
        if value not in found:
            found.add(value)
            left += sources[value]
    return found


def _follows_from(instr: Instr) -> Iterator[tuple[Value, Value]]:
    """Values that an instruction makes, or gives to what it runs, each with what it follows
    from.
    """
    for body, inputs in instr.calls():
        yield from zip(body.inputs, inputs)
    if instr.kind in ("call", "repeat"):
        body = instr.bodies[0]
        yield from zip(instr.outputs, body.outputs)
        yield from zip(body.inputs, body.outputs)
    elif instr.host or instr.kind == "copy":
        yield from product(instr.outputs, instr.inputs())


def _passed(pairs: list[tuple[Value, Value]], scalars: Scalars) -> Scalars:
    """What is known of the second ones, as the first ones."""
    return {to: scalars[of] for to, of in pairs if of in scalars}


def _is_silent(block: Block) -> bool:
    """Whether a block moves nothing."""
    effects = effects_of(block)
    return not (effects.loaded_buffers or effects.stored_buffers or effects.synchronizes)


def _moves(instr: Instr) -> bool:
    """Whether an instruction without bodies moves a row, or tensors between replicas."""
    definition = instr.definition
    if definition is None:
        return False
    return "remote" in definition.effects or is_exchange(instr) or instr.kind == "begin"


def _copying(instr: Instr) -> Action:
    source, result = instr.arguments["t"], instr.outputs[0]

    def copy(scalars: Scalars) -> None:
        if source in scalars:
            scalar = scalars[source]
            scalars[result] = scalar.copy() if instr.needs_copy else scalar

    return copy


def _evaluating(instr: Instr) -> Action:
    definition, inputs, outputs = instr.definition, instr.inputs(), instr.outputs
    assert definition is not None and definition.host is not None
    host = definition.host
    args, kwargs = call_arguments(definition, instr.arguments)
    target = instr.arguments[definition.writes[0]] if definition.writes else None
    types = [value.spec.dtype.as_numpy() for value in outputs]
    gives_many = definition.result_type in (list, tuple)
    array = np.asarray if definition.alias else np.array

    def evaluate(scalars: Scalars) -> None:
        if any([value not in scalars for value in inputs]):
            if target in scalars:
                raise GraphError(_unknown(instr, "a write of a number that is on the device"))
            return
        known = scalars.__getitem__
        try:
            result = host(
                *[known(a) if isinstance(a, Value) else filled(a, known) for a in args],
                **{name: filled(a, known) for name, a in kwargs.items()},
            )
        except Exception as error:  # a branch that does not run may ask for what is not there
            raise GraphError(
                _unknown(instr, f"a number that cannot be computed ({error})")
            ) from error
        if target is not None:
            scalars[target][...] = result
            scalars[outputs[0]] = scalars[target]
            return
        results = result if gives_many else [result]
        for value, found, data_type in zip(outputs, results, types):
            scalars[value] = array(found, dtype=data_type)

    return evaluate


def _unknown(instr: Instr, what: str) -> str:
    op = instr.source
    assert op is not None
    return (
        f"sequence: got {what}: {op.described}; "
        "expected it to follow from constants and loop counters. Compute it from small integers."
    )

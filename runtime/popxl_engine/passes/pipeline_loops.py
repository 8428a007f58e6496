"""Software pipelining of loops whose iterations begin or end with collectives.

An iteration has three stages: gathers of rows and what they need, all else, and reductions with
what follows from them. A loop of n iterations becomes

    early(0); ...; for k: late(k - 1) | early(k + 1) | middle(k); ...; late(n - 1)

where collectives of the early and the late stage begin before the middle one and end after it. What
a stage makes for a later one is carried. The early stage has all that it depends on, in earlier
iterations too, and the late stage all that depends on it: so nothing comes before what it needs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from popxl.tensor import Constant

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.analysis.effects import draws_noise, is_exchange
from popxl_engine.ir import Block, Instr, Value, filled
from popxl_engine.kernels.collectives import REDUCTIONS
from popxl_engine.passes.dependences import Dependences
from popxl_engine.passes.overlap_collectives import Laps, joined, parts

EARLY, MIDDLE, LATE = -1, 0, 1
"""The stages. An instruction runs so many iterations after the loop's own."""
REACH = 3
"""Iterations that are looked at for what depends on what: those between which the order changes."""


def pipelined(block: Block, is_split: Callable[[Instr], bool]) -> Block:
    """Loops gather from other machines or GPUs what their next iteration needs, and reduce with
    them what the last one has left, while an iteration runs.

    Args:
        is_split: which collectives do.
    """
    constants = dict(block.constants)
    names = {v.name for v in (*block.inputs, *block.state.values(), *constants.values())}
    names.update(v.name for instr in block.instrs for v in instr.outputs)
    instrs: list[Instr] = []
    for instr in block.instrs:
        loop = _loop_of(instr, is_split)
        instrs += [instr] if loop is None else _Pipeline(instr, loop, constants, names).instrs()
    return block.with_instrs(instrs, constants=constants) if instrs != [*block.instrs] else block


@dataclass(frozen=True)
class _Loop:
    """A loop's body with begins and ends, without laps, and the stage of each instruction."""

    body: Block
    instrs: Sequence[Instr]
    stages: Sequence[int]
    outer: Sequence[bool]
    """Whether one of the early and late stages waits for no collective: it precedes the middle."""
    laps: Laps

    @property
    def has_early(self) -> bool:
        """Whether something runs an iteration before the rest."""
        return EARLY in self.stages

    @property
    def has_late(self) -> bool:
        """Whether something runs an iteration after the rest."""
        return LATE in self.stages

    @cached_property
    def stage_of(self) -> Mapping[Value, int]:
        """The stage that makes each value."""
        pairs = zip(self.instrs, self.stages)
        return {value: stage for instr, stage in pairs for value in instr.outputs}

    @cached_property
    def next_of(self) -> Mapping[Value, Value]:
        """What becomes each carried input in the next iteration."""
        return dict(zip(self.body.inputs, self.body.outputs))

    def ordered(self) -> Iterator[tuple[Instr, int]]:
        """The instructions in the order in which an iteration of the new loop runs them, each with
        its stage.
        """
        found = list(zip(self.instrs, self.stages, self.outer))
        for stage in (LATE, EARLY):
            yield from ((i, s) for i, s, is_outer in found if s == stage and is_outer)
        yield from ((i, s) for i, s, _ in found if s == MIDDLE)
        for stage in (LATE, EARLY):
            yield from ((i, s) for i, s, is_outer in found if s == stage and not is_outer)


def _loop_of(instr: Instr, is_split: Callable[[Instr], bool]) -> _Loop | None:
    """A loop with stages; None for what is no such loop."""
    if instr.kind != "repeat" or instr.arguments["repeat_count"] < 2:
        return None
    (body,) = instr.bodies
    carried = len(body.outputs)
    made = {value for each in body.instrs for value in each.outputs}
    if (
        not any(_is_collective(each, is_split) for each in body.instrs)
        or any(index < carried for index in body.by_ref)
        or len(made.intersection(body.outputs)) < carried
    ):
        return None
    laps = Laps()
    instrs = laps.taken(part for each in body.instrs for part in parts(each, is_split))
    stages, outer = _Staging(body, instrs).found()
    if set(stages) == {MIDDLE}:
        return None
    return _Loop(body, instrs, stages, outer, laps)


def _is_collective(instr: Instr, is_split: Callable[[Instr], bool]) -> bool:
    return instr.kind == "begin" or (is_exchange(instr) and is_split(instr))


class _Staging:
    """Finds the stages of a body's instructions, from what depends on what in some iterations."""

    def __init__(self, body: Block, instrs: Sequence[Instr]):
        self._body, self._instrs = body, instrs
        found = Dependences(*_unrolled(body, instrs, REACH))
        self._users, self._sources = found.users, found.sources
        self._makers = {value: i for i, instr in enumerate(instrs) for value in instr.outputs}

    def found(self) -> tuple[list[int], list[bool]]:
        """The stages, and whether an instruction waits for no collective of its stage."""
        early, late = self._early(), self._late()
        late = set() if early & late else late
        stages = [EARLY * (i in early) + LATE * (i in late) for i in range(len(self._instrs))]
        if self._has_sums_between(stages) or not self._crosses_unwritten(stages):
            return [MIDDLE] * len(stages), [False] * len(stages)
        waits = self._waiting(early) | self._waiting(late)
        return stages, [i not in waits for i in range(len(stages))]

    def _early(self) -> set[int]:
        """Gathers of what rows have, with all that they depend on."""
        found: set[int] = set()
        for begin, end in self._collectives():
            if self._gathers_rows(self._instrs[begin]):
                found |= self._stage([begin], [end], self._sources)
        return found

    def _late(self) -> set[int]:
        """Reductions with all that depends on them."""
        found: set[int] = set()
        for begin, end in self._collectives():
            if any(map(self._instrs[begin].is_op, REDUCTIONS)):
                found |= self._stage([end], [begin], self._users)
        return found

    def _collectives(self) -> Iterator[tuple[int, int]]:
        """The begin and the end of each collective."""
        for position, instr in enumerate(self._instrs):
            if instr.kind == "end":
                yield self._makers[instr.arguments["begun"]], position

    def _stage(self, near: list[int], far: list[int], edges: Sequence[set[int]]) -> set[int]:
        """All that is reached from both ends of a collective; nothing where that may not go to
        another iteration, or where one collective is reached from the other, as it would be waited
        for.
        """
        apart, together = self._closure(near, edges), self._closure([*near, *far], edges)
        can_move = self._can_move(apart - {*near}) and self._can_move(together - {*near, *far})
        return together if can_move else set()

    def _gathers_rows(self, begin: Instr) -> bool:
        """Whether a collective brings rows as they were loaded."""
        left = [*begin.inputs()]
        seen: set[Value] = set()
        while left:
            value = left.pop()
            if value.host or value in seen:
                continue
            seen.add(value)
            position = self._makers.get(value)
            if position is None:
                return False
            instr = self._instrs[position]
            if instr.is_op("remote_load"):
                continue
            if instr.kind != "copy" and not _is_view(instr):
                return False
            left += instr.inputs()
        return bool(seen)

    def _closure(self, starts: Iterable[int], edges: Sequence[set[int]]) -> set[int]:
        """Positions in the body of all that is reached, from any iteration."""
        size = len(self._instrs)
        found: set[int] = set()
        left = list(starts)
        while left:
            position = left.pop()
            if position not in found:
                found.add(position)
                left += {
                    reached % size
                    for iteration in range(REACH)
                    for reached in edges[position + iteration * size]
                }
        return found

    def _can_move(self, positions: Iterable[int]) -> bool:
        """Whether instructions may go to another iteration: no other collectives, no loops, and
        nothing whose noise goes by the iteration.
        """
        return not any(
            instr.kind in ("begin", "end")
            or instr.bodies
            or (draws_noise(instr) and instr.rng_path.seed is None and _rounds(instr))
            for instr in (self._instrs[position] for position in positions)
        )

    def _has_sums_between(self, stages: Sequence[int]) -> bool:
        """Whether the middle stage ends collectives of its own: they would wait in the links' queue
        behind those of other iterations.
        """
        pairs = zip(self._instrs, stages)
        return any(instr.kind == "end" and stage == MIDDLE for instr, stage in pairs)

    def _crosses_unwritten(self, stages: Sequence[int]) -> bool:
        """Whether no stage writes what an earlier one has made."""
        aliases = MustAlias(self._body.with_instrs(self._instrs))
        written = [
            (aliases.storage(value), stage)
            for instr, stage in zip(self._instrs, stages)
            for value in instr.may_write()
        ]
        made: dict[Value, int] = {}
        for instr, stage in zip(self._instrs, stages):
            for value in instr.outputs:
                storage = aliases.storage(value)
                made[storage] = min(stage, made.get(storage, stage))
        return all(made.get(storage, stage) == stage for storage, stage in written)

    def _waiting(self, positions: set[int]) -> set[int]:
        """The ends of a stage, and what depends on them in an iteration."""
        size = len(self._instrs)
        found: set[int] = set()
        for position in sorted(positions):
            is_end = self._instrs[position].kind == "end"
            if is_end or not found.isdisjoint(s for s in self._sources[position] if s < size):
                found.add(position)
        return found


def _is_view(instr: Instr) -> bool:
    return instr.definition is not None and bool(instr.definition.alias or instr.definition.views)


def _rounds(instr: Instr) -> bool:
    """Whether the program rounds stochastically at all."""
    assert instr.source is not None
    options = instr.source.graph.ir._pb_ir.getSessionOptions()
    return bool(options.enableStochasticRounding)


def _renamed(instr: Instr, value: Callable[[Value], Value], outputs: Iterable[Value]) -> Instr:
    """An instruction with other operands and results."""
    seed = instr.rng_path.seed
    return replace(
        instr,
        arguments={name: filled(a, value) for name, a in instr.arguments.items()},
        outputs=tuple(outputs),
        rng_path=replace(instr.rng_path, seed=None if seed is None else value(seed)),
    )


def _unrolled(body: Block, instrs: Sequence[Instr], times: int) -> tuple[Block, list[Instr]]:
    """A block with so many iterations of a body, and their instructions."""
    values: dict[Value, Value] = {}
    found: list[Instr] = []
    for iteration in range(times):
        for instr in instrs:
            outputs = [replace(v, name=f"{v.name}_{iteration}") for v in instr.outputs]
            found.append(_renamed(instr, lambda v: values.get(v, v), outputs))
            values.update(zip(instr.outputs, outputs))
        values.update(zip(body.inputs, [values.get(v, v) for v in body.outputs]))
    return body.with_instrs(found), found


class _Pipeline:
    """Writes a loop as iterations before it, a new loop, and iterations after it.

    A turn of these runs each stage for an iteration of its own, and so many iterations before the
    turn's number as the stage says: that is the stage's lag.
    """

    def __init__(
        self, instr: Instr, loop: _Loop, constants: dict[Constant, Value], names: set[str]
    ):
        self._instr, self._loop, self._names = instr, loop, names
        self._count: int = instr.arguments["repeat_count"]
        carried, body = len(instr.outputs), loop.body
        inputs = instr.arguments["inputs"]
        self._around = dict(zip(body.inputs[carried:], inputs[carried:]))
        for constant, value in body.constants.items():
            if constant not in constants:
                constants[constant] = self._new(value)
            self._around[value] = constants[constant]
        self._known = {(v, -1): taken for v, taken in zip(body.outputs, inputs)}
        """The values around the loop, by those of the body and the iteration that makes them."""
        self._results = dict(zip(body.outputs, instr.outputs))

    def instrs(self) -> list[Instr]:
        """The instructions in the loop's place."""
        loop, count = self._loop, self._count
        first, last = int(loop.has_late), count - loop.has_early  # turns of the new loop
        laps = loop.laps.again()
        found: list[Instr] = []
        for turn in range(-loop.has_early, max(first, 0)):
            found += self._turn(turn, laps)
        if first < last:
            found.append(self._new_loop(first, last))
        for turn in range(max(first, last), count + loop.has_late):
            found += self._turn(turn, laps)
        return list(joined(found))

    def _turn(self, turn: int, laps: Laps) -> Iterator[Instr]:
        """What a turn does outside of the new loop: of the iterations that there are."""
        stages = {
            instr: stage for instr, stage in self._loop.ordered() if 0 <= turn - stage < self._count
        }
        for instr in laps.put(stages):
            if instr not in stages:
                yield instr
                continue
            iteration = turn - stages[instr]
            outputs = [self._made(value, iteration) for value in instr.outputs]
            moved = _renamed(instr, partial(self._outside, iteration=iteration), outputs)
            if moved.rng_path.seed is None:
                number = self._instr.arguments["first"] + iteration
                path = self._instr.rng_path.inside(number, *instr.rng_path.numbers)
                moved = replace(moved, rng_path=path)
            self._known.update(((v, iteration), o) for v, o in zip(instr.outputs, outputs))
            yield moved

    def _made(self, value: Value, iteration: int) -> Value:
        """A value of an iteration, around the loop."""
        if iteration == self._count - 1 and value in self._results:
            return self._results[value]
        return self._new(value)

    def _new(self, value: Value) -> Value:
        return replace(value, name=_unused(value.name, self._names))

    def _outside(self, value: Value, iteration: int) -> Value:
        """What an iteration reads, around the loop."""
        if value in self._loop.next_of:
            value, iteration = self._loop.next_of[value], iteration - 1
        return self._around[value] if value in self._around else self._known[value, iteration]

    def _new_loop(self, first: int, last: int) -> Instr:
        """The turns from one to before another as a loop."""
        kernel = _Kernel(self._loop)
        arguments = self._instr.arguments
        given = [self._known[value, first - lag] for value, lag in kernel.carried]
        outputs = [self._made(value, last - lag) for value, lag in kernel.carried]
        self._known.update(((v, last - lag), o) for (v, lag), o in zip(kernel.carried, outputs))
        return replace(
            self._instr,
            arguments={
                **arguments,
                "repeat_count": last - first,
                "first": arguments["first"] + first,
                "inputs": (*given, *arguments["inputs"][len(self._instr.outputs) :]),
            },
            outputs=tuple(outputs),
            bodies=(kernel.block(),),
        )


class _Kernel:
    """Writes the body of a new loop. It carries values of the old one, each with its lag: how many
    iterations before a turn's number it was made.
    """

    def __init__(self, loop: _Loop):
        self._loop = loop
        self._names = {v.name for v in loop.body.inputs}
        self._names.update(v.name for v in loop.body.constants.values())
        self._names.update(v.name for v in loop.stage_of)
        self.carried: dict[tuple[Value, int], Value] = {}
        """The inputs."""
        laps, stages = loop.laps.again(), dict(loop.ordered())
        self._instrs = [
            instr
            if instr not in stages
            else _renamed(instr, partial(self._read, lag=stages[instr]), instr.outputs)
            for instr in laps.put(stages)
        ]
        for value in loop.body.outputs:  # all that the old loop carries, read or not
            self._carry(value, loop.stage_of[value] + 1)
        self._outputs = self._carried_on()

    def block(self) -> Block:
        """The body."""
        body = self._loop.body
        before = len(body.outputs)
        return body.with_instrs(
            joined(self._instrs),
            inputs=(*self.carried.values(), *body.inputs[before:]),
            by_ref=frozenset(len(self.carried) + i - before for i in body.by_ref),
            outputs=tuple(self._outputs),
        )

    def _read(self, value: Value, lag: int) -> Value:
        """What a stage of some lag reads."""
        if value in self._loop.next_of:
            value, lag = self._loop.next_of[value], lag + 1
        is_made = self._loop.stage_of.get(value, lag) == lag
        return value if is_made else self._carry(value, lag)

    def _carry(self, value: Value, lag: int) -> Value:
        """An input for what was made so long ago, from what was made later."""
        assert lag > self._loop.stage_of[value], "a stage reads what an earlier one makes"
        for each in range(self._loop.stage_of[value] + 1, lag + 1):
            if (value, each) not in self.carried:
                name = _unused(value.name, self._names)
                self.carried[value, each] = replace(value, name=name)
        return self.carried[value, lag]

    def _carried_on(self) -> list[Value]:
        """What each input becomes: what is made, or a copy of another input, so that no two are one
        tensor.
        """
        found: list[Value] = []
        for value, lag in self.carried:
            if lag - 1 == self._loop.stage_of[value]:
                found.append(value)
                continue
            source = self.carried[value, lag - 1]
            copied = replace(value, name=_unused(value.name, self._names))
            self._instrs.append(Instr("copy", {"t": source}, (copied,), host=value.host))
            found.append(copied)
        return found


def _unused(name: str, names: set[str]) -> str:
    """A name after another one that is not there yet. It is added."""
    number = 1
    while f"{name}_i{number}" in names:
        number += 1
    names.add(f"{name}_i{number}")
    return f"{name}_i{number}"

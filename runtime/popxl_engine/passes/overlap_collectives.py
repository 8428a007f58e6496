"""Collectives as a begin and an end, with what does not need their results in between.

A begin goes up to where its operands are there, an end down to where nothing else can go on. What
is written while messages are under way is nothing that they are of: an end reads the operands, too.
The order follows from the program alone, so that it is the same in every process.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby
from typing import Any

from popdist import getNumInstances
from popdist.exchange import machines
from popxl.replica_grouping import ReplicaGrouping

from popxl_engine.analysis.effects import is_exchange
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.passes.dependences import Dependences

SOONER = 2
"""How many places sooner an end comes for each collective that follows from it. Planned steps of
gpt3_2.7B_pod64 are the shortest with it.
"""


def overlapped(block: Block, is_split: Callable[[Instr], bool]) -> Block:
    """Collectives between machines or GPUs begin early and end late, and other instructions run in
    between.

    Args:
        is_split: which collectives do.
    """
    if not any(is_exchange(instr) and is_split(instr) for instr in block.instrs):
        return block
    instrs: list[Instr] = []
    laps = Laps()
    for _, region in groupby(block.instrs, _region_of(block)):
        split = [part for instr in region for part in parts(instr, is_split)]
        instrs += joined(laps.put(_Schedule(block, laps.taken(split)).order()))
    return block.with_instrs(instrs)


class Laps:
    """Laps of the clock, which are no instructions to be ordered: each of these stays in its lap,
    and a lap begins again where that of the next one is another.
    """

    def __init__(self) -> None:
        self._last: Instr | None = None
        self._begun: Instr | None = None
        self._of: dict[Instr, Instr | None] = {}

    def taken(self, instrs: Iterable[Instr]) -> list[Instr]:
        """The instructions without laps."""
        found = []
        for instr in instrs:
            if "clock" in instr.effects:
                self._last = instr
            else:
                self._of[instr] = self._last
                found.append(instr)
        return found

    def again(self) -> "Laps":
        """The same laps for another place, where none has begun."""
        found = Laps()
        found._of = self._of
        return found

    def put(self, instrs: Iterable[Instr]) -> Iterator[Instr]:
        """Instructions that were taken, in their order, with laps between them."""
        for instr in instrs:
            lap, is_free = self._of[instr], instr.host or instr.kind == "copy"
            if lap is not None and lap is not self._begun and not is_free:
                yield replace(lap)
                self._begun = lap
            yield instr


def leaves_process(instr: Instr) -> bool:
    """Whether a group of a collective has members in several processes: between GPUs messages
    travel while they compute.
    """
    return _is_spread(instr, lambda: range(getNumInstances()))


def leaves_machine(instr: Instr) -> bool:
    """Whether a group of a collective has members on several machines. Between processes of one
    machine its processors move messages, and gain nothing by doing so in between.
    """
    return _is_spread(instr, machines)


def _is_spread(instr: Instr, find_places: Callable[[], Sequence[Any]]) -> bool:
    """Whether a group of a collective has members at several places, which instances have.

    Those of a program that is this process's alone have not, and nobody else is asked.
    """
    assert instr.source is not None
    ir = instr.source.graph.ir
    local = ir.instance_replication_factor
    if local == ir.replication_factor:
        return False
    places = find_places()
    group: ReplicaGrouping | None = instr.arguments.get("group")
    grouping = ir.replica_grouping() if group is None else group
    return any(len({places[m // local] for m in members}) > 1 for members in grouping.groups)


def _region_of(block: Block) -> Callable[[Instr], str]:
    """What keeps its place: a block around loops runs each graph that it calls by itself, so that
    rows come no sooner.
    """
    if not any(instr.kind == "repeat" for instr in block.instrs):
        return lambda instr: ""
    around = "" if block.name == "main" else block.name
    return lambda instr: instr.path.removeprefix(around).partition("/")[2].partition("/")[0]


def parts(instr: Instr, is_split: Callable[[Instr], bool]) -> Iterator[Instr]:
    """An instruction, or the begin and the end of a collective."""
    if not is_exchange(instr) or instr.written() or not is_split(instr):
        yield instr
        return
    result = instr.outputs[0]
    begun = Value(f"{result.name}_begun", result.spec)
    yield replace(instr, kind="begin", outputs=(begun,))
    yield replace(instr, kind="end", arguments={**instr.arguments, "begun": begun})


def joined(instrs: Iterable[Instr]) -> Iterator[Instr]:
    """Instructions with a begin and its end as one where nothing but copies is in between."""
    held: list[Instr] = []
    for instr in instrs:
        if held and instr.kind == "end" and instr.arguments["begun"] in held[0].outputs:
            begin, *between = held
            arguments = {n: a for n, a in instr.arguments.items() if n != "begun"}
            yield from between
            yield replace(instr, kind="op", arguments=arguments)
            held = []
        elif instr.kind == "begin":
            yield from held
            held = [instr]
        elif held and (instr.host or instr.kind == "copy"):
            held.append(instr)
        else:
            yield from (*held, instr)
            held = []
    yield from held


class _Schedule:
    """An order of some instructions of a block in which no end waits for what could run before
    it.
    """

    def __init__(self, block: Block, instrs: list[Instr]):
        self._instrs = instrs
        self._users = Dependences(block, instrs).users
        self._waits = [0] * len(instrs)
        for users in self._users:
            for user in users:
                self._waits[user] += 1

    def order(self) -> list[Instr]:
        """Begins first, ends last, and else as they were. Of several ends that which began first
        comes first, and sooner the more collectives still follow from it.
        """
        ready: list[tuple[int, int, int]] = []
        begun: dict[Value, int] = {}
        found: list[Instr] = []
        following = self._following()

        def add(position: int) -> None:
            instr = self._instrs[position]
            turn = _TURN.get(instr.kind, 1)
            order = position
            if instr.kind == "end":
                order = begun[instr.arguments["begun"]] - SOONER * following[position]
            heappush(ready, (turn, order, position))

        for position, count in enumerate(self._waits):
            if not count:
                add(position)
        while ready:
            _, _, position = heappop(ready)
            instr = self._instrs[position]
            if instr.kind == "begin":
                begun[instr.outputs[0]] = len(begun)
            found.append(instr)
            for user in sorted(self._users[position]):
                self._waits[user] -= 1
                if not self._waits[user]:
                    add(user)
        assert len(found) == len(self._instrs), "instructions depend on earlier ones alone"
        return found

    def _following(self) -> list[int]:
        """How many collectives follow from each instruction, one from the other."""
        found = [0] * len(self._instrs)
        for position in reversed(range(len(self._instrs))):
            after = max((found[user] for user in self._users[position]), default=0)
            found[position] = after + (self._instrs[position].kind == "begin")
        return found


_TURN = {"begin": 0, "end": 2}
"""Which of the instructions that can run is next, by kind; 1 where none is named."""

"""The generated program with marks: numbers that each say what has just ended, with the time.

Marks stand between the lines that every program has. A program that is not profiled has none, and no room for them.
"""

from array import array
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Iterator, List, Literal, Union

from popxl_engine.codegen import BlockWriter, Generator, meets
from popxl_engine.lowering import Block, Instr
from popxl_engine.planner.phases import MAIN

Kind = Literal["done", "opened", "arrived"]
"""An instruction has ended; a loop begins; a replica waits for others."""


@dataclass(frozen=True, eq=False)
class Mark:
    """A place of the program where the time is noted. Its number is its place in `MarkedGenerator.marks`."""

    kind: Kind
    instr: Instr
    block: Block


class MarkedGenerator(Generator):
    """Writes a program whose run fills ``log`` with numbers and times (in ns) in turn, and ``rows`` with remote rows.

    Negative numbers say which replica goes on, see `replica_of`.
    """

    def __init__(self, device: str = "cpu", rounds: bool = False):
        super().__init__(device, rounds)
        self.marks: List[Mark] = []
        self.log, self.rows = array("q"), array("q")
        self.note = self.source.bind("note", self.log.append)
        self.note_row = self.source.bind("row", self.rows.append)
        self.now = self.source.bind("now", perf_counter_ns)

    def write(self, block: Block, name: str) -> None:
        """See `Generator`."""
        MarkingWriter(self, block, name).write()

    def stamp(self, number: Union[int, str]) -> str:
        """Source that notes a number and the time."""
        return f"{self.note}({number}); {self.note}({self.now}())"

    def mark(self, kind: Kind, instr: Instr, block: Block) -> str:
        """Source of a mark."""
        self.marks.append(Mark(kind, instr, block))
        return self.stamp(len(self.marks) - 1)


BEGINS, GOES_ON = "-2 * r.index - 1", "-2 * r.index - 2"
"""The numbers of a replica that starts, and of one whose collective is complete."""


def replica_of(number: int) -> "tuple[int, bool]":
    """The replica of a negative number, and whether it goes on."""
    replica, goes_on = divmod(-number - 1, 2)
    return replica, bool(goes_on)


class MarkingWriter(BlockWriter):
    """Writes a block's function with a mark after each instruction that does something."""

    def __init__(self, generator: MarkedGenerator, block: Block, name: str):
        super().__init__(generator, block, name)
        self.marked = generator

    def _instr(self, instr: Instr) -> Iterator[str]:
        mark = self.marked.mark
        if self.block.name == MAIN and instr is self.block.instrs[0]:
            yield self.marked.stamp(BEGINS)
        if instr.kind == "repeat":
            yield mark("opened", instr, self.block)
        if "remote" in instr.effects:
            yield f"{self.marked.note_row}(int({self._argument(instr.arguments['offset'], True)}))"
        if meets(instr):
            yield mark("arrived", instr, self.block)
            yield from super()._instr(instr)
            yield self.marked.stamp(GOES_ON)
        else:
            yield from super()._instr(instr)
            if not is_free(instr):
                yield mark("done", instr, self.block)


def is_free(instr: Instr) -> bool:
    """Whether an instruction only counts, or gives a value another name: its time goes to what follows."""
    return instr.host or (instr.kind == "copy" and not instr.own)

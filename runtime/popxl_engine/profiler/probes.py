"""The generated program with probes: entries that each say what has just ended, with the time.

Probes stand between the lines that every program has. A program that is not profiled has none, and
no room for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from popxl_engine.analysis.effects import synchronizes
from popxl_engine.codegen import BlockWriter, PhaseMarks, SourceGenerator
from popxl_engine.ir import Block, Instr
from popxl_engine.planner.phases import MAIN
from popxl_engine.profiler.clock import clock_of

Kind = Literal["done", "opened"]
"""An instruction has ended; a loop, or a call, begins."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A site of the program where the time is noted. Its number is its position in
    `ProbedGenerator.probes`.
    """

    kind: Kind
    instr: Instr
    block: Block


class ProbedGenerator(SourceGenerator):
    """Writes a program whose run fills ``log`` with entries and moments of ``clock`` in turn, and
    ``rows`` with rows.

    An entry is a probe's index. Where a replica begins, or goes on after a collective, it is
    negative and tells which replica that is, see `unpacked`.

    Args:
        replicas: over all processes.
    """

    def __init__(
        self,
        replicas: int,
        device: torch.device,
        stochastic_rounding: bool = False,
        marks: PhaseMarks | None = None,
    ):
        super().__init__(device, stochastic_rounding, marks=marks)
        self.replicas = replicas
        self.probes: list[Probe] = []
        self.log: list[int] = []
        self.rows: list[int] = []
        self._log, self._rows = (
            self.source.bind("log", self.log),
            self.source.bind("rows", self.rows),
        )
        self.clock = clock_of(device)
        self._now = self.source.bind("now", self.clock.now)

    def write(self, block: Block, name: str) -> None:
        """See `SourceGenerator`."""
        ProbedWriter(self, block, name).write()

    def _stamp(self, entry: str) -> str:
        return f"{self._log}.append({entry}); {self._log}.append({self._now}())"

    def begin(self) -> str:
        """Source of the probe at which a replica begins."""
        return self._stamp("-1 - r.index")

    def probe(self, kind: Kind, instr: Instr, block: Block) -> str:
        """Source of a probe."""
        self.probes.append(Probe(kind, instr, block))
        index = len(self.probes) - 1
        return self._stamp(
            f"{-1 - len(self.probes) * self.replicas} - r.index"
            if synchronizes(instr)
            else str(index)
        )

    def row(self, offset: str) -> str:
        """Source that notes a row."""
        return f"{self._rows}.append(int({offset}))"

    def unpacked(self, entry: int) -> tuple[int, int | None]:
        """The replica of a negative entry, and the collective's probe; None where the
        replica begins.
        """
        count, replica = divmod(-1 - entry, self.replicas)
        return replica, count - 1 if count else None


class ProbedWriter(BlockWriter):
    """Writes a block's function with a probe after each instruction that does something."""

    def __init__(self, generator: ProbedGenerator, block: Block, name: str):
        super().__init__(generator, block, name)
        self.probed = generator

    def _instr(self, instr: Instr) -> Iterator[str]:
        if self.block.name == MAIN and instr is self.block.instrs[0]:
            yield self.probed.begin()
        if instr.kind in ("call", "repeat"):
            yield self.probed.probe("opened", instr, self.block)
        if "remote" in instr.effects:
            yield self.probed.row(self._row(instr))
        yield from super()._instr(instr)
        if not is_free(instr):
            yield self.probed.probe("done", instr, self.block)


def is_free(instr: Instr) -> bool:
    """Whether an instruction only counts, begins a lap, or gives a value another name: its time
    goes to what follows.
    """
    return instr.host or "clock" in instr.effects or (instr.kind == "copy" and not instr.needs_copy)

"""The generated program with a check of every result: where a run first makes a number that is not
finite.

It is the result of an op with finite operands, or a row that was loaded. Constants may be infinite,
as masks are, and what follows from them. Operands are looked at before the op, which may write to
them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from popxl.graph import called_first
from popxl.ir import Ir
from popxl.not_finite import NotFinite

from popxl_engine.codegen import BlockWriter, SourceGenerator
from popxl_engine.ir import Block, Instr
from popxl_engine.planner.phases import calls_of
from popxl_engine.profiler.probes import Probe
from popxl_engine.profiler.sites import Sites
from popxl_engine.program import Program

Find = tuple[int, int, str, dict[Block, int], Counter[int]]
"""Operations before, index of the watched instruction, what is in its result, iterations of loops,
and how often each instruction was done before.
"""


class Watch:
    """What watched programs call while they run, for each replica by itself."""

    def __init__(self) -> None:
        self.first: dict[int, Find] = {}
        self._counts: dict[int, int] = {}
        self.iterations: dict[int, dict[Block, int]] = {}
        self.done: dict[int, Counter[int]] = {}
        """How often each replica did each watched instruction."""

    def loop(self, replica: int, body: Block, first: int) -> None:
        """A loop begins."""
        self.iterations.setdefault(replica, {})[body] = first - 1

    def iteration(self, replica: int, body: Block) -> None:
        """A loop's body begins."""
        iterations = self.iterations.setdefault(replica, {})
        iterations[body] = iterations.get(body, -1) + 1

    def are_finite(self, replica: int, operands: Sequence[Any]) -> bool:
        """Whether operands are; false where something was found, so that nothing more is looked
        at.
        """
        return replica not in self.first and not any(kind_of(t) for t in operands)

    def look(self, replica: int, index: int, were_finite: bool, results: Sequence[Any]) -> None:
        """Look at an instruction's results."""
        count = self._counts[replica] = self._counts.get(replica, 0) + 1
        done = self.done.setdefault(replica, Counter())
        if were_finite and (kind := next(filter(None, map(kind_of, results)), "")):
            iterations = dict(self.iterations.get(replica, {}))
            self.first[replica] = count, index, kind, iterations, done.copy()
        done[index] += 1


def kind_of(t: Any) -> str:
    """What is not finite in a tensor: nan, inf or -inf; nothing where all is."""
    if (
        not isinstance(t, torch.Tensor)
        or not t.is_floating_point()
        or bool(torch.isfinite(t).all())
    ):
        return ""
    return (
        "nan" if bool(torch.isnan(t).any()) else "inf" if bool((t == torch.inf).any()) else "-inf"
    )


class WatchingGenerator(SourceGenerator):
    """Writes a program that shows its results to a `Watch`."""

    def __init__(self, device: torch.device, stochastic_rounding: bool):
        super().__init__(device, stochastic_rounding)
        self.watch = Watch()
        self.watched: list[tuple[Instr, Block]] = []

    def write(self, block: Block, name: str) -> None:
        """See `SourceGenerator`."""
        WatchingWriter(self, block, name).write()


class WatchingWriter(BlockWriter):
    """Writes a block's function with a look before and after each instruction."""

    def __init__(self, generator: WatchingGenerator, block: Block, name: str):
        super().__init__(generator, block, name)
        self.watching = generator
        self.watch = self.source.bind("watch", generator.watch)

    def _instr(self, instr: Instr) -> Iterator[str]:
        if instr is self.block.instrs[0]:
            yield f"{self.watch}.iteration(r.index, {self.source.bind('body', self.block)})"
        if instr.kind == "repeat":
            body = self.source.bind("body", instr.bodies[0])
            yield f"{self.watch}.loop(r.index, {body}, {instr.arguments['first']})"
        if instr.kind != "op" or instr.host or not instr.outputs:
            yield from super()._instr(instr)
            return
        index = len(self.watching.watched)
        self.watching.watched.append((instr, self.block))
        yield (f"were_finite = {self.watch}.are_finite(r.index, ({self._names(instr.inputs())}))")
        if not instr.inputs() or "remote" in instr.effects:
            is_load = "remote" in instr.effects
            yield f"were_finite = {is_load} and r.index not in {self.watch}.first"
        yield from super()._instr(instr)
        yield (f"{self.watch}.look(r.index, {index}, were_finite, ({self._names(instr.outputs)}))")

    def _names(self, values: Any) -> str:
        return "".join(f"{self.python[v]}, " for v in values)


class Watcher:
    """A program that is watched, to run in place of one that is not."""

    def __init__(self, ir: Ir, program: Program):
        self._generator = WatchingGenerator(program.device, program.stochastic_rounding)
        self._ir = ir
        self.program = program.written_by(self._generator)
        self.watch = self._generator.watch

    def not_finite(self) -> list[NotFinite]:
        """What the last run met first on each replica, in the order in which they met it."""
        sites = Sites(self._ir, self.program.block)
        result = []
        for replica, (order, index, kind, iterations, before) in self.watch.first.items():
            instr, block = self._generator.watched[index]
            site = sites.of(Probe("done", instr, block))
            bodies = [frame for frame in site.frames if isinstance(frame, Block)]
            loops = tuple(
                (body.name.rsplit("/", 1)[-1], iterations.get(body, 0)) for body in bodies
            )
            assert instr.source is not None, "only copies have none"
            # code that several calls share has its phase in the names of its graphs
            phase = next((part for part in site.graph.split("/") if part in sites.runs), site.phase)
            found = NotFinite(
                order=order,
                replica=replica,
                phase=phase,
                phase_runs=self._phase_runs(phase, instr, replica, before),
                graph=site.graph,
                loops=loops,
                tensor=instr.source.outputs[0].name,
                value=kind,
                op=site.name,
                where=site.op,
            )
            result.append(found)
        return sorted(result, key=lambda found: (found.order, found.replica))

    def _phase_runs(
        self, phase: str, instr: Instr, replica: int, before: Counter[int]
    ) -> int | None:
        """How often runs had gone through a phase when a replica came to an instruction, which it
        does equally often in each of the phase's graphs that have it.

        Args:
            before: how often each watched instruction was done.
        """
        source, runs = instr.source, self.watch.iterations[replica][self.program.block] + 1
        assert source is not None, "only copies have none"
        graphs = [g for g, times in calls_of(self._ir, phase) for _ in range(times)] * runs
        having = {graph for graph in {*graphs} if source.graph in called_first(graph)}
        numbers = [number for number, graph in enumerate(graphs) if graph in having]
        same = [
            index
            for index, (other, _) in enumerate(self._generator.watched)
            if other.source is source and phase in other.path.split("/")
        ]
        earlier, total = (
            sum(done[index] for index in same) for done in (before, self.watch.done[replica])
        )
        if not numbers or total % len(numbers):
            return None
        return numbers[earlier * len(numbers) // total]

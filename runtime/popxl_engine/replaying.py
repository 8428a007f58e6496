"""The generated program with phases that run twice: whether they come to the same bytes.

A phase that is wanted runs as ever, while what it finds is kept: its inputs, its position in
streams and in random draws, and of each row that it loads the tensor, or a copy where the phase
stores to that row's buffer. Then it runs again, on a replica of its own whose rows are those, and
what both have left is compared, bit for bit. Collectives run again, so that all replicas want
the same phases.
"""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from popxl.ir import Ir
from popxl.phase_difference import PhaseDifference
from popxl.remote_buffer import RemoteBuffer

from popxl_engine.analysis.effects import effects_of, instrs_of
from popxl_engine.codegen import BlockWriter, SourceGenerator
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.machine.memory import Rows
from popxl_engine.machine.paging import PagedBuffer
from popxl_engine.machine.replica import Replica
from popxl_engine.planner.phases import MAIN, in_phases
from popxl_engine.program import Program

Piece = Instr | tuple[str, list[Instr]]
"""An instruction between phases, or a phase that is not repeated, with its instructions."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integers by their bytes."""


@dataclass(frozen=True)
class PhaseSite:
    """A point of the program from which a phase runs."""

    phase: str
    block: Block
    is_iteration: bool
    """Whether the block is a loop's body, of which each iteration is the phase once more."""


class RecordedRows:
    """Rows of one buffer while a phase uses them, with what it found there.

    Args:
        rows: those that there are.
        are_stored: whether the phase stores to the buffer.
    """

    def __init__(self, rows: Rows | PagedBuffer, are_stored: bool):
        self.rows, self.row_bytes, self.shape = rows, rows.row_bytes, rows.shape
        self._moves = isinstance(rows, PagedBuffer)
        self._copies = are_stored or self._moves
        self.loaded: dict[int, torch.Tensor] = {}
        """Rows as they were loaded first; on the host where rows come and go."""
        self.stored: set[int] = set()
        """Rows that were stored to, and that are not over."""
        self._left: dict[int, torch.Tensor] = {}

    def load(self, index: int) -> torch.Tensor:
        """See `Rows`."""
        row = self.rows.load(index)
        if index not in self.loaded and index not in self.stored:
            kept = row.detach()
            self.loaded[index] = kept.to("cpu", copy=True) if self._copies else kept
        return row

    def store(self, index: int, t: torch.Tensor) -> None:
        """See `Rows`."""
        self.donate(index, [t])

    def donate(self, index: int, held: list[torch.Tensor]) -> None:
        """See `Rows`."""
        if self._moves:  # it may be gone when the phase ends
            self._left[index] = held[0].detach().to("cpu", copy=True)
        self.rows.donate(index, held)
        self.stored.add(index)

    def release(self, index: int) -> None:
        """See `Rows`."""
        assert isinstance(self.rows, Rows)
        self.rows.release(index)
        self.stored.discard(index)

    def left(self, index: int) -> torch.Tensor:
        """What the phase has left in a row."""
        return self._left[index] if self._moves else self.rows.load(index)


class ReplayedRows(Rows):
    """Rows of one buffer for a phase that runs again."""

    def __init__(self, recorded: RecordedRows, device: torch.device):
        rows = recorded.rows
        super().__init__(rows.shape, rows.dtype, rows.entries, device)
        self._rows.update({index: t.to(device) for index, t in recorded.loaded.items()})
        self.stored: set[int] = set()

    def donate(self, index: int, held: list[torch.Tensor]) -> None:
        """See `Rows`."""
        super().donate(index, held)
        self.stored.add(index)


class RecordedPhase:
    """What one replica's phase finds, does and leaves."""

    def __init__(self, replica: Replica, site: PhaseSite, args: Sequence[Any]):
        self._replica, self._site = replica, site
        self._rows, stores = replica.rows, effects_of(site.block).stored_buffers
        self.rows = {b: RecordedRows(rows, b in stores) for b, rows in self._rows.items()}
        self._args, self._args_again = args, [own_copy(a) for a in args]
        self._rng_path, self._streams = replica.rng_path, dict(replica._position)
        replica.rows = cast(Any, self.rows)  # which answers as they do

    def end(self) -> None:
        """The phase has run, or failed."""
        self._replica.rows = self._rows

    def replay(self, device: torch.device) -> "Replay":
        """A replica for the second time, and the phase's inputs."""
        rows = {b: ReplayedRows(recorded, device) for b, recorded in self.rows.items()}
        other = Replica(self._replica.index, rows)
        other.state = self._replica.state
        outputs = {stream: t.clone() for stream, t in self._replica._outputs.items()}
        other.begin(self._replica._inputs, outputs, self._rng_path)
        other._position = self._streams
        return Replay(other, rows, outputs, self._args_again)

    def differences(
        self, results: Sequence[Any], replay: "Replay", results_again: Sequence[Any]
    ) -> Iterator[tuple[str, tuple[RemoteBuffer, int] | None]]:
        """What is not the same: names, and rows."""
        for buffer, recorded in self.rows.items():
            other = replay.rows[buffer]
            for index in sorted(recorded.stored):
                is_left = index in other.stored
                if not (is_left and same(recorded.left(index), other.load(index))):
                    yield "", (buffer, index)
        for stream, t in self._replica._outputs.items():
            if not same(t, replay.outputs[stream]):
                yield stream.tensor_id, None
        block = self._site.block
        for values, first, second in (
            (block.outputs, results, results_again),
            (block.inputs, self._args, replay.args),
        ):
            for value, a, b in zip(values, first, second):
                if not same(a, b):
                    yield value.name, None


@dataclass
class Replay:
    """What a phase runs on for the second time."""

    replica: Replica
    rows: Mapping[RemoteBuffer, ReplayedRows]
    outputs: Mapping[Any, torch.Tensor]
    args: Sequence[Any]


def own_copy(value: Any) -> Any:
    """An input in memory of its own."""
    return value.clone() if isinstance(value, torch.Tensor) else np.array(value)


def same(a: Any, b: Any) -> bool:
    """Whether two tensors, or two arrays of the host, have the same bytes."""
    if not isinstance(a, torch.Tensor):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if a is b or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return torch.equal(in_words(a), in_words(b))


def in_words(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers, as long as they can be: these are compared fast."""
    flat = t.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel() == 1:  # its stride may be any
        flat = flat.clone(memory_format=torch.contiguous_format)
    length = next(n for n in (8, 4, 2, 1) if flat.nbytes % n == 0)
    return flat.view(torch.uint8).view(WORDS[length])


class Replays:
    """What programs with phases that may run twice call while they run, for each replica by
    itself.
    """

    def __init__(self, device: torch.device):
        self.wanted: Set[int] = frozenset()
        """Numbers of phases of a run."""
        self.sites: list[PhaseSite] = []
        self.differences: list[
            tuple[int, PhaseSite, int, str, tuple[RemoteBuffer, int] | None]
        ] = []
        """Replica, site, iteration, name, row."""
        self._device = device
        self._count: dict[int, int] = {}
        self._iterations: dict[tuple[int, int], int] = {}

    def begin(self, wanted: Set[int]) -> None:
        """A run begins, of which these phases are to run twice."""
        self.wanted = wanted
        self._count.clear()
        self._iterations.clear()

    def loop(self, replica: int, index: int, first: int) -> None:
        """A loop begins that repeats a site's phase."""
        self._iterations[replica, index] = first

    def run(self, r: Replica, index: int, body: Any, *args: Any) -> Any:
        """A phase from a site, maybe twice."""
        if not self._is_wanted(r.index, index):
            return body(r, *args)
        recorded = RecordedPhase(r, self.sites[index], args)
        try:
            results = body(r, *args)
        finally:
            recorded.end()
        again = recorded.replay(self._device)
        self._compare(r.index, index, recorded, results, again, body(again.replica, *again.args))
        return results

    def run_together(
        self, r: Replica, index: int, body: Any, *args: Any
    ) -> Generator[Any, Any, Any]:
        """The same, of one that waits for other replicas."""
        if not self._is_wanted(r.index, index):
            return (yield from body(r, *args))
        recorded = RecordedPhase(r, self.sites[index], args)
        try:
            results = yield from body(r, *args)
        finally:
            recorded.end()
        again = recorded.replay(self._device)
        results_again = yield from body(again.replica, *again.args)
        self._compare(r.index, index, recorded, results, again, results_again)
        return results

    def _is_wanted(self, replica: int, index: int) -> bool:
        count = self._count.get(replica, 0)
        self._count[replica] = count + 1
        if (replica, index) in self._iterations:
            self._iterations[replica, index] += 1
        return count in self.wanted

    def _compare(
        self,
        replica: int,
        index: int,
        recorded: RecordedPhase,
        results: Sequence[Any],
        again: Replay,
        results_again: Sequence[Any],
    ) -> None:
        done = self._iterations.get((replica, index), 1) - 1
        for name, row in recorded.differences(results, again, results_again):
            self.differences.append((replica, self.sites[index], done, name, row))


class ReplayingGenerator(SourceGenerator):
    """Writes a program whose phases run by way of `Replays`."""

    def __init__(self, device: torch.device, stochastic_rounding: bool):
        super().__init__(device, stochastic_rounding)
        self.replays = Replays(device)
        self.indices: dict[Block, int] = {}
        """Indices of sites, by what they run."""

    def add(self, site: PhaseSite) -> None:
        """Note a site."""
        self.indices[site.block] = len(self.replays.sites)
        self.replays.sites.append(site)

    def write(self, block: Block, name: str) -> None:
        """See `SourceGenerator`."""
        ReplayingWriter(self, block, name).write()


class ReplayingWriter(BlockWriter):
    """Writes a block's function with other calls of phases."""

    def __init__(self, generator: ReplayingGenerator, block: Block, name: str):
        super().__init__(generator, block, name)
        self.replaying = generator

    def _repeat(self, instr: Instr) -> Iterator[str]:
        index = self.replaying.indices.get(instr.bodies[0])
        if index is not None:
            loop = self.source.bind("loop", self.replaying.replays.loop)
            yield f"{loop}(r.index, {index}, {instr.arguments['first']})"
        yield from super()._repeat(instr)

    def _call_block(self, body: Block, inputs: str) -> str:
        index = self.replaying.indices.get(body)
        if index is None:
            return super()._call_block(body, inputs)
        synchronizes, replays = effects_of(body).synchronizes, self.replaying.replays
        run = self.source.bind(
            "run_together" if synchronizes else "run_phase",
            replays.run_together if synchronizes else replays.run,
        )
        call = f"{run}(r, {index}, {self.generator.function(body)}{inputs})"
        return f"(yield from {call})" if synchronizes else call


class Replayer:
    """A program whose phases can run twice, to run in place of one whose phases do not."""

    def __init__(self, ir: Ir, program: Program):
        self._ir = ir
        self._generator = ReplayingGenerator(program.device, program.stochastic_rounding)
        self.replays = self._generator.replays
        block = self._with_phases_as_blocks(program.block)
        self.program = program.written_by(self._generator, block)
        self.phases = self._phases_of(block)
        """Phases that a run runs, over all its steps."""

    @contextmanager
    def run(self, numbers: Collection[int]) -> Iterator[None]:
        """A block around a run of the program, of which these phases run twice; they are counted
        round and round.
        """
        self.replays.begin(frozenset(n % self.phases for n in numbers if self.phases))
        yield

    def differences(self) -> list[PhaseDifference]:
        """What the runs since the last time have found."""
        found, self.replays.differences = self.replays.differences, []
        stored = self._stored_names() if found else {}
        return [
            PhaseDifference(
                replica,
                site.phase,
                ((site.phase, done),) if site.is_iteration else (),
                name if row is None else stored.get(row[0], "a row"),
                row,
            )
            for replica, site, done, name, row in found
        ]

    def _stored_names(self) -> dict[RemoteBuffer, str]:
        """What the program calls a tensor that it stores in each buffer."""
        return {
            instr.arguments["remote_buffer"]: instr.source.inputs[-1].name
            for instr in instrs_of(self.program.block)
            if instr.is_op("remote_store") and instr.source is not None
        }

    def _phases_of(self, block: Block) -> int:
        """How many phases one run of a block runs."""
        indices, total = self._generator.indices, 0
        for instr in block.instrs:
            iterations = instr.arguments["repeat_count"] if instr.kind == "repeat" else 1
            for body in instr.bodies:
                total += iterations * (1 if body in indices else self._phases_of(body))
        return total

    def _with_phases_as_blocks(self, main: Block) -> Block:
        """The program with a block for each phase: what is called once is no more inline."""
        phases = {id(instr): phase for phase, instr, _ in in_phases(self._ir, main)}

        def rewritten(block: Block) -> Block:
            instrs: list[Instr] = []
            for piece in pieces(block, phases):
                if isinstance(piece, tuple):
                    phase, inside = piece
                    call = called(phase, inside, block)
                    self._generator.add(PhaseSite(phase, call.bodies[0], False))
                    instrs.append(call)
                elif piece.kind == "repeat" and id(piece) in phases:
                    if phases[id(piece)] != MAIN:
                        self._generator.add(PhaseSite(phases[id(piece)], piece.bodies[0], True))
                    instrs.append(piece)
                elif piece.kind == "repeat":  # of steps
                    instrs.append(replace(piece, bodies=(rewritten(piece.bodies[0]),)))
                else:
                    instrs.append(piece)
            return block.with_instrs(instrs)

        return rewritten(main)


def pieces(block: Block, phases: Mapping[int, str]) -> Iterator[Piece]:
    """The instructions of a block, those of each phase that is inline as one."""
    inside: list[Instr] = []
    phase = MAIN
    for instr in block.instrs:
        name = phases.get(id(instr), MAIN)
        is_inline = name != MAIN and not repeats(instr, name)
        if inside and (not is_inline or name != phase):
            yield from trimmed(phase, inside)
            inside = []
        if is_inline:
            phase = name
            inside.append(instr)
        else:
            yield instr
    if inside:
        yield from trimmed(phase, inside)


def trimmed(phase: str, inside: Sequence[Instr]) -> Iterator[Piece]:
    """A phase, and the copies behind it, which are for what follows."""
    end = len(inside)
    while end and inside[end - 1].kind == "copy":
        end -= 1
    if end:
        yield phase, list(inside[:end])
    yield from inside[end:]


def repeats(instr: Instr, phase: str) -> bool:
    """Whether an instruction repeats a phase."""
    return instr.kind == "repeat" and instr.bodies[0].name.rsplit("/", 1)[-1] == phase


def called(phase: str, inside: Sequence[Instr], block: Block) -> Instr:
    """A call of a new block, in place of these instructions of a block."""
    defined = {value for instr in inside for value in instr.outputs}
    constants = set(block.constants.values())
    used = dict.fromkeys(value for instr in inside for value in instr.inputs())
    inputs = [value for value in used if value not in defined and value not in constants]
    own, after = {id(instr) for instr in inside}, False
    needed: set[Value] = set(block.outputs)
    for instr in block.instrs:
        if id(instr) in own:
            after = True
        elif after:
            needed.update(instr.inputs())
    outputs = tuple(value for instr in inside for value in instr.outputs if value in needed)
    body = Block(
        name=f"/{phase}",
        inputs=tuple(inputs),
        instrs=tuple(inside),
        outputs=outputs,
        constants={c: value for c, value in block.constants.items() if value in used},
    )
    return Instr("call", {"inputs": tuple(inputs)}, outputs, bodies=(body,))

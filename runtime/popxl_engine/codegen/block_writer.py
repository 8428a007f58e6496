"""A program as functions, one for each block: instructions, calls, loops and branches in order."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from popxl_engine.analysis.effects import effects_of
from popxl_engine.codegen.op_writer import OpWriter
from popxl_engine.codegen.source import Source, comment
from popxl_engine.ir import NO_NAME, Block, Instr, Value
from popxl_engine.kernels.dtypes import from_numpy, torch_dtype

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PhaseMarks:
    """The places of a program where a replica comes to another phase, and what is called there."""

    phases: Mapping[int, str]
    """The phases that begin before instructions, by the ``id`` of these."""
    enter: Callable[[Any, str], None]
    """A function of the replica and the phase."""


class SourceGenerator:
    """Writes one program: a function per block.

    Args:
        stochastic_rounding: updates of 16-bit tensors are rounded stochastically.
        kernels: the type of device whose kernels are called; default: the device's own.
        marks: where phases begin, if anybody wants to know.
    """

    def __init__(
        self,
        device: torch.device = CPU,
        stochastic_rounding: bool = False,
        kernels: str | None = None,
        marks: PhaseMarks | None = None,
    ):
        self.source = Source(device, stochastic_rounding, kernels or device.type)
        self.marks = marks
        self._functions: dict[Block, str] = {}
        self._constants: dict[Any, str] = {}

    def function(self, block: Block) -> str:
        """The name of a block's function, which is written first if it is not there yet."""
        if block not in self._functions:
            for body in block.bodies:
                self.function(body)
            name = f"block_{len(self._functions)}_{NO_NAME.sub('_', block.name.strip('/'))}"
            self._functions[block] = name
            self.write(block, name)
        return self._functions[block]

    def write(self, block: Block, name: str) -> None:
        """Append a block's function to the source."""
        BlockWriter(self, block, name).write()

    def constant(self, constant: Any, value: Value) -> str:
        """A global name for a constant's array or tensor."""
        key = (constant, value.host)
        if key not in self._constants:
            array = np.array(constant.host_value).reshape(constant.shape)
            placed = (
                array
                if value.host
                else from_numpy(array).to(self.source.device, torch_dtype(constant.dtype))
            )
            self._constants[key] = self.source.bind("c", placed)
        return self._constants[key]


class BlockWriter(OpWriter):
    """Writes one block's function."""

    def __init__(self, generator: SourceGenerator, block: Block, name: str):
        super().__init__(generator.source)
        self.generator, self.block, self.name = generator, block, name
        self.keep: set[str] = set()

    def write(self) -> None:
        """Append the function to the source."""
        block = self.block
        parameters = []
        for i, value in enumerate((*block.inputs, *block.state.values())):
            name = value.name if value not in self.python else f"unused_{i}v"
            self.python.setdefault(value, name)
            parameters.append(name)
        for constant, value in block.constants.items():
            self.python[value] = self.generator.constant(constant, value)
        self.keep = set(self.python.values())
        self._rename()
        last = self._last_uses()
        self.source.add(f"def {self.name}({', '.join(['r', *parameters])}):")
        path = None
        for position, instr in enumerate(block.instrs):
            self.last_uses = last.get(position, [])
            if instr.path != path:
                path = instr.path
                self.source.add(f"    {comment(path or 'main')}")
            if (mark := self._mark(instr)) is not None:
                self.source.add(f"    {mark}", instr)
            for i, line in enumerate(self._instr(instr)):
                self.source.add(f"    {line}{'' if i else self._comment(instr)}", instr)
            if self.last_uses:
                self.source.add(f"    del {', '.join(self.last_uses)}")
        results = ", ".join(self.python[v] for v in block.outputs)
        self.source.add(f"    return ({results}{',' if block.outputs else ''})")
        if effects_of(block).synchronizes:
            self.source.add("    yield")
        self.source.add("")

    def _mark(self, instr: Instr) -> str | None:
        """The call where a phase begins."""
        marks = self.generator.marks
        if marks is None or id(instr) not in marks.phases:
            return None
        return f"{self.source.bind('enter_phase', marks.enter)}(r, {marks.phases[id(instr)]!r})"

    @staticmethod
    def _comment(instr: Instr) -> str:
        """The user's op behind a line."""
        op = instr.source
        return f"  {comment(f'{op.name}, {op.where}')}" if op is not None else ""

    def _rename(self) -> None:
        """In-place results and removed copies go by the name of what they are."""
        for instr in self.block.instrs:
            for value in instr.outputs:
                self.python[value] = value.name
            definition = instr.definition
            if instr.kind == "copy" and not instr.needs_copy:
                self.python[instr.outputs[0]] = self.python[instr.arguments["t"]]
            elif definition is not None and definition.writes and instr.outputs:
                self.python[instr.outputs[0]] = self.python[instr.arguments[definition.writes[0]]]

    def _last_uses(self) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        for position, instr in enumerate(self.block.instrs):
            for value in (*instr.inputs(), *instr.outputs):
                last[self.python[value]] = position
        for value in self.block.outputs:
            last.pop(self.python[value], None)
        dead: dict[int, list[str]] = {}
        for name, position in last.items():
            if name not in self.keep:
                dead.setdefault(position, []).append(name)
        return dead

    def _instr(self, instr: Instr) -> Iterator[str]:
        if instr.kind == "copy":
            yield from self._copy(instr)
        elif instr.kind == "call":
            yield from self._call(instr)
        elif instr.kind == "repeat":
            yield from self._repeat(instr)
        elif instr.kind == "conditional":
            yield from self._conditional(instr)
        elif instr.kind == "end":
            yield from self._end(instr)
        elif instr.host:
            yield from self._host(instr)
        else:
            yield from self._op(instr)

    def _call_block(self, body: Block, inputs: str) -> str:
        call = f"{self.generator.function(body)}(r{inputs})"
        return f"(yield from {call})" if effects_of(body).synchronizes else call

    def _call(self, instr: Instr) -> Iterator[str]:
        arguments = "".join(f", {self.python[v]}" for v in instr.arguments["inputs"])
        call = f"{self._targets(instr)}{self._call_block(instr.bodies[0], arguments)}"
        yield from self._on_its_path(instr, [call])
        yield from self._laid_out(instr)

    def _on_its_path(self, instr: Instr, lines: Iterable[str]) -> Iterator[str]:
        """What runs an instruction's bodies, on its RNG path where they must know it."""
        draws = self.source.stochastic_rounding and any(
            effects_of(body).draws for body in instr.bodies
        )
        if not draws:
            yield from lines
            return
        outer = self.source.local("path")
        yield f"{outer} = r.rng_path"
        yield f"r.rng_path = {self._inside(self._start(instr), *instr.rng_path.numbers)}"
        yield from lines
        yield f"r.rng_path = {outer}"

    def _repeat(self, instr: Instr) -> Iterator[str]:
        body, count = instr.bodies[0], instr.arguments["repeat_count"]
        inputs = [self.python[v] for v in instr.arguments["inputs"]]
        carried = [self.python[v] for v in instr.outputs]
        for name, source in zip(carried, inputs):
            yield f"{name} = {source}"
        replaced = set(inputs[: len(carried)]) - set(inputs[len(carried) :]) - set(carried)
        if instr.rng_path.seed is not None:
            replaced.discard(self.python[instr.rng_path.seed])
        if gone := [n for n in self.last_uses if n in replaced]:
            yield f"del {', '.join(gone)}"
            self.last_uses = [n for n in self.last_uses if n not in gone]
        yield from self._loop(instr, body, count, carried, inputs)
        yield from self._laid_out(instr)

    def _loop(
        self, instr: Instr, body: Block, count: int, carried: list[str], inputs: list[str]
    ) -> Iterator[str]:
        arguments = "".join(f", {n}" for n in (*carried, *inputs[len(carried) :]))
        call = f"{self._targets(instr)}{self._call_block(body, arguments)}"
        if not (self.source.stochastic_rounding and effects_of(body).draws):
            yield f"for _ in range({count}):"
            yield f"    {call}"
            return
        outer, start = self.source.local("path"), self.source.local("start")
        yield f"{outer}, {start} = r.rng_path, {self._start(instr)}"
        first = instr.arguments["first"]
        yield f"for i in range({first}, {first + count}):"
        yield f"    r.rng_path = {self._inside(start, *instr.rng_path.numbers, 'i')}"
        yield f"    {call}"
        yield f"r.rng_path = {outer}"

    def _conditional(self, instr: Instr) -> Iterator[str]:
        yield from self._on_its_path(instr, self._branches(instr))
        yield from self._laid_out(instr)

    def _branches(self, instr: Instr) -> Iterator[str]:
        yield f"if bool({self.python[instr.arguments['cond']]}):"
        for body, branch in zip(instr.bodies, ("then", "else")):
            arguments = "".join(f", {self.python[v]}" for v in instr.arguments[f"{branch}_inputs"])
            yield f"    {self._targets(instr)}{self._call_block(body, arguments)}"
            if branch == "then":
                yield "else:"

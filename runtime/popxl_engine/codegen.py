"""Blocks as Python source: straight-line calls of kernels, every temporary dropped after its last
use.
"""

import linecache
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from popxl.opdef import call_arguments

from popxl_engine.analysis.effects import effects_of, meets, rounds
from popxl_engine.ir import Block, Instr, Value, values_in
from popxl_engine.kernels.collectives import pairing
from popxl_engine.kernels.dtypes import from_numpy, torch_dtype
from popxl_engine.kernels.registry import OVERWRITES, kernel_for
from popxl_engine.machine.memory import unshared
from popxl_engine.machine.rng_path import enter, of_seed
from popxl_engine.stochastic import NARROW, rounded
from popxl_engine.support import (
    CollectiveSite,
    clone,
    copied,
    downloaded,
    to_host,
    uploader,
    viewed,
)

CPU = torch.device("cpu")
PLAIN = (int, float, bool, str, type(None))


@dataclass
class Source:
    """Generated source with what it refers to, and the instruction of each line."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    instrs: dict[int, Instr] = field(default_factory=dict)
    _bound: dict[int, list[str]] = field(default_factory=dict)
    """The names of each object, by its identity."""

    def add(self, text: str, instr: Instr | None = None) -> None:
        """Append a line."""
        self.lines.append(text)
        if instr is not None:
            self.instrs[len(self.lines)] = instr

    def bind(self, prefix: str, value: Any) -> str:
        """A global name for an object.

        It ends in a letter, and a value's name in a digit, so that the two never meet.
        """
        known = self._bound.setdefault(id(value), [])
        for name in known:
            if name.startswith(prefix):
                return name
        name = f"{prefix}_{len(self.names)}g"
        self.names[name] = value
        known.append(name)
        return name

    def instr_of(self, error: BaseException, filename: str) -> Instr | None:
        """The instruction that an error comes from, if one of this source does: that of the
        innermost line.
        """
        found, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == filename:
                found = self.instrs.get(trace.tb_lineno, found)
            trace = trace.tb_next
        return found

    def text(self) -> str:
        """The whole source."""
        return "\n".join(self.lines) + "\n"

    def load(self, filename: str, names: Mapping[str, Any]) -> dict[str, Any]:
        """What the source refers to, by name, and the functions that it makes."""
        text, loaded = self.text(), dict(names)
        # Without a time, so that stack traces show this text and never look at the file, which
        # others may have changed.
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        exec(compile(text, filename, "exec"), loaded)  # noqa: S102 - our own source
        return loaded


class Generator:
    """Writes one program: a function per block.

    Args:
        rounds: updates of 16-bit tensors are rounded stochastically.
        kernels: the type of device whose kernels are called; default: the device's own.
    """

    def __init__(
        self, device: torch.device = CPU, rounds: bool = False, kernels: str | None = None
    ):
        self.source = Source()
        self.device, self.rounds, self.kernels = device, rounds, kernels or device.type
        self.collective_sites = 0
        """Collectives written so far."""
        self._functions: dict[Block, str] = {}
        self._constants: dict[Any, str] = {}

    def function(self, block: Block) -> str:
        """The name of a block's function, which is written first if it is not there yet."""
        if block not in self._functions:
            for instr in block.instrs:
                for body in instr.bodies:
                    self.function(body)
            name = f"block_{len(self._functions)}_" + "".join(
                c if c.isalnum() else "_" for c in block.name.strip("/")
            )
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
                else from_numpy(array).to(self.device, torch_dtype(constant.dtype))
            )
            self._constants[key] = self.source.bind("c", placed)
        return self._constants[key]


def may_donate(instr: Instr) -> bool:
    """Whether a collective may have an operand that nobody needs after it before the others are
    there.
    """
    assert instr.definition is not None
    return (
        "op" in instr.arguments
        and not instr.definition.writes
        and pairing(instr.definition.name, instr.arguments["op"]) is not None
    )


class BlockWriter:
    """Writes one block's function."""

    def __init__(self, generator: Generator, block: Block, name: str):
        self.generator, self.source, self.block, self.name = (
            generator,
            generator.source,
            block,
            name,
        )
        self.python: dict[Value, str] = {}
        self.keep: set[str] = set()
        self.last_uses: list[str] = []
        """Names that nothing needs after the instruction that is being written."""

    def write(self) -> None:
        """Append the function to the source."""
        block = self.block
        parameters = []
        for i, value in enumerate((*block.inputs, *block.state.values())):
            name = value.name if value not in self.python else f"unused_{i}"
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
                self.source.add(f"    # {path or 'main'}")
            for i, line in enumerate(self._instr(instr)):
                self.source.add(f"    {line}{'' if i else self._comment(instr)}", instr)
            if self.last_uses:
                self.source.add(f"    del {', '.join(self.last_uses)}")
        results = ", ".join(self.python[v] for v in block.outputs)
        self.source.add(f"    return ({results}{',' if block.outputs else ''})")
        if effects_of(block).meets:
            self.source.add("    yield")
        self.source.add("")

    @staticmethod
    def _comment(instr: Instr) -> str:
        """The user's op behind a line."""
        return f"  # {instr.source.name}, {instr.source.where}" if instr.source is not None else ""

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

    # Instructions

    def _instr(self, instr: Instr) -> Iterator[str]:
        if instr.kind == "copy":
            yield from self._copy(instr)
        elif instr.kind == "call":
            yield from self._call(instr)
        elif instr.kind == "repeat":
            yield from self._repeat(instr)
        elif instr.kind == "conditional":
            yield from self._conditional(instr)
        elif instr.host:
            yield from self._host(instr)
        else:
            yield from self._op(instr)

    def _targets(self, instr: Instr) -> str:
        return "".join(f"{self.python[v]}, " for v in instr.outputs) + "= " if instr.outputs else ""

    def _copy(self, instr: Instr) -> Iterator[str]:
        source, result = instr.arguments["t"], instr.outputs[0]
        if not instr.needs_copy:
            return
        if source.host and not result.host:
            yield f"{self.python[result]} = {self._moved(self.python[source])}"
        elif source.host:
            yield f"{self.python[result]} = {self.python[source]}.copy()"
        elif result.host:
            yield (
                f"{self.python[result]} = "
                f"{self.source.bind('downloaded', downloaded)}({self.python[source]})"
            )
        else:
            yield f"{self.python[result]} = {self._clone(self.python[source])}"

    def _moved(self, expression: str) -> str:
        """A host value on the device."""
        return f"{self.source.bind('to_device', uploader(self.generator.device))}({expression})"

    def _clone(self, expression: str) -> str:
        return f"{self.source.bind('clone', clone)}({expression})"

    def _laid_out(self, instr: Instr) -> Iterator[str]:
        """Several results, each laid out as its views need it. An operand that is written stays
        where it is.
        """
        definition = instr.definition
        alias, writes = (
            (definition.alias, definition.writes) if definition is not None else (False, ())
        )
        results = instr.outputs[1:] if writes else instr.outputs
        for value in results if instr.needs_copy or instr.needs_contiguous and not alias else ():
            name = self.python[value]
            plain = (
                f"{name}.copy()"
                if value.host
                else self._clone(name)
                if instr.needs_copy
                else f"{name}.contiguous()"
            )
            yield f"{name} = {plain}"

    def _call_block(self, body: Block, inputs: str) -> str:
        call = f"{self.generator.function(body)}(r{inputs})"
        return f"(yield from {call})" if effects_of(body).meets else call

    def _call(self, instr: Instr) -> Iterator[str]:
        arguments = "".join(f", {self.python[v]}" for v in instr.arguments["inputs"])
        call = f"{self._targets(instr)}{self._call_block(instr.bodies[0], arguments)}"
        yield from self._on_its_path(instr, [call])
        yield from self._laid_out(instr)

    def _on_its_path(self, instr: Instr, lines: Iterable[str]) -> Iterator[str]:
        """What runs an instruction's bodies, on its RNG path where they must know it."""
        draws = self.generator.rounds and any(effects_of(body).draws for body in instr.bodies)
        if not draws:
            yield from lines
            return
        outer = f"path_{len(self.source.lines)}"
        yield f"{outer} = r.rng_path"
        yield f"r.rng_path = {self._inside(self._start(instr), *instr.rng_path.numbers)}"
        yield from lines
        yield f"r.rng_path = {outer}"

    def _repeat(self, instr: Instr) -> Iterator[str]:
        body, count = instr.bodies[0], instr.arguments["repeat_count"]
        inputs = [self.python[v] for v in instr.arguments["inputs"]]
        carried = [self.python[v] for v in instr.outputs]
        for name, source, value in zip(carried, inputs, instr.outputs):
            yield (
                f"{name} = "
                f"{source if count else f'{source}.copy()' if value.host else self._clone(source)}"
            )
        replaced = set(inputs[: len(carried)]) - set(inputs[len(carried) :]) - set(carried)
        if instr.rng_path.seed is not None:
            replaced.discard(self.python[instr.rng_path.seed])
        if count and (gone := [n for n in self.last_uses if n in replaced]):
            yield f"del {', '.join(gone)}"
            self.last_uses = [n for n in self.last_uses if n not in gone]
        if count:
            yield from self._loop(instr, body, count, carried, inputs)
            yield from self._laid_out(instr)

    def _loop(
        self, instr: Instr, body: Block, count: int, carried: list[str], inputs: list[str]
    ) -> Iterator[str]:
        arguments = "".join(f", {n}" for n in (*carried, *inputs[len(carried) :]))
        call = f"{self._targets(instr)}{self._call_block(body, arguments)}"
        if not (self.generator.rounds and effects_of(body).draws):
            yield f"for _ in range({count}):"
            yield f"    {call}"
            return
        outer, start = f"path_{len(self.source.lines)}", f"start_{len(self.source.lines)}"
        yield f"{outer}, {start} = r.rng_path, {self._start(instr)}"
        first = instr.arguments["first"]
        yield f"for i in range({first}, {first + count}):"
        yield f"    r.rng_path = {self._inside(start, *instr.rng_path.numbers, 'i')}"
        yield f"    {call}"
        yield f"r.rng_path = {outer}"

    def _start(self, instr: Instr) -> str:
        """The RNG path from which an instruction's numbers count."""
        seed = instr.rng_path.seed
        return (
            "r.rng_path"
            if seed is None
            else f"{self.source.bind('of_seed', of_seed)}({self.python[seed]})"
        )

    def _inside(self, start: str, *numbers: Any) -> str:
        return (
            f"{self.source.bind('enter', enter)}({start}, ({''.join(f'{n}, ' for n in numbers)}))"
        )

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

    def _argument(self, value: Any, host: bool) -> str:
        """An argument in the source: values by name, converted to where the instruction runs."""
        if isinstance(value, Value):
            name = self.python[value]
            return name if host or not value.host else self._moved(name)
        if isinstance(value, (tuple, list)) and any(True for _ in values_in(value)):
            return "(" + "".join(f"{self._argument(v, host)}, " for v in value) + ")"
        if (
            isinstance(value, PLAIN)
            and value == value
            and value not in (float("inf"), float("-inf"))
        ):
            return repr(value)
        if isinstance(value, tuple) and all(isinstance(v, PLAIN) for v in value):
            return repr(value)
        return self.source.bind("a", value)

    def _arguments(self, instr: Instr, host: bool = False) -> list[str]:
        assert instr.definition is not None
        args, kwargs = call_arguments(instr.definition, instr.arguments)
        return [self._argument(a, host) for a in args] + [
            f"{k}={self._argument(v, host)}" for k, v in kwargs.items()
        ]

    def _host(self, instr: Instr) -> Iterator[str]:
        definition = instr.definition
        assert definition is not None
        rule = self.source.bind(f"host_{definition.name}", definition.host)
        call = f"{rule}({', '.join(self._arguments(instr, host=True))})"
        new = (
            instr.needs_copy
            or instr.needs_contiguous
            and not definition.alias
            or not definition.views
        )
        array = self.source.bind("copied", copied) if new else self.source.bind("to_host", to_host)
        dtypes = [self.source.bind("a", v.spec.dtype.as_numpy()) for v in instr.outputs]
        if definition.writes:
            target = self.python[instr.arguments[definition.writes[0]]]
            yield f"{target}[...] = {call}"
        elif len(instr.outputs) == 1:
            yield (
                f"{self.python[instr.outputs[0]]} = "
                f"{self._viewed(instr, f'{array}({call}, {dtypes[0]})')}"
            )
        else:
            yield f"{self._targets(instr)}{call}"
            for value, dtype in zip(instr.outputs, dtypes):
                yield f"{self.python[value]} = {array}({self.python[value]}, {dtype})"

    def _op(self, instr: Instr) -> Iterator[str]:
        definition = instr.definition
        assert definition is not None
        if definition.name in ("remote_load", "remote_store"):
            yield self._transfer(instr)
            return
        kernel = self.source.bind(
            f"k_{definition.name}", kernel_for(definition, self.generator.kernels)
        )
        if "collective" in definition.effects:
            yield from self._collective(instr, kernel)
            return
        first = ["r"] if definition.effects & {"host", "remote"} else []
        arguments = (
            self._arguments(instr)
            if "remote" not in definition.effects
            else self._remote_arguments(instr)
        )
        over = self._overwritten(instr)
        if over in arguments:
            yield from self._donate(over)
            arguments = [*("held[0]" if a == over else a for a in arguments), "into=into"]
        call = f"{kernel}({', '.join([*first, *arguments])})"
        around = f"with {self._rounded(instr)}: " if self.generator.rounds and rounds(instr) else ""
        if not instr.outputs or (definition.writes and len(instr.outputs) == 1):
            yield f"{around}{call}"
        elif len(instr.outputs) == 1 and not self._returns_many(instr):
            yield f"{around}{self.python[instr.outputs[0]]} = {self._finished(instr, call)}"
        else:
            yield f"{around}{self._targets(instr)}{call}"
            yield from self._laid_out(instr)

    def _rounded(self, instr: Instr) -> str:
        """The context that an update runs in that rounds. One that is not of 16 bits draws once."""
        assert instr.definition is not None
        updates, around = [], instr.rng_path.numbers[:-1]
        for target, position in zip(
            instr.written(), instr.rng_positions or instr.rng_path.numbers[-1:]
        ):
            if target.spec.dtype not in NARROW and not instr.definition.rounds:
                continue
            start = "0"
            if target.sharding is not None:
                starts = target.sharding.starts(target.spec.nelms)
                start = f"{self.source.bind('starts', starts)}[r.index]"
            updates.append(f"({self._inside(self._start(instr), *around, position)}, {start})")
        return f"{self.source.bind('rounded', rounded)}({', '.join(updates)})"

    @staticmethod
    def _returns_many(instr: Instr) -> bool:
        return instr.definition is not None and instr.definition.result_type in (list, tuple)

    def _remote_arguments(self, instr: Instr) -> list[str]:
        """Offsets stay on the host: the kernel takes anything that int() takes."""
        assert instr.definition is not None
        args, kwargs = call_arguments(instr.definition, instr.arguments)
        offset = instr.arguments["offset"]
        return [self._row(instr) if a is offset else self._argument(a, False) for a in args] + [
            f"{k}={self._argument(v, False)}" for k, v in kwargs.items()
        ]

    def _row(self, instr: Instr) -> str:
        """The row of a transfer, as something that int() takes."""
        offset = instr.arguments["offset"]
        source = self._argument(offset, host=True)
        return f"{source}.reshape(-1)[0]" if isinstance(offset, Value) and offset.rank else source

    def _overwritten(self, instr: Instr) -> str:
        """The name in the source of the operand whose memory the result may take, if nothing needs
        it any more.
        """
        assert instr.definition is not None
        operand = OVERWRITES.get(kernel_for(instr.definition, self.generator.kernels))
        if operand is None:
            return ""
        name, names = (
            self.python[instr.arguments[operand]],
            [self.python[v] for v in instr.inputs()],
        )
        return name if name in self.last_uses and names.count(name) == 1 else ""

    def _donate(self, name: str) -> Iterator[str]:
        """Before a call that is the last to need an operand: its memory is the result's, if nobody
        else has it.
        """
        self.last_uses = ["held", "into", *(n for n in self.last_uses if n != name)]
        yield f"held = [{name}]; del {name}"
        yield f"into = {self.source.bind('unshared', unshared)}(held)"

    def _transfer(self, instr: Instr) -> str:
        """A load of a row, or a store; of what nobody needs after it, so that its memory may become
        the row's.
        """
        buffer, offset, *rest = self._remote_arguments(instr)
        row = f"{buffer}, int({offset})"
        if instr.outputs:
            return (
                f"{self.python[instr.outputs[0]]} = "
                f"{self._finished(instr, f'r.remote_load({row})')}"
            )
        value = rest[0]
        if value not in self.last_uses:
            return f"r.remote_store({row}, [{value}])"
        self.last_uses = [n for n in self.last_uses if n != value]
        return f"held = [{value}]; del {value}; r.remote_store({row}, held)"

    def _finished(self, instr: Instr, call: str) -> str:
        if instr.needs_copy:
            return self._clone(call)
        if instr.needs_contiguous and not instr.must_view:
            return f"{call}.contiguous()"
        return self._viewed(instr, call)

    def _viewed(self, instr: Instr, expression: str) -> str:
        """The result of an alias form, which must be a view where it is written through."""
        if not instr.must_view or instr.definition is None:
            return expression
        source = next(values_in([instr.arguments[p] for p in instr.definition.views]))
        return f"{self.source.bind('viewed', viewed)}({expression}, {self.python[source]})"

    def _collective(self, instr: Instr, kernel: str) -> Iterator[str]:
        assert instr.definition is not None and instr.source is not None
        args, kwargs = call_arguments(instr.definition, instr.arguments)
        keywords = [f"{k}={self._argument(v, False)}" for k, v in kwargs.items()]
        operands = [self._argument(a, False) for a in args if isinstance(a, Value)]
        if not meets(instr):
            listed = [
                f"[{self._argument(a, False)}]"
                if isinstance(a, Value)
                else self._argument(a, False)
                for a in args
            ]
            call = f"{kernel}({', '.join([*listed, *keywords])})[0]"
        else:
            lists = iter(range(len(operands)))
            inner = [
                f"t[{next(lists)}]" if isinstance(a, Value) else self._argument(a, False)
                for a in args
            ]
            combine = f"lambda *t: {kernel}({', '.join([*inner, *keywords])})"
            self.generator.collective_sites += 1
            site = self.source.bind(
                "site", CollectiveSite(instr.source, self.generator.collective_sites)
            )
            if may_donate(instr) and operands[0] in self.last_uses:
                held = f"held_{self.generator.collective_sites}"
                yield f"{held} = [{operands[0]}]; del {operands[0]}"
                self.last_uses = [held, *(n for n in self.last_uses if n != operands[0])]
                call = f"(yield {site}.donate(r, {held}, {combine}))"
            else:
                call = (
                    f"(yield {site}.arrive(r, ({''.join(f'{o}, ' for o in operands)}), {combine}))"
                )
        names = [self.python[v] for v in instr.outputs]
        written = instr.definition.writes
        if written:
            yield f"{names[0]}.copy_({call})"
        elif len(names) == 1:
            yield f"{names[0]} = {self._finished(instr, call)}"
        else:
            yield f"{self._targets(instr)}{call}"

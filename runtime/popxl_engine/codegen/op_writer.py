"""Ops as calls of kernels: their arguments, where results lie, what collectives wait for."""

import math
from collections.abc import Iterator
from typing import Any

from popxl.op_records import PLAIN
from popxl.opdef import call_arguments

from popxl_engine.analysis.effects import draws_noise, synchronizes
from popxl_engine.codegen.source import Source
from popxl_engine.ir import Instr, Value, values_in
from popxl_engine.kernels.collectives import pairing
from popxl_engine.kernels.registry import OVERWRITES, kernel_for
from popxl_engine.machine.memory import unshared
from popxl_engine.machine.rng_path import enter, of_seed
from popxl_engine.stochastic import HALF_DTYPES, rounded
from popxl_engine.support import (
    CollectiveSite,
    clone,
    copied,
    downloaded,
    making_on,
    to_host,
    uploader,
    viewed,
)


def is_literal(value: Any) -> bool:
    """Whether the source can hold an argument as it is: its text is Python for it."""
    if type(value) is tuple:
        return all(map(is_literal, value))
    return type(value) in PLAIN and (type(value) is not float or math.isfinite(value))


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


class OpWriter:
    """Writes lines for ops and copies."""

    def __init__(self, source: Source):
        self.source = source
        self.python: dict[Value, str] = {}
        """The name of each value."""
        self.last_uses: list[str] = []
        """Names that nothing needs after the instruction that is being written."""

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
        return f"{self.source.bind('to_device', uploader(self.source.device))}({expression})"

    def _clone(self, expression: str) -> str:
        return f"{self.source.bind('clone', clone)}({expression})"

    def _laid_out(self, instr: Instr) -> Iterator[str]:
        """Several results, each laid out as its views need it. An operand that is written stays
        where it is.
        """
        definition = instr.definition
        is_alias = definition is not None and definition.alias
        if not instr.needs_copy and (is_alias or not instr.needs_contiguous):
            return
        is_written = definition is not None and bool(definition.writes)
        for value in instr.outputs[is_written:]:
            name = self.python[value]
            if value.host:
                yield f"{name} = {name}.copy()"
            else:
                plain = self._clone(name) if instr.needs_copy else f"{name}.contiguous()"
                yield f"{name} = {plain}"

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

    def _argument(self, value: Any, host: bool) -> str:
        """An argument in the source: values by name, converted to where the instruction runs."""
        if isinstance(value, Value):
            name = self.python[value]
            return name if host or not value.host else self._moved(name)
        if isinstance(value, (tuple, list)) and any(True for _ in values_in(value)):
            return "(" + "".join(f"{self._argument(v, host)}, " for v in value) + ")"
        return repr(value) if is_literal(value) else self.source.bind("a", value)

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
        elif len(instr.outputs) == 1 and not self._returns_many(instr):
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
        plain = kernel_for(definition, self.source.kernels)
        if not definition.effects and not any(values_in(instr.arguments.values())):
            plain = making_on(self.source.device, plain)
        kernel = self.source.bind(f"k_{definition.name}", plain)
        if "collective" in definition.effects:
            yield from self._collective(instr, kernel)
            return
        first = ["r"] if definition.effects & {"host", "remote", "clock"} else []
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
        around = (
            f"with {self._rounded(instr)}: "
            if self.source.stochastic_rounding and draws_noise(instr)
            else ""
        )
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
            if target.spec.dtype not in HALF_DTYPES and not instr.definition.rounds:
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
        names = instr.definition.signature.parameters
        return [
            self._row(instr) if name == "offset" else self._argument(a, False)
            for name, a in zip(names, args)
        ] + [f"{k}={self._argument(v, False)}" for k, v in kwargs.items()]

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
        operand = OVERWRITES.get(kernel_for(instr.definition, self.source.kernels))
        if operand is None:
            return ""
        name, names = (
            self.python[instr.arguments[operand]],
            [self.python[v] for v in instr.inputs()],
        )
        return name if name in self.last_uses and names.count(name) == 1 else ""

    def _donate(self, name: str) -> Iterator[str]:
        """Give a result the memory of an operand that its call is the last to need, if nobody else
        has it.
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

    def _end(self, instr: Instr) -> Iterator[str]:
        """Wait for the results of a collective that has begun."""
        call = f"(yield {self.python[instr.arguments['begun']]})"
        yield f"{self.python[instr.outputs[0]]} = {self._finished(instr, call)}"

    def _collective(self, instr: Instr, kernel: str) -> Iterator[str]:
        assert instr.definition is not None and instr.source is not None
        args, kwargs = call_arguments(instr.definition, instr.arguments)
        keywords = [f"{k}={self._argument(v, False)}" for k, v in kwargs.items()]
        operands = [self._argument(a, False) for a in args if isinstance(a, Value)]
        if not synchronizes(instr):
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
            self.source.collective_sites += 1
            site = self.source.bind(
                "site", CollectiveSite(instr.source, self.source.collective_sites)
            )
            arrived = f"(r, ({''.join(f'{o}, ' for o in operands)}), {combine})"
            if instr.kind == "begin":
                yield f"{self.python[instr.outputs[0]]} = (yield {site}.begin{arrived})"
                return
            if may_donate(instr) and operands[0] in self.last_uses:
                held = self.source.local("held")
                yield f"{held} = [{operands[0]}]; del {operands[0]}"
                self.last_uses = [held, *(n for n in self.last_uses if n != operands[0])]
                call = f"(yield {site}.donate(r, {held}, {combine}))"
            else:
                call = f"(yield {site}.arrive{arrived})"
        names = [self.python[v] for v in instr.outputs]
        written = instr.definition.writes
        if written:
            yield f"{names[0]}.copy_({call})"
        elif len(names) == 1:
            yield f"{names[0]} = {self._finished(instr, call)}"
        else:
            yield f"{self._targets(instr)}{call}"

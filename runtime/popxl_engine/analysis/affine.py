"""Small integers on the host as sums: which of a block's rows are surely not the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value


@dataclass(frozen=True)
class Affine:
    """A sum of values, each times a number, and a number."""

    terms: Mapping[Value, int]
    constant: int = 0

    def plus(self, other: "Affine", times: int = 1) -> "Affine":
        """This and a multiple of another one."""
        terms = dict(self.terms)
        for value, count in other.terms.items():
            terms[value] = terms.get(value, 0) + times * count
        kept = {value: count for value, count in terms.items() if count}
        return Affine(kept, self.constant + times * other.constant)

    def times(self, number: int) -> "Affine":
        """A multiple of this."""
        return Affine(NOTHING, 0).plus(self, number)

    def minus(self, other: "Affine") -> int | None:
        """The difference, where it is a number."""
        difference = self.plus(other, -1)
        return None if difference.terms else difference.constant


NOTHING: Mapping[Value, int] = MappingProxyType({})


class AffineForms:
    """The forms of a block's host values of one element, through copies, sums, differences and
    products with constants. What is written anywhere is a value of its own.
    """

    def __init__(self, block: Block):
        self._aliases = block.find(MustAlias)
        self._known: dict[Value, Affine] = {}
        for constant, value in block.constants.items():
            if constant.nelms == 1 and constant.dtype.is_int:
                number = int(constant.host_value.reshape(()))
                self._add(value, Affine(NOTHING, number))
        for instr in block.instrs:
            form = self._form(instr)
            if form is not None:
                self._add(instr.outputs[0], form)

    def of(self, argument: Any) -> Affine:
        """The form of an argument: a value, or a number."""
        if not isinstance(argument, Value):
            return Affine(NOTHING, int(argument))
        return self._known.get(argument, Affine({argument: 1}))

    def _add(self, value: Value, form: Affine) -> None:
        if not self._aliases.is_written(value):
            self._known[value] = form

    def _form(self, instr: Instr) -> Affine | None:
        if len(instr.outputs) != 1 or instr.outputs[0].nelms != 1:
            return None
        if any(map(self._aliases.is_written, instr.inputs())):
            return None
        if instr.kind == "copy" or instr.is_op("identity"):
            source = instr.arguments["t"]
            return self.of(source) if source.host else None
        if not instr.host or not any(map(instr.is_op, ("add", "sub", "mul"))):
            return None
        left, right = (self.of(instr.arguments[side]) for side in ("lhs", "rhs"))
        if instr.is_op("add"):
            return left.plus(right)
        if instr.is_op("sub"):
            return left.plus(right, -1)
        if not left.terms:
            return right.times(left.constant)
        return left.times(right.constant) if not right.terms else None

"""Value numbers: equal for values of a block that hold the same elements at all times."""

from collections.abc import Sequence
from typing import Any

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value

ValueNumber = tuple[tuple[int, ...], Any]
"""Order of axes, and what it is of: a value, a constant's bytes, or an op's name, number of the
result, and operands.
"""


def permuted(number: ValueNumber, permutation: Sequence[int]) -> ValueNumber:
    """The number of a value's transpose."""
    axes, of = number
    return tuple(axes[i] for i in permutation), of


class ValueNumbers:
    """The numbers of a block's values, through copies, views, and ops that make one element.

    What the block writes anywhere has a number of its own.
    """

    def __init__(self, block: Block):
        self._aliases = block.find(MustAlias)
        self._known: dict[Value, ValueNumber] = {}
        self._numbers: dict[Any, int] = {}
        for constant, value in block.constants.items():
            if constant.nelms == 1:
                key = ("constant", constant.host_value.tobytes(), str(constant.dtype), value.host)
                self._add(value, self._numbered(value, key))
        for instr in block.instrs:
            if instr.kind == "copy":
                if instr.arguments["t"].host is instr.outputs[0].host:
                    self._add(instr.outputs[0], self.of(instr.arguments["t"]))
            elif _is_pure(instr):
                self._add_results(instr)

    def of(self, value: Value) -> ValueNumber:
        """The number of a value."""
        axes = tuple(range(value.spec.rank))
        if self._aliases.is_written(value):
            return axes, object()  # it does not hold the same at all times
        return self._known.get(value, (axes, value))

    def _add(self, value: Value, number: ValueNumber) -> None:
        if not self._aliases.is_written(value):
            self._known[value] = number

    def _numbered(self, value: Value, key: Any) -> ValueNumber:
        """A number for what is made like this, short however much it is made of."""
        number = self._numbers.setdefault(key, len(self._numbers))
        return tuple(range(value.spec.rank)), ("number", number)

    def _add_results(self, instr: Instr) -> None:
        for i, value in enumerate(instr.outputs):
            self._add(value, self.result_of(instr, i))

    def result_of(self, instr: Instr, i: int = 0) -> ValueNumber:
        """The number of what an instruction without effects makes, whatever is written later."""
        definition, value = instr.definition, instr.outputs[i]
        assert definition is not None
        if definition.name == "transpose" and not instr.host:
            axes = tuple(range(value.rank))
            permutation = [axes[a] for a in instr.arguments["permutation"] or axes[::-1]]
            return permuted(self.of(instr.arguments["t"]), permutation)
        operands = tuple((n, self.key(a)) for n, a in instr.arguments.items())
        return self._numbered(value, (definition.name, i, instr.host, value.dtype, operands))

    def key(self, argument: Any) -> Any:
        """The same for arguments that are the same."""
        if isinstance(argument, Value):
            return self.of(argument)
        if isinstance(argument, (tuple, list)):
            return tuple(map(self.key, argument))
        is_plain = isinstance(argument, (bool, int, float, str, type(None)))
        return type(argument), repr(argument) if is_plain else id(argument)


def _is_pure(instr: Instr) -> bool:
    """Whether it only views its operands, or makes single elements, and does nothing else."""
    definition = instr.definition
    if definition is None or definition.writes or definition.alias or definition.effects:
        return False
    makes_numbers = all(v.spec.nelms == 1 for v in instr.outputs)
    return bool(definition.views) or makes_numbers

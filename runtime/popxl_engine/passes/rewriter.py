"""What passes need to find patterns in a block and to replace them."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from popxl.op_records import OPS, Op, OpDefinition
from popxl.tensor import TensorSpec

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.analysis.def_use import DefUse
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.ops.definition import check_results, takes


class Pattern(NamedTuple):
    """A pattern: what an op makes. ``is_kept``: the fused op gives it, and others may use it."""

    name: str
    operands: Mapping[str, Any]
    is_kept: bool = False


class ScalarPattern(NamedTuple):
    """A pattern: a constant number that adds no axis, found under this name."""

    name: str


def pattern(op: str, **operands: Any) -> Pattern:
    """The pattern of what an op of this name makes for one instruction alone. Each argument is to
    match a pattern, or is found under the name that is given, or is what is given. What has the
    same name twice must be the same.
    """
    return Pattern(op, operands)


def kept_pattern(op: str, **operands: Any) -> Pattern:
    """The same as `pattern`, of what the fused op gives, so that others may use it."""
    return Pattern(op, operands, is_kept=True)


class Match(NamedTuple):
    """A place where a pattern is found. ``arguments``: by the names in it; ``absorbed``: the
    positions of what makes the instruction's operands.
    """

    arguments: dict[str, Any]
    absorbed: list[int]


class Rewriter:
    """A block that is rewritten: questions are about the block as it was, `result` is what becomes
    of it.
    """

    def __init__(self, block: Block):
        self.block, self.instrs = block, list(block.instrs)
        self.removed: set[int] = set()
        self._inserted: dict[int, list[Instr]] = {}
        self._moved: dict[int, list[Instr]] = {}
        self._is_changed = False

    @cached_property
    def uses(self) -> DefUse:
        """The definitions and uses of the block's values."""
        return self.block.find(DefUse)

    @cached_property
    def _inputs(self) -> set[Any]:
        """The storages of the block's inputs."""
        return {self.storage(v) for v in self.block.inputs}

    def ops(self, *names: str) -> list[tuple[int, Instr]]:
        """The instructions that are an op of one of these names, with their positions."""
        found = self.block.find(_ops_by_name)
        return sorted(
            (pair for name in names for pair in found.get(name, ())), key=lambda pair: pair[0]
        )

    def scalar(self, v: Any) -> float | None:
        """The value of a constant of one element, a real number, that nothing writes."""
        constant = self.uses.constants.get(v)
        if constant is None or constant.nelms != 1 or constant.dtype.is_complex:
            return None
        if self.uses.is_written(v):
            return None
        return float(constant.host_value.reshape(()))

    def storage(self, v: Any) -> Any:
        """The first value whose storage this one is by contract."""
        return self.block.find(MustAlias).storage(v) if isinstance(v, Value) else v

    def maker(self, v: Any, name: str = "") -> int | None:
        """The position of what makes a value, if it is still there, and an op of this name."""
        instr = self.uses.maker.get(v) if isinstance(v, Value) else None
        index = None if instr is None else self.uses.position[instr]
        if index is None or index in self.removed:
            return None
        return index if not name or self.instrs[index].is_op(name) else None

    def users(self, v: Value) -> list[int]:
        """The positions of what uses a value, in order."""
        return [self.uses.position[instr] for instr in self.uses.users.get(v, ())]

    def made_by(self, v: Any, name: str) -> int | None:
        """The position of what makes a value, if it is an op of this name and one instruction alone
        uses the value.
        """
        index = self.maker(v, name)
        if index is None or len(self.uses.users.get(v, ())) != 1 or v in self.uses.outputs:
            return None
        return index

    def match(self, index: int, /, **operands: Any) -> Match | None:
        """The place where the operands of an instruction match patterns, and nothing writes between
        what makes them and the instruction.
        """
        found = Match({}, [])
        pending: list[tuple[int, Mapping[str, Any]]] = [(index, operands)]
        for position, patterns in pending:  # it grows
            for name, pattern in patterns.items():
                argument = self.instrs[position].arguments[name]
                if isinstance(pattern, Pattern):
                    made_by = self.maker if pattern.is_kept else self.made_by
                    maker = made_by(argument, pattern.name)
                    if maker is None:
                        return None
                    found.absorbed.append(maker)
                    pending.append((maker, pattern.operands))
                elif isinstance(pattern, ScalarPattern):
                    scalar = self.scalar(argument)
                    if scalar is None or argument.rank > 1:
                        return None
                    if found.arguments.setdefault(pattern.name, scalar) != scalar:
                        return None
                elif isinstance(pattern, str):
                    if found.arguments.setdefault(pattern, argument) != argument:
                        return None
                elif argument != pattern:
                    return None
        is_whole = not self.writes_between(min(found.absorbed, default=index), index)
        return found if is_whole else None

    def used_only_by(self, v: Value, users: Iterable[int]) -> bool:
        """Whether nothing but these instructions sees a value."""
        return v not in self.uses.outputs and set(self.users(v)) <= set(users)

    def writes_between(self, first: int, last: int) -> bool:
        """Whether anything strictly between two instructions writes to storage."""
        return any(
            self.instrs[i].may_write() for i in range(first + 1, last) if i not in self.removed
        )

    def may_run_late(
        self,
        absorbed: Sequence[int],
        last: int,
        written: Iterable[Value],
        except_: int | None = None,
    ) -> bool:
        """Whether instructions may run at ``last`` instead of where they are.

        Nothing else in between may write, or see the storage that they write; one instruction,
        ``except_``, may.
        """
        storages = {self.storage(v) for v in written}
        for i in range(min(absorbed), last):
            if i in absorbed or i in self.removed or i == except_:
                continue
            if self.instrs[i].may_write() or self.may_see(i, storages):
                return False
        return True

    def may_see(self, index: int, storages: Set[Any]) -> bool:
        """Whether an instruction reads storage, or may: inputs that a graph takes by reference may
        be one tensor. Numbers without axes, such as rates, are taken for no tensor with some.
        """
        inputs, least = self._inputs, min((1, *(s.rank for s in storages)))
        read = (self.storage(v) for v in self.instrs[index].inputs())
        return any(s in storages or s in inputs and s.rank >= least for s in read)

    def replace(self, index: int, instr: Instr | None, *absorbed: int) -> bool:
        """Put another instruction at a position; the absorbed ones go. Nothing, and False, where it
        is None.
        """
        if instr is None:
            return False
        self._is_changed = True
        self.instrs[index] = instr
        self.removed.update(absorbed)
        return True

    def move_after(self, index: int, moved: Sequence[int]) -> None:
        """Put instructions behind a later one, in their order."""
        self._is_changed = True
        self._moved[index] = [self.instrs[i] for i in moved]
        self.removed.update(moved)

    def transposed(self, v: Value, before: int) -> Value:
        """The transpose of a matrix: what it is the transpose of, or a new view made before a
        position.
        """
        maker = self.maker(v, "transpose")
        if (
            maker is not None
            and swaps_axes(self.instrs[maker])
            and not self.writes_between(maker, before)
        ):
            source: Value = self.instrs[maker].arguments["t"]
            return source
        inserted = self._inserted.setdefault(before, [])
        for view in inserted:
            if view.arguments["t"] is v:
                return view.outputs[0]
        result = Value(
            f"{v.name}_transposed_{before}", TensorSpec(v.spec.shape[::-1], v.spec.dtype)
        )
        view = replace(
            self.instrs[before],
            definition=OPS["transpose"],
            arguments={"t": v, "permutation": (1, 0)},
            outputs=(result,),
        )
        inserted.append(view)
        return result

    def result(self) -> Block:
        """The block with what is left, and what was inserted."""
        if not self._is_changed:
            return self.block
        instrs: list[Instr] = []
        for i, instr in enumerate(self.instrs):
            instrs += self._inserted.get(i, [])
            if i not in self.removed:
                instrs.append(instr)
            instrs += self._moved.get(i, [])
        return self.block.with_instrs(instrs)


def fuse(block: Block, name: str, definition: OpDefinition, *patterns: Mapping[str, Any]) -> Block:
    """A block where each op of a name whose operands match one of the patterns is, with what it
    absorbs, one of the engine's own ops.
    """
    rewriter = Rewriter(block)
    for i, instr in rewriter.ops(name):
        for found in filter(None, (rewriter.match(i, **pattern) for pattern in patterns)):
            arguments = {name: found.arguments[name] for name in definition.signature.parameters}
            if rewriter.replace(i, fused(instr, definition, arguments), *found.absorbed):
                break
    return rewriter.result()


def swaps_axes(transpose: Instr) -> bool:
    """Whether a permutation of a matrix's axes is its transpose: it may leave them as they are."""
    permutation = transpose.arguments["permutation"]
    return permutation is None or permutation[0] in (1, -1)


def _ops_by_name(block: Block) -> dict[str, list[tuple[int, Instr]]]:
    found: dict[str, list[tuple[int, Instr]]] = {}
    for i, instr in enumerate(block.instrs):
        if instr.definition is not None:
            found.setdefault(instr.definition.name, []).append((i, instr))
    return found


def fused(
    instr: Instr,
    definition: OpDefinition,
    arguments: Mapping[str, Any] | None = None,
    outputs: Sequence[Value] | None = None,
    writers: tuple[Op, ...] = (),
) -> Instr | None:
    """An instruction as one of the engine's own ops; None where that does not take such operands.

    Args:
        arguments: default: those of the instruction; so with the outputs.
        writers: see `Instr`.
    Raises:
        ShapeError: the outputs are not what the op makes of its operands.
    """
    given = instr.arguments if arguments is None else arguments
    results = instr.outputs if outputs is None else tuple(outputs)
    if not takes(definition, given):
        return None
    check_results(definition, given, results)
    found: Instr = replace(
        instr, definition=definition, arguments=given, outputs=results, writers=writers
    )
    return found

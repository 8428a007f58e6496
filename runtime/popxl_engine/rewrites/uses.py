"""What rules for blocks need to know: who makes a value, who uses it, and whether anything writes
it.
"""

from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from popxl import dtypes

from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value, filled
from popxl_engine.stochastic import NARROW

Content = Tuple[Tuple[int, ...], Any]
"""Order of axes, and what it is of: a value, or a view by its op, number of the result, and
operands.
"""


def turned(content: Content, permutation: Sequence[int]) -> Content:
    """What a transpose of a value holds."""
    axes, of = content
    return tuple(axes[i] for i in permutation), of


class Uses:
    """Who makes and who uses the values of a block, and which of them are written.

    What makes results that nobody needs, and does nothing else, uses nothing: `optimise` removes
    it.
    """

    def __init__(self, block: Block):
        self.maker: Dict[Value, Instr] = {}
        self.users: Dict[Value, List[Instr]] = {}
        self.groups = storage_groups(block)
        self.written: Set[Value] = set()
        self.kept = set(block.outputs)
        for instr in _needed(block):
            self.maker.update(dict.fromkeys(instr.outputs, instr))
            self.written |= {self.groups.get(v, v) for v in (*instr.written(), *instr.lent())}
            for v in instr.inputs():
                self.users.setdefault(v, []).append(instr)

    def is_written(self, v: Value) -> bool:
        """Whether anything in the block writes the value's storage, or may."""
        return self.groups.get(v, v) in self.written

    def is_used_once(self, v: Value) -> bool:
        """Whether one instruction sees a value, and nothing writes it."""
        return len(self.users.get(v, ())) == 1 and v not in self.kept and not self.is_written(v)

    def copied_from(self, v: Value) -> Iterator[Value]:
        """The value, and what it is a copy of, one after the other."""
        yield v
        while v in self.maker and self.maker[v].kind == "copy":
            v = self.maker[v].arguments["t"]
            yield v

    def source(self, v: Value) -> Optional[Value]:
        """What a value is a copy of, if none of the copies is written, nor it."""
        chain = list(self.copied_from(v))
        return None if any(map(self.is_written, chain)) else chain[-1]

    def readers(self, values: Sequence[Value]) -> Optional[List[Instr]]:
        """What sees any of these values, or copies of them; None where one leaves the block."""
        found: List[Instr] = []
        seen = list(values)
        for v in seen:  # it grows
            if v in self.kept:
                return None
            for user in self.users.get(v, ()):
                if user.kind == "copy":
                    seen += user.outputs
                elif user not in found:
                    found.append(user)
        return found

    def content(self, v: Value) -> Content:
        """Equal for values that hold the same, through copies and views of what is never
        written.
        """
        straight, maker = tuple(range(v.spec.rank)), self.maker.get(v)
        if self.is_written(v):
            return straight, object()  # it does not hold the same at all times
        if maker is None:
            return straight, v
        if maker.kind == "copy":
            return self.content(maker.arguments["t"])
        definition = maker.definition
        if definition is None or not definition.views or definition.alias or definition.writes:
            return straight, v
        if definition.name == "transpose":
            return turned(self.content(maker.arguments["t"]), maker.arguments["permutation"])
        operands = {n: filled(a, self.content) for n, a in maker.arguments.items()}
        return straight, (definition.name, maker.outputs.index(v), operands)

    def widened(self, v: Value) -> Optional[Value]:
        """The 16-bit value that ``v`` is a cast of, if neither is written, nor a copy in
        between.
        """
        original = self.source(v)
        cast = self.maker.get(original) if original is not None else None
        if cast is None or not cast.is_op("cast") or cast.host:
            return None
        source: Value = cast.arguments["t"]
        is_wider = source.spec.dtype in NARROW and v.spec.dtype is dtypes.float32
        return source if is_wider and not self.is_written(source) else None

    def only_cast(self, v: Value, dtype: dtypes.dtype) -> Optional[List[Value]]:
        """The value and its copies up to a cast to a type, if nothing else uses or writes any of
        them.
        """
        chain = [v]
        while self.is_used_once(v):
            (user,) = self.users[v]
            if user.kind != "copy":
                return chain if user.is_op("cast") and user.outputs[0].spec.dtype is dtype else None
            (v,) = user.outputs
            chain.append(v)
        return None


def _needed(block: Block) -> List[Instr]:
    """A block's instructions without those whose results nobody needs, and that do nothing else."""
    needed, found = set(block.outputs), []
    for instr in reversed(block.instrs):
        does_more = instr.kind != "copy"
        if instr.definition is not None:
            does_more = bool(instr.definition.alias or instr.definition.writes or instr.effects)
        if does_more or not needed.isdisjoint(instr.outputs):
            found.append(instr)
            needed.update(instr.inputs())
    return found[::-1]

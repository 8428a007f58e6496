"""Definitions and uses of the values of a block."""

from collections.abc import Sequence

from popxl import dtypes
from popxl.tensor import Constant

from popxl_engine.analysis.aliases import MustAlias
from popxl_engine.ir import Block, Instr, Value
from popxl_engine.stochastic import HALF_DTYPES


class DefUse:
    """Makers and users of a block's values, in order."""

    def __init__(self, block: Block):
        self.maker: dict[Value, Instr] = {}
        self.users: dict[Value, list[Instr]] = {}
        self.position: dict[Instr, int] = {}
        self.outputs = frozenset(block.outputs)
        self.constants: dict[Value, Constant] = {v: c for c, v in block.constants.items()}
        self.aliases = block.find(MustAlias)
        for position, instr in enumerate(block.instrs):
            self.position[instr] = position
            for v in instr.outputs:
                self.maker[v] = instr
            for v in instr.inputs():
                self.users.setdefault(v, []).append(instr)

    def is_written(self, v: Value) -> bool:
        """Whether anything in the block writes the value's storage, or may."""
        return self.aliases.is_written(v)

    def is_used_once(self, v: Value) -> bool:
        """Whether one instruction sees a value, and nothing writes it."""
        return len(self.users.get(v, ())) == 1 and v not in self.outputs and not self.is_written(v)

    def source(self, v: Value) -> Value | None:
        """What a value is a copy of, if none of the copies is written, nor it."""
        while not self.is_written(v):
            maker = self.maker.get(v)
            if maker is None or maker.kind != "copy":
                return v
            v = maker.arguments["t"]
        return None

    def readers(self, values: Sequence[Value]) -> list[Instr] | None:
        """What sees any of these values, or copies of them; None where one leaves the block."""
        found: list[Instr] = []
        seen = list(values)
        for v in seen:  # it grows
            if v in self.outputs:
                return None
            for user in self.users.get(v, ()):
                if user.kind == "copy":
                    seen += user.outputs
                elif user not in found:
                    found.append(user)
        return found

    def upcast_source(self, v: Value) -> Value | None:
        """The 16-bit value that ``v`` is a cast of, if neither is written, nor a copy in
        between.
        """
        original = self.source(v)
        cast = self.maker.get(original) if original is not None else None
        if cast is None or not cast.is_op("cast") or cast.host:
            return None
        source: Value = cast.arguments["t"]
        is_wider = source.spec.dtype in HALF_DTYPES and v.spec.dtype is dtypes.float32
        return source if is_wider and not self.is_written(source) else None

    def only_cast(self, v: Value, dtype: dtypes.dtype) -> list[Value] | None:
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

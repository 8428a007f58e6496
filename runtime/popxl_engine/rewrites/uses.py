"""What rules for blocks need to know: who makes a value, who uses it, and whether anything writes it."""

from typing import Dict, Iterator, List, Optional, Set

from popxl import dtypes

from popxl_engine.aliasing import storage_groups
from popxl_engine.blocks import Block, Instr, Value
from popxl_engine.stochastic import NARROW


class Uses:
    """Who makes and who uses the values of a block, and which of them are written."""

    def __init__(self, block: Block):
        self.maker: Dict[Value, Instr] = {}
        self.users: Dict[Value, List[Instr]] = {}
        self.groups = storage_groups(block)
        self.written: Set[Value] = set()
        self.kept = set(block.outputs)
        for instr in block.instrs:
            self.maker.update(dict.fromkeys(instr.outputs, instr))
            self.written |= {self.groups.get(v, v) for v in (*instr.written(), *instr.lent())}
            for v in instr.inputs():
                self.users.setdefault(v, []).append(instr)

    def is_written(self, v: Value) -> bool:
        """Whether anything in the block writes the value's storage, or may."""
        return self.groups.get(v, v) in self.written

    def copied_from(self, v: Value) -> Iterator[Value]:
        """The value, and what it is a copy of, one after the other."""
        yield v
        while v in self.maker and self.maker[v].kind == "copy":
            v = self.maker[v].arguments["t"]
            yield v

    def widened(self, v: Value) -> Optional[Value]:
        """The 16-bit value that ``v`` is a cast of, if neither is written, nor a copy in between."""
        chain = list(self.copied_from(v))
        cast = self.maker.get(chain[-1])
        if cast is None or cast.definition is None or cast.definition.name != "cast" or cast.host:
            return None
        source: Value = cast.arguments["t"]
        narrow = source.spec.dtype in NARROW and v.spec.dtype is dtypes.float32
        return source if narrow and not any(self.is_written(x) for x in (source, *chain)) else None

    def only_cast(self, v: Value, dtype: dtypes.dtype) -> Optional[List[Value]]:
        """The value and its copies up to a cast to a type, if nothing else uses or writes any of them."""
        chain = [v]
        while True:
            v = chain[-1]
            users = self.users.get(v, [])
            if len(users) != 1 or v in self.kept or self.is_written(v):
                return None
            if users[0].kind == "copy":
                chain.append(users[0].outputs[0])
                continue
            definition = users[0].definition
            is_cast = definition is not None and definition.name == "cast" and users[0].outputs[0].spec.dtype is dtype
            return chain if is_cast else None

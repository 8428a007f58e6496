"""Python source, line by line, with the objects that it names."""

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from popxl_engine.ir import Instr


def comment(text: str) -> str:
    """A comment of one line, whatever characters users have put into its text."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return f"# {text}"


@dataclass
class Source:
    """Generated source for a device with what it refers to, and the instruction of each line."""

    device: torch.device
    stochastic_rounding: bool
    """Updates of 16-bit tensors are rounded stochastically."""
    kernels: str
    """The type of device whose kernels are called."""
    collective_sites: int = 0
    """Collectives written so far."""
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

    def local(self, prefix: str) -> str:
        """A name for a local variable, which no value and no object has."""
        return f"{prefix}_{len(self.lines)}v"

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

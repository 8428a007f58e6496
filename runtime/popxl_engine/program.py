"""A compiled program: generated source, loaded, with a way back from its lines to the user's
ops.
"""

import copy
import linecache
import weakref
from typing import Any

from popxl.collection import without_collection

from popxl_engine.analysis.effects import effects_of
from popxl_engine.cache import cache_folder, save_source
from popxl_engine.codegen import SourceGenerator
from popxl_engine.compiler import Compiled
from popxl_engine.ir import Block
from popxl_engine.kernels.dtypes import as_array
from popxl_engine.machine.lockstep import ReplicaRun
from popxl_engine.machine.replica import Replica
from popxl_engine.passes import CPU


class Program:
    """A compiled program as one Python function per block."""

    def __init__(self, compiled: Compiled):
        options = compiled.ir._pb_ir.getSessionOptions()
        self.stochastic_rounding = bool(options.enableStochasticRounding)
        self._folder = cache_folder(options)
        self.device, self.block = compiled.device, compiled.block
        with without_collection():
            title = f"<popxl program {compiled.ir.id}>"
            self._write(SourceGenerator(self.device, self.stochastic_rounding), title)

    def written_by(self, generator: SourceGenerator, block: Block | None = None) -> "Program":
        """The same instructions as another generator writes them, or those of another block that
        does the same.
        """
        other = copy.copy(self)
        other.block = self.block if block is None else block
        other._write(generator, f"{self.filename} by {type(generator).__name__}")
        return other

    def _write(self, generator: SourceGenerator, title: str) -> None:
        """Write and load the source. ``title``: its name in stack traces, where it is not in the
        cache folder.
        """
        name = generator.function(self.block)
        self.source = generator.source
        path = save_source(self._folder, self.source.text()) if self._folder is not None else None
        self.filename = title if path is None else str(path)
        self._main = self.source.load(self.filename, self.source.names)[name]
        if path is None:
            weakref.finalize(self, linecache.cache.pop, self.filename, None)
        self._yields = effects_of(self.block).synchronizes

    def start(self, replica: Replica) -> ReplicaRun:
        """The program on one replica, as a generator that yields at collectives."""
        for t, value in self.block.state.items():  # another part may have it elsewhere
            where = CPU if value.host else self.device
            replica.state[t] = replica.state[t].to(where)
        state: list[Any] = [
            as_array(replica.state[t]) if value.host else replica.state[t]
            for t, value in self.block.state.items()
        ]
        try:
            if self._yields:
                yield from self._main(replica, *state)
            else:
                self._main(replica, *state)
        except Exception as error:
            self._locate(error)
            raise

    def _locate(self, error: Exception) -> None:
        """Put the op that failed in front of an error's message."""
        found = self.source.instr_of(error, self.filename)
        if found is None or found.source is None or getattr(error, "located", False):
            return
        error.args = (f"while executing {found.source.described}: {error}",)
        error.located = True  # type: ignore[attr-defined]

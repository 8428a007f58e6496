"""The place of the rows and activations of a way to execute a model, if they fit this machine."""

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import popdist
import popxl

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.block_graphs import stretches
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.planning.axes import ROWS
from popxl_gpt.execution.planning.memory import (
    LOADED_TO_PAGE,
    Build,
    ProcessMemory,
    file_bytes,
    is_paged,
    least_rows,
    own_bytes,
    process_memory,
    programs_of,
)
from popxl_gpt.execution.recomputation import stretches_text
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import gather, host_bytes
from popxl_gpt.utils.units import bytes_text

KEPT_FREE = 0.1
"""Share of the free memory that no run is planned to take: plans are within 5 % of runs, and other
programs need some.
"""

LEAST_TOKENS = 65536
"""Tokens of a group of micro-batches at least, over all replicas, where weights come and go: it
moves twice 2 bytes of each, and twice 4 of its gradient: at 50 GB/s that takes as long as 8
operations of 18,000 tokens at 600 TFLOP/s.
"""


@dataclass(frozen=True)
class Placed:
    """A configuration that fits, and what a process of it takes."""

    config: Config
    memory: ProcessMemory
    why: str
    """The place of its rows, with the reason."""


@dataclass(frozen=True)
class Room:
    """What a process may take here.

    Attributes:
        own: bytes of this process by the first step of a run with rows in memory, beside rows and
            tensors.
        nbytes: bytes that one process may have resident in all.
    """

    build: Build
    validation: Build | None
    given: frozenset[str]
    own: int
    nbytes: int

    @classmethod
    def of(cls, build: Build, validation: Build | None, given: frozenset[str]) -> "Room":
        """The room of this process as it is now."""
        own, (_, left, _) = own_bytes(), host_bytes()
        room = resident_bytes() + int((1 - KEPT_FREE) * left) // processes_here()
        return cls(build, validation, given, own, room)

    def place(self, config: Config) -> Placed | str:
        """The configuration with a place for its rows; else why it does not fit. One whose
        activations do not fit runs in groups of micro-batches; else one that keeps the activations
        of all blocks keeps those of as many as fit.
        """
        in_memory = not any(name in self.given for name in ROWS.settings)
        if in_memory:
            config = override(config, **dict.fromkeys(ROWS.settings))
        memory = self._memory(config)
        if memory.needed <= self.nbytes:
            return Placed(config, memory, f"fits: {bytes_text(memory.needed)} of {self._told}")
        for smaller in (self._in_groups, self._keeping_some):
            if (found := smaller(config, memory)) is not None:
                return found
        if not in_memory:
            return self._too_large(memory)
        return self._in_files(config, memory)

    def _in_groups(self, config: Config, memory: ProcessMemory) -> Placed | None:
        """The configuration with the largest groups of micro-batches that fit."""
        if "micro_batch_group" in self.given:
            return None
        ways = _grouped(config)
        if not ways or (least := self._memory(ways[-1])).needed > self.nbytes:
            return None
        fewest = ways[-1].runs_per_phase
        of_a_run = (memory.needed - least.needed) / (config.runs_per_phase - fewest)
        for way in ways[:-1]:
            if least.needed + of_a_run * (way.runs_per_phase - fewest) <= self.nbytes:
                found = self._memory(way)
                if found.needed <= self.nbytes:
                    return self._of_groups(way, found, memory)
        return self._of_groups(ways[-1], least, memory)

    def _of_groups(self, way: Config, found: ProcessMemory, whole: ProcessMemory) -> Placed:
        why = (
            f"fits in {way.groups} groups of micro-batches, as {bytes_text(whole.needed)} for all "
            f"of them at once do not fit {self._told}"
        )
        return Placed(way, found, why)

    def _keeping_some(self, config: Config, memory: ProcessMemory) -> Placed | None:
        """The configuration with activations of as many blocks kept as fit, if it keeps those of
        all: the others compute theirs again.
        """
        if config.execution.recomputation or "recomputation" in self.given:
            return None
        least = override(config, recomputation=True)
        replicas = config.execution.replication_factor // popdist.getNumInstances()
        left = self.nbytes - self._memory(least).needed
        for _ in range(2):  # what computes them takes tensors, too, which the first plan tells
            if left < replicas:
                return None
            some = override(least, activation_memory=left // replicas)
            kept = stretches(some)
            if kept[-1].level.kept_bytes == 0:
                return None
            found = self._memory(some)
            if found.needed <= self.nbytes:
                why = (
                    f"fits where {stretches_text(kept)}, as {bytes_text(memory.needed)} with all "
                    f"activations do not fit {self._told}"
                )
                return Placed(some, found, why)
            left -= found.needed - self.nbytes
        return None

    def _in_files(self, config: Config, memory: ProcessMemory) -> Placed | str:
        """The configuration with its rows in files of the folder of runs."""
        rows = self.nbytes - (memory.resident - memory.rows) - LOADED_TO_PAGE
        if rows < least_rows(config, popdist.getNumInstances()):
            return self._too_large(memory)
        folder = Path(config.logging.run_folder)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free, needed = shutil.disk_usage(there).free, file_bytes(self._programs(config))
        if needed > free:
            return (
                f"rows of {bytes_text(needed)} fit neither memory nor the {bytes_text(free)} that "
                f"are free in {folder}"
            )
        in_files = override(config, memmap_dir=str(folder), host_memory=rows)
        found = self._memory(in_files)
        if found.resident > self.nbytes:
            return self._too_large(found)
        why = (
            f"rows in files of {folder}, as {bytes_text(memory.resident)} do not fit {self._told}; "
            f"{bytes_text(rows)} of them in memory"
        )
        return Placed(in_files, found, why)

    def _too_large(self, memory: ProcessMemory) -> str:
        return f"needs {bytes_text(memory.needed)} of {self._told}"

    @property
    def _told(self) -> str:
        return f"the {bytes_text(self.nbytes)} that a process may take"

    def _memory(self, config: Config) -> ProcessMemory:
        return process_memory(config, self._programs(config), self.own)

    def _programs(self, config: Config) -> list[popxl.Ir]:
        return programs_of(config, self.build, self.validation)


def _grouped(config: Config) -> list[Config]:
    """The configuration in groups of micro-batches, the largest first. Where weights come and go
    no group is so small that they take longer than what is computed with them.
    """
    count, tokens = config.gradient_accumulation, config.tokens_per_step
    ways = []
    for groups in range(2, count + 1):
        if is_paged(config.execution) and tokens // groups < LEAST_TOKENS:
            break
        if count % groups == 0:
            with suppress(ConfigError):  # stages of a batch that grows, say, are no whole groups
                ways.append(override(config, micro_batch_group=count // groups))
    return ways


def placed_together(room: Room, config: Config) -> Placed | str:
    """What `Room.place` finds in all processes of a run."""
    found = room.place(config)
    reason = found if isinstance(found, str) else ""
    if problems := [told for told in gather(reason, patiently=True) if told]:
        return str(problems[0])
    assert isinstance(found, Placed)
    execution = found.config.execution
    kept = execution.activation_memory or (0 if execution.recomputation else math.inf)
    mine = (execution.host_memory or 0, kept, found.config.runs_per_phase)
    rows, budgets, runs = zip(*gather(mine, patiently=True))
    shared = {}
    if min(rows) != max(rows):
        shared["host_memory"] = min(rows)
    if min(budgets) != max(budgets):
        shared |= {"recomputation": True, "activation_memory": min(budgets)}
    if min(runs) != max(runs):
        shared["micro_batch_group"] = min(runs) * execution.widening
    if shared.get("host_memory") == 0:
        return "fits the memory of some processes only"
    return replace(found, config=override(found.config, **shared))

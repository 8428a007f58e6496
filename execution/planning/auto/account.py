"""Whether a way to execute a model fits this machine's memory, and where its rows go."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import popdist

from popxl_gpt.config.presets import override
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.instances import processes_here
from popxl_gpt.execution.layer_graphs import kept_layers
from popxl_gpt.execution.planning.auto.candidates import CHOSEN
from popxl_gpt.execution.planning.memory import least_rows
from popxl_gpt.execution.planning.plan.process import (
    LOADED_TO_PAGE,
    Build,
    ProcessMemory,
    paging_bytes,
    process_memory,
    programs_of,
    unpaged_bytes,
    without_files,
)
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import host_bytes, planner
from popxl_gpt.utils.units import bytes_text

MEMORY = ("memmap_dir", "host_memory")
assert set(MEMORY) <= set(CHOSEN)
KEPT_FREE = 0.1
"""Share of the free memory that no run is planned to take: plans are within 5 % of runs, and other
programs need some.
"""


@dataclass(frozen=True)
class Placed:
    """A configuration that fits, and what a process of it takes."""

    config: Config
    memory: ProcessMemory
    why: str
    """Where its rows are, with the reason."""


@dataclass(frozen=True)
class Account:
    """What a process may take here.

    Attributes:
        own: bytes of this process by the first step of a run with rows in memory, beside rows and
            tensors.
        room: bytes that one process may have resident in all.
    """

    build: Build
    validation: Build | None
    given: frozenset[str]
    own: int
    room: int

    @classmethod
    def of(cls, build: Build, validation: Build | None, given: frozenset[str]) -> "Account":
        """The account of this process as it is now."""
        own, (_, left, _) = unpaged_bytes(), host_bytes()
        room = resident_bytes() + int((1 - KEPT_FREE) * left) // processes_here()
        return cls(build, validation, given, own, room)

    def place(self, config: Config) -> Placed | str:
        """The configuration with a place for its rows; else why it does not fit. One that keeps the
        activations of all blocks, and more than fits, keeps those of as many as fit.
        """
        in_memory = not any(name in self.given for name in MEMORY)
        if in_memory:
            config = override(config, memmap_dir=None, host_memory=None)
        memory = self._memory(config)
        if memory.needed <= self.room:
            return Placed(config, memory, f"fits: {bytes_text(memory.needed)} of {self._room}")
        if (found := self._keeping_some(config, memory)) is not None:
            return found
        if not in_memory:
            return self._too_large(memory)
        return self._in_files(config, memory)

    def _keeping_some(self, config: Config, memory: ProcessMemory) -> Placed | None:
        """The configuration with activations of as many blocks kept as fit, if it keeps those of
        all: the others compute theirs again.
        """
        if config.execution.recomputation or "recomputation" in self.given:
            return None
        least = override(config, recomputation=True)
        replicas = config.execution.replication_factor // popdist.getNumInstances()
        left = self.room - self._memory(least).needed
        for _ in range(2):  # what computes them takes tensors, too, which the first plan tells
            if left < replicas:
                return None
            some = override(least, activation_memory=left // replicas)
            if (kept := kept_layers(some)) == 0:
                return None
            found = self._memory(some)
            if found.needed <= self.room:
                why = (
                    f"fits with the activations of {kept} of {config.model.layers} blocks kept, as "
                    f"{bytes_text(memory.needed)} with those of all do not fit {self._room}"
                )
                return Placed(some, found, why)
            left -= found.needed - self.room
        return None

    def _in_files(self, config: Config, memory: ProcessMemory) -> Placed | str:
        """The configuration with its rows in files of the folder of runs."""
        rows = self.room - (memory.resident - memory.rows) - LOADED_TO_PAGE
        if rows < least_rows(config, popdist.getNumInstances()):
            return self._too_large(memory)
        folder = Path(config.logging.run_folder)
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free, needed = shutil.disk_usage(there).free, self._file_bytes(config)
        if needed > free:
            return (
                f"rows of {bytes_text(needed)} fit neither memory nor the {bytes_text(free)} that "
                f"are free in {folder}"
            )
        in_files = override(config, memmap_dir=str(folder), host_memory=rows)
        found = self._memory(in_files)
        if found.resident > self.room:
            return self._too_large(found)
        why = (
            f"rows in files of {folder}, as {bytes_text(memory.resident)} do not fit {self._room}; "
            f"{bytes_text(rows)} of them in memory"
        )
        return Placed(in_files, found, why)

    def _too_large(self, memory: ProcessMemory) -> str:
        return f"needs {bytes_text(memory.needed)} of {self._room}"

    @property
    def _room(self) -> str:
        return f"the {bytes_text(self.room)} that a process may take"

    def _memory(self, config: Config) -> ProcessMemory:
        ir = self.build(without_files(config))[0]
        return process_memory(config, self.own + paging_bytes(config), ir, self.validation)

    def _file_bytes(self, config: Config) -> int:
        """Bytes of files that the processes of this machine make."""
        training, rows = self.build(without_files(config))[0], 0
        for ir in programs_of(config, training, self.validation):
            found = planner().plan(ir, with_peaks=False)
            rows += found.remote_memory_bytes * ir.instance_replication_factor
        return rows * processes_here()

"""The memory of a run's process, measured after each call of the session."""

from typing import Any

from popxl_gpt.demo.job.part import Call, Job, Part, RunState
from popxl_gpt.utils.process_memory import resident_bytes
from popxl_gpt.utils.runtime import release_freed_memory


class ResidentMemory(Part):
    """Notes the resident set; gives back what loading and compiling a program took."""

    def __init__(self, run: RunState, job: Job):
        super().__init__(run, job)
        self._memory, self._bytes = job.memory, resident_bytes()

    def called(self, call: Call) -> None:
        """Measure it."""
        if call.is_first:
            release_freed_memory()  # what loading and compiling took
        self._bytes = resident_bytes()

    def fields(self) -> "dict[str, Any]":
        """Bytes of instance 0's process."""
        return {"memory_bytes": self._bytes}

    def end(self) -> None:
        """Note what training has come to, before the process does something else."""
        self._memory.end(self._bytes)

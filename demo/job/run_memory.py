"""The resident set of a run's first process: as it was planned, and as it was."""

import time
from dataclasses import replace

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.inference.inference import evaluation_program
from popxl_gpt.execution.planning.memory import (
    ProcessMemory,
    own_bytes,
    process_memory,
    programs_of,
)
from popxl_gpt.execution.pretraining import training_program
from popxl_gpt.utils.process_memory import peak_resident_bytes, resident_bytes
from popxl_gpt.utils.runtime import expect_session
from popxl_gpt.utils.units import bytes_text

PLANNED_AFTER = 180.0
"""Seconds of training after which the seconds that a plan takes are few."""


class RunMemory:
    """The memory of the process, from before the session is made. ``planned``: what the process was
    to take, beside itself, where that was planned already.
    """

    def __init__(self, config: Config, planned: ProcessMemory | None):
        device, precision = config.execution.device, config.model.precision
        expect_session(device, precision)  # before PyTorch is loaded, which is long
        self._config, self._plan = config, planned
        self.itself, self._begin = own_bytes(planned is not None), time.monotonic()
        """`itself`: bytes of the process beside the state, as `own_bytes` tells."""
        self._measured = self._peak = 0

    def end(self, resident: int) -> None:
        """Note what training has come to, before the process does something else.

        Args:
            resident: bytes of the process after the last step.
        """
        self._measured, self._peak = max(resident, resident_bytes()), peak_resident_bytes()

    def text(self) -> str:
        """What was measured, and beside it what was to be expected, where that is planned."""
        planned, beside = self._planned(), ""
        if planned is not None:
            more = self._measured / planned.resident - 1
            beside = f", {bytes_text(planned.resident)} planned ({more:+.1%})"
        peak = bytes_text(self._peak)
        return f"{bytes_text(self._measured)} resident{beside}; {peak} at its peak"

    def _planned(self) -> ProcessMemory | None:
        if self._plan is not None:
            return replace(self._plan, itself=self.itself)
        if time.monotonic() - self._begin < PLANNED_AFTER:
            return None
        programs = programs_of(self._config, training_program, evaluation_program)
        return process_memory(self._config, programs, self.itself)

"""Records runs of a program, and reads them afterwards."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from popxl.ir import Ir
from popxl.profile import Profile

from popxl_engine.codegen import PhaseMarks
from popxl_engine.machine.machine import Machine
from popxl_engine.planner.phases import entries
from popxl_engine.profiler.files import watched
from popxl_engine.profiler.memory import MemoryWatch
from popxl_engine.profiler.probes import ProbedGenerator
from popxl_engine.profiler.reading import Log, Reading
from popxl_engine.profiler.sites import ProbeSite, Sites
from popxl_engine.program import Program


class Recorder:
    """A program with probes, to run in place of one without, and the logs of its runs."""

    def __init__(self, ir: Ir, program: Program, machine: Machine):
        self._ir, self._machine = ir, machine
        self._memory = MemoryWatch(machine, program)
        self._generator = ProbedGenerator(
            ir.replication_factor,
            program.device,
            program.stochastic_rounding,
            PhaseMarks(entries(ir, program.block), self._memory.enter),
        )
        self.program = program.written_by(self._generator)
        self._logs: list[Log] = []

    @contextmanager
    def run(self) -> Iterator[None]:
        """A block around a run of the program; one that fails leaves nothing."""
        log, rows = self._generator.log, self._generator.rows
        del log[:], rows[:]
        begin = time.perf_counter_ns()
        to_system = time.time_ns() - begin
        with watched(self._machine) as transfers, self._memory.run():
            yield
        moments = log[:]
        moments[1::2] = self._generator.clock.times(log[1::2])
        self._logs.append(
            Log(
                begin,
                time.perf_counter_ns(),
                to_system,
                moments,
                rows[:],
                transfers[:],
                self._memory.phases(),
            )
        )

    def take(self) -> list[Profile]:
        """What the runs did since the last time."""
        logs, self._logs = self._logs, []
        return [
            Reading(self._sites, self._probe_sites, self._generator.unpacked, log).profile()
            for log in logs
        ]

    @cached_property
    def _sites(self) -> Sites:
        return Sites(self._ir, self.program.block)

    @cached_property
    def _probe_sites(self) -> list[ProbeSite]:
        return [self._sites.of(probe) for probe in self._generator.probes]

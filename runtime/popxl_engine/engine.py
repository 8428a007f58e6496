"""The engine behind a Session: the machine with the program's state, and the program that runs on
it.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from popdist.exchange import difference
from popxl.ir import Ir
from popxl.not_finite import NotFinite
from popxl.opdef import Op
from popxl.printer import to_text
from popxl.profile import Profile, RunTimes
from popxl.remote_files import FileTraffic
from popxl.streams import Stream
from popxl.tensor import Variable

from popxl_engine import compiler
from popxl_engine.checks import check_executable
from popxl_engine.forks import check_threads
from popxl_engine.interpreter import Cell, Interpreter, groups_that_meet
from popxl_engine.kernels.dtypes import from_numpy, torch_dtype
from popxl_engine.machine import rng_path
from popxl_engine.machine.allocator import keep_freed_memory, keep_tensors_together
from popxl_engine.machine.device import PROCESSOR, Device, device_named
from popxl_engine.machine.fabric import Fabric
from popxl_engine.machine.laps import Laps
from popxl_engine.machine.lockstep import ReplicaRun, run_lockstep
from popxl_engine.machine.machine import Machine
from popxl_engine.machine.memory import copy_apart
from popxl_engine.machine.replica import Replica, as_tensor
from popxl_engine.passes import Pass, enabled_passes
from popxl_engine.profiler import Recorder
from popxl_engine.profiler.clock import clock_of
from popxl_engine.program import Program
from popxl_engine.residency import lifetimes_of, paging_of
from popxl_engine.shards import shardings
from popxl_engine.watching import Watcher

logger = logging.getLogger("popxl")

Arrays = Mapping[Stream, np.ndarray]


class Engine:
    """Runs one frozen Ir.

    Args:
        passes: of the compiler; None: the interpreter runs the program, op by op, copying always.
        device: where tensors live and kernels run.
        fill: move the variables' host values into the machine; without it they must be written
            before the first run.
        adopt_files: let writable memory-mapped variables be changed in their files by every run.
    """

    def __init__(
        self,
        ir: Ir,
        replicas: range,
        passes: Sequence[Pass] | None,
        device: Device = PROCESSOR,
        fill: bool = True,
        adopt_files: bool = True,
    ):
        check_executable(ir)
        self.ir, self.device = ir, device
        self.run_count = 0
        self._around_run: Callable[[], AbstractContextManager[None]] = nullcontext
        self._recorder: Recorder | None = None
        self._parts, self._is_uploaded = compiler.ops_by_run(ir), True

        self.compile_seconds = 0.0
        """Seconds that the compiler took, from the graphs to code."""

        def compiled(ops: frozenset[Op]) -> Program:
            begin = time.perf_counter()
            program = Program(compiler.compile(ir, device.where, passes, ops))
            self.compile_seconds += time.perf_counter() - begin
            return program

        parts, is_compiled = self._parts, passes is not None
        self.program = compiled(parts.run) if is_compiled else None
        self._after_upload = (
            compiled(parts.after_upload) if parts.after_upload and is_compiled else None
        )
        self._before_download = (
            compiled(parts.before_download) if parts.before_download and is_compiled else None
        )
        several = len(replicas) < ir.replication_factor
        self.fabric = (
            Fabric(ir.replication_factor, replicas, device.where, groups_that_meet(ir))
            if several
            else None
        )
        block = None if self.program is None else self.program.block
        apart = [p.block for p in (self._after_upload, self._before_download) if p is not None]
        if device is PROCESSOR:
            keep_tensors_together(waits=False)  # the first run does
        paging = paging_of(ir, block, apart, device, len(replicas))
        lifetimes = lifetimes_of(ir, block, apart, device)
        self.machine = Machine(ir.remote_buffers, replicas, self.fabric, paging, device, lifetimes)
        if self.fabric is not None:
            check_same_program(ir, passes)
        self.laps = Laps(clock_of(device.where), self._rows_waited)
        for replica in self.machine.replicas:
            replica.laps = self.laps
        for tensor in ir.main_graph.retained:
            self.machine.keep(tensor)
        for variable in ir.main_graph.variables if fill else ():
            self.machine.take_over(variable, adopt_files)

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Run the main graph once on every replica of this process.

        Arrays are ``[transfers, replicas in this process, *stream.shape]``; the slots of outputs
        that are stored to are filled.
        """
        keep_freed_memory()
        if self.device is PROCESSOR:
            keep_tensors_together()
        programs: dict[int, ReplicaRun] = {}
        after_upload: dict[int, ReplicaRun] = {}
        received: list[tuple[torch.Tensor, torch.Tensor]] = []
        for position, replica in enumerate(self.machine.replicas):
            device_inputs = {
                stream: as_tensor(array[:, position]).to(
                    self.device.where, torch_dtype(stream.dtype)
                )
                for stream, array in inputs.items()
            }
            results = {stream: from_numpy(array[:, position]) for stream, array in outputs.items()}
            device_outputs = {
                stream: array.to(self.device.where) for stream, array in results.items()
            }
            received += zip(results.values(), device_outputs.values())
            replica.begin(device_inputs, device_outputs, rng_path.of_run(self.run_count))
            programs[replica.index] = self._program(replica, self.program, self._parts.run)
            if self._parts.after_upload and self._is_uploaded:
                after_upload[replica.index] = self._program(
                    replica, self._after_upload, self._parts.after_upload
                )
        with torch.no_grad(), self._on_device(), self.machine.turn():
            if after_upload:  # not in a run, whose rows come in an order that is known
                run_lockstep(after_upload, self.fabric)
            with self.laps.run(), self.machine.run(), self._around_run():
                run_lockstep(programs, self.fabric, self.laps)
        self._is_uploaded = False
        for array, on_device in received:
            copy_apart(array, on_device)
        self.run_count += 1

    def upload(self) -> None:
        """Note that the variables are the host's: ops that run after an upload run before the next
        run.
        """
        self._is_uploaded = True

    def finish(self) -> None:
        """Run what runs before a download of what runs have changed. Every process must call it."""
        ops = self._parts.before_download
        if not ops:
            return
        programs: dict[int, ReplicaRun] = {}
        for replica in self.machine.replicas:
            replica.begin({}, {}, rng_path.of_run(self.run_count))
            programs[replica.index] = self._program(replica, self._before_download, ops)
        with torch.no_grad(), self._on_device(), self.machine.turn():
            run_lockstep(programs, self.fabric)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """A block around a run. The interpreter makes its tensors where PyTorch's default is."""
        interprets = self.program is None
        with self.device.running(), self.device.where if interprets else nullcontext():
            yield

    def _program(
        self, replica: Replica, program: Program | None, ops: Collection[Op]
    ) -> ReplicaRun:
        return self._interpreted(replica, ops) if program is None else program.start(replica)

    def _interpreted(self, replica: Replica, ops: Collection[Op]) -> ReplicaRun:
        """The main graph, or these ops of it, on copies of the variables, which are written back at
        the end.
        """
        sharding = shardings(self.ir)
        cells = {
            tensor: Cell.new(value, sharding.get(tensor)) for tensor, value in replica.state.items()
        }
        stochastic_rounding = bool(self.ir._pb_ir.getSessionOptions().enableStochasticRounding)
        yield from Interpreter(replica, stochastic_rounding, sharding, ops).graph(
            self.ir.main_graph, [], cells
        )
        for tensor, cell in cells.items():
            replica.state[tensor].copy_(cell.read())

    def _compiled(self, what: str) -> Program:
        if self.program is None:
            raise RuntimeError(
                f"{what}: got a session that interprets its program; expected a compiled "
                "one. Unset POPXL_INTERPRET."
            )
        return self.program

    @contextmanager
    def _running(
        self, program: Program, around_run: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Run another program in place of the plain one, with this around each run."""
        plain = self.program, self._around_run
        self.program, self._around_run = program, around_run
        try:
            yield
        finally:
            self.program, self._around_run = plain

    @contextmanager
    def profile(self) -> Iterator[list[Profile]]:
        """See `popxl.extensions.profile`."""
        plain = self._compiled("profile")
        recorder = self._recorder = self._recorder or Recorder(self.ir, plain, self.machine)
        profiles: list[Profile] = []
        try:
            with self._running(recorder.program, recorder.run):
                yield profiles
        finally:
            profiles += recorder.take()

    @contextmanager
    def watch(self) -> Iterator[list[NotFinite]]:
        """See `popxl.extensions.find_not_finite`."""
        watcher = Watcher(self.ir, self._compiled("find_not_finite"))
        found: list[NotFinite] = []
        try:
            with self._running(watcher.program, self._around_run):
                yield found
        finally:
            found += watcher.not_finite()

    def read(self, variable: Variable) -> np.ndarray:
        """A new array with a variable's current value, in its host shape. Every process must call
        it.
        """
        return self.machine.read(variable)

    def digests(self, variables: Sequence[Variable]) -> list[list[str]]:
        """See `popxl.extensions.replica_digests`."""
        return [
            [self.machine.digest(variable, replica) for variable in variables]
            for replica in self.machine.replicas
        ]

    def write(self, variable: Variable, data: np.ndarray) -> None:
        """Set a variable from an array of its host shape."""
        self.machine.write(variable, data)

    def file_traffic(self) -> FileTraffic | None:
        """See `popxl.extensions.file_traffic`."""
        if not self.machine.caches:
            return None
        total = FileTraffic()
        for cache in self.machine.caches:
            total.add(cache.transfers.traffic)
        return total

    def _rows_waited(self) -> float:
        return sum(cache.transfers.traffic.waited for cache in self.machine.caches)

    def run_times(self) -> RunTimes:
        """See `popxl.extensions.run_times`."""
        laps = self.laps
        return RunTimes(laps.seconds(), laps.waited_for_rows, laps.waited_for_others)

    def is_file(self, variable: Variable) -> bool:
        """Whether a memory-mapped variable's file is the memory that runs work on."""
        return variable in self.machine.files


def check_same_program(ir: Ir, passes: Sequence[Pass] | None) -> None:
    """RuntimeError if the processes of a run have built different programs. Every process must call
    it.
    """
    rounding = ir._pb_ir.getSessionOptions().enableStochasticRounding
    names = "none, interpreted" if passes is None else ", ".join(each.name for each in passes)
    text = f"{to_text(ir)}\ntransfers per run: {ir.num_host_transfers}\n"
    text += f"stochastic rounding: {rounding}\npasses: {names}\n"
    if found := difference(text):
        raise RuntimeError(
            f"Session: got different programs in the processes of one run: {found}; expected the "
            "same in all. Start them with the same code, configuration and environment."
        )


def make_engine(
    ir: Ir, replicas: range, device: str, fill: bool = True, adopt_files: bool = True
) -> Engine:
    """The engine for a frozen Ir on this process's replicas. ``device``: as `device_named` knows
    it. With ``POPXL_INTERPRET=1`` the interpreter runs the program.
    """
    check_threads("Session")
    where = device_named(device)
    interprets = os.environ.get("POPXL_INTERPRET", "0") not in ("", "0")
    passes = None if interprets else enabled_passes(where.where)
    return Engine(ir, replicas, passes, where, fill, adopt_files)

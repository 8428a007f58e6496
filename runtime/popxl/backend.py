"""The one door into the engine: what PopXL asks of one, and where it is loaded, by name.

`popxl` imports no engine, and so no torch: programs are built where neither is. Whatever needs an
engine asks `backend` for it.
"""

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from popdist.environment import threads

from popxl.collection import without_collection
from popxl.dtypes import dtype
from popxl.ir import Ir
from popxl.not_finite import NotFinite
from popxl.plan import Event, Machine, Move, Plan
from popxl.profile import Profile, RunTimes
from popxl.remote_files import DeviceNeeds, FileTraffic, HostNeeds
from popxl.streams import Stream
from popxl.tensor import Variable

BACKEND = "popxl_engine.backend"
"""A module with a `Backend` named ``BACKEND``. It loads torch."""
KERNELS = "popxl_engine.native.build"
"""A module that is a `Kernels`. It does not."""
SPINS = "GOMP_SPINCOUNT"
"""OpenMP's environment variable for how often a thread that waits looks before it sleeps."""
FEW = "10000"
"""Half a millisecond, or less: longer than Python takes from one kernel to the next, which would
wait for threads that sleep. OpenMP's own number is for milliseconds, of cores that others use too.
"""
WAITING = (SPINS, "OMP_WAIT_POLICY")
"""What users may have said about that."""
THREADS = "OMP_NUM_THREADS"
"""And for the number of threads."""


class DeviceValues(Protocol):
    """What an engine has of the variables."""

    def read(self, variable: Variable) -> np.ndarray:
        """A new array with a variable's value in its host shape."""

    def write(self, variable: Variable, data: np.ndarray) -> None:
        """Set a variable from an array of its host shape."""

    def digests(self, variables: Sequence[Variable]) -> list[list[str]]:
        """See `popxl.extensions.replica_digests`: for each replica of this process, of each
        variable.
        """

    def is_file(self, variable: Variable) -> bool:
        """Whether a memory-mapped variable's file is the memory that runs work on."""

    def upload(self) -> None:
        """Note that the variables are the host's: ops that run after an upload run before the next
        run.
        """

    def finish(self) -> None:
        """Run what runs before a download of what runs have changed."""


class Engine(DeviceValues, Protocol):
    """One program on its device, which a Session runs. Arrays are ``[transfers, replicas in this
    process, *stream.shape]``.
    """

    run_count: int
    """Runs so far; stochastic rounding draws from it, so that a resumed program goes on as if it
    had not stopped.
    """
    compile_seconds: float
    """Seconds that the compiler took."""

    def run(
        self, inputs: Mapping[Stream, np.ndarray], outputs: Mapping[Stream, np.ndarray]
    ) -> None:
        """Run the main graph once and fill the slots of the outputs that it stores to."""

    def profile(self) -> AbstractContextManager[list[Profile]]:
        """See `popxl.extensions.profile`."""

    def watch(self) -> AbstractContextManager[list[NotFinite]]:
        """See `popxl.extensions.find_not_finite`."""

    def file_traffic(self) -> FileTraffic | None:
        """See `popxl.extensions.file_traffic`."""

    def run_times(self) -> RunTimes:
        """See `popxl.extensions.run_times`."""


class Backend(Protocol):
    """What makes engines, and tells of programs and machines without running one."""

    def make_engine(
        self, ir: Ir, replicas: range, device: str, fill: bool = True, adopt_files: bool = True
    ) -> Engine:
        """The engine for a frozen Ir on this process's replicas.

        Args:
            device: as `check_device` knows it.
            fill: move the variables' host values into the machine; without it they must be
                written.
            adopt_files: let writable memory-mapped variables be changed in their files by every
                run.
        """

    def check_device(self, name: str) -> None:
        """See `popxl.extensions.check_device`."""

    def compiled_once(self, ir: Ir) -> AbstractContextManager[None]:
        """See `popxl.extensions.compiled_once`."""

    def device_needs(self, ir: Ir, device: str) -> DeviceNeeds:
        """See `popxl.extensions.device_needs`."""

    def host_needs(self, ir: Ir, mapped: bool) -> HostNeeds:
        """See `popxl.extensions.host_needs`."""

    def make_plan(
        self, ir: Ir, borrows_rows: bool, together: bool, device: str, with_peaks: bool
    ) -> Plan:
        """See `popxl.planning.plan`."""

    def sequence(self, ir: Ir, replica: int) -> Iterator[Event]:
        """See `popxl.planning.sequence`."""

    def moves(self, ir: Ir) -> Iterator[Move]:
        """See `popxl.planning.moves`."""

    def measure(self, data_type: dtype, device: str) -> Machine:
        """See `popxl.planning.measure`."""

    def multiply_ceiling(self, data_type: dtype, device: str, seconds: float) -> float:
        """See `popxl.planning.multiply_ceiling`."""

    def multiplies_bfloat16(self) -> bool:
        """See `popxl.planning.multiplies_bfloat16`."""

    def release_freed_memory(self) -> None:
        """See `popxl.extensions.release_freed_memory`."""

    def open_pickled(self, path: Path) -> Any:
        """See `popxl.extensions.open_pickled`."""


class Kernels(Protocol):
    """What takes long and can be made before the engine is loaded."""

    def begin(self, bfloat16: bool = False) -> None:
        """Begin to make it, in the background; for bfloat16, too, where that is asked for."""


def backend() -> Backend:
    """The engine's side of the door. OpenMP reads its environment when torch is loaded."""
    if not any(name in os.environ for name in WAITING):
        os.environ[SPINS] = FEW
    if BACKEND not in sys.modules:
        if (share := threads()) is not None:
            os.environ[THREADS] = str(share)
        with without_collection():
            importlib.import_module(BACKEND)
        # Nor are they gone through when the process ends, which gives all of its memory back.
        atexit.register(gc.freeze)
    return cast(Backend, sys.modules[BACKEND].BACKEND)


def kernels() -> Kernels:
    """The engine's compiled kernels."""
    return cast(Kernels, importlib.import_module(KERNELS))

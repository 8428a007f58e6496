"""What goes beyond PopXL. Applications reach it through one small module."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from popdist import exchange
from popdist.environment import count_here, expect_replicas, leave_note, read_note
from popdist.exchange import InstanceError
from poprun.environment import EnvironmentVariableError

from popxl.backend import backend
from popxl.dtypes import bfloat16, float8_e4m3fn, float8_e5m2, uint32
from popxl.errors import RemoteMemoryError
from popxl.graph import Graph
from popxl.host_limits import HostMemory, host_memory
from popxl.ir import Ir
from popxl.moments import MOMENTS, coded_length
from popxl.not_finite import NotFinite
from popxl.ops import concat, reshape
from popxl.ops.adamw_8bit import adamw_8bit_
from popxl.ops.attention import attention
from popxl.ops.collectives.wide import wide_all_reduce, wide_reduce_scatter
from popxl.ops.elementwise import relu2
from popxl.ops.float8 import amax, float8_matmul, to_float8
from popxl.ops.host import begin_lap
from popxl.ops.newton_schulz import newton_schulz
from popxl.ops.normalisation import rms_norm
from popxl.ops.random import jump_seed
from popxl.ops.transformer import geglu, rotary, short_convolution, softcap, swiglu
from popxl.ops.var_updates import adam_updater_at
from popxl.pickled import PickledFileError, PickledTensor
from popxl.plan import Event, Machine, Move, Phase, PhaseTime, Plan, phase_time
from popxl.planning import (
    kind_of_device,
    measure,
    moves,
    multiplies_bfloat16,
    multiply_ceiling,
    plan,
    sequence,
)
from popxl.printer import to_text
from popxl.profile import (
    FILES,
    LANES,
    PHASES,
    PhaseMemory,
    PhaseProfile,
    Profile,
    RunTimes,
    Span,
    Work,
    timeline,
)
from popxl.remote_files import (
    DeviceNeeds,
    FileTraffic,
    HostNeeds,
    keep_remote_memory_in_files,
    limit_device_memory,
)
from popxl.replica_grouping import shard_groups
from popxl.session import Session, expect_session
from popxl.session_state import keep_state_once
from popxl.tensor import Tensor, Variable
from popxl.verify import verify

__all__ = [
    "FILES",
    "LANES",
    "MOMENTS",
    "PHASES",
    "DeviceNeeds",
    "Event",
    "EnvironmentVariableError",
    "FileTraffic",
    "HostMemory",
    "HostNeeds",
    "InstanceError",
    "Machine",
    "Move",
    "NotFinite",
    "Phase",
    "PhaseMemory",
    "PhaseProfile",
    "PhaseTime",
    "PickledFileError",
    "PickledTensor",
    "Plan",
    "Profile",
    "RemoteMemoryError",
    "RunTimes",
    "Span",
    "Work",
    "adam_updater_at",
    "adamw_8bit_",
    "alternate_steps",
    "amax",
    "attention",
    "begin_lap",
    "bfloat16",
    "check_device",
    "coded_length",
    "compile_seconds",
    "compiled_once",
    "count_here",
    "device_needs",
    "expect_replicas",
    "expect_session",
    "file_traffic",
    "find_not_finite",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_matmul",
    "gather",
    "gather_beside",
    "geglu",
    "host_memory",
    "host_needs",
    "jump_seed",
    "keep_remote_memory_in_files",
    "keep_state_once",
    "leave_note",
    "limit_device_memory",
    "measure",
    "moves",
    "multiplies_bfloat16",
    "multiply_ceiling",
    "newton_schulz",
    "open_pickled",
    "phase_time",
    "plan",
    "profile",
    "read_note",
    "release_freed_memory",
    "relu2",
    "rms_norm",
    "rotary",
    "round_from",
    "run_count",
    "run_times",
    "sequence",
    "set_run_count",
    "shard_count",
    "short_convolution",
    "softcap",
    "split_into_phases",
    "stack_seeds",
    "swiglu",
    "timeline",
    "to_float8",
    "to_text",
    "verify",
    "wide_all_reduce",
    "wide_reduce_scatter",
]


def gather(value: Any, patiently: bool = False) -> list[Any]:
    """Every instance's value, by instance. All instances must call it, in the same order.

    A value is None, bool, int, float, str, or lists and dicts of these; it travels as JSON, and
    tuples become lists.

    Args:
        patiently: one may take up to an hour longer to get here than the others; else what
            collectives allow.
    """
    return exchange.gather_patiently(value) if patiently else exchange.gather(value)


def gather_beside(value: Any) -> list[Any]:
    """The same as `gather`, patiently, in a thread that works beside the program: each instance has
    one such thread at a time, and the program's own gathers and runs go on meanwhile.
    """
    return exchange.gather_beside(value)


def stack_seeds(seeds: Sequence[Tensor]) -> Tensor:
    """One tensor of n seeds, for tensors whose first axis is n equal parts: n times uint32 [2] ->
    uint32 [n, 2].

    `ops.dropout` drops part i by seed i alone, the same elements as in a tensor that is only this
    part, and `ops.split_random_seed` and `ops.create_random_seed` make the children of each. So
    several micro-batches run as one with the masks that they have by themselves.
    """
    return concat([reshape(seed, (1, 2)) for seed in seeds])


def split_into_phases(graph: Graph) -> None:
    """Let plans, profiles and memory for moving rows take what the graph calls for phases, and not
    the graph: one that goes through a part of a step, such as some of its micro-batches, and is
    called or repeated by the main graph, or by a graph that a step is. The numbers are the same.

    Raises:
        RuntimeError: a Session was made of the Ir before.
    """
    graph._check_open("split_into_phases")
    graph.is_split = True


def profile(session: Session) -> AbstractContextManager[list[Profile]]:
    """Record what the runs of a session do, and when: ``with profile(session) as profiles:
    session.run(...)``.

    The list gets one `Profile` for each run when the block ends. The program runs with probes
    between its instructions, and gives the same numbers; outside the block it has none. Times
    are those of the work, on a GPU by events in its stream. In a program over several processes
    each records its own replicas; `timeline` joins them.

    Raises:
        RuntimeError: the session interprets its program (``POPXL_INTERPRET``).
    """
    return session._lock.around_runs("profile", session._engine.profile())


def find_not_finite(session: Session) -> AbstractContextManager[list[NotFinite]]:
    """Look at every result in runs of a session: ``with find_not_finite(session) as found:
    session.run(...)``.

    When the block ends the list gets, for each replica of this process that met one, the first
    tensor that was not finite though all operands of its op were, sorted by when. The runs give the
    same numbers, slowly.

    Raises:
        RuntimeError: the session interprets its program (``POPXL_INTERPRET``).
    """
    return session._lock.around_runs("find_not_finite", session._engine.watch())


def replica_digests(session: Session, variables: Sequence[Variable]) -> list[list[str]]:
    """Hashes of what each replica of this process holds of variables, by replica in ascending
    order, then by variable: 16 hexadecimal digits. The session must be attached.

    A replica holds a variable's whole value, or the piece of it that sharding gives it. See
    `copies`.
    """
    with session._lock("replica_digests"):
        session._state.finish()
        return session._engine.digests(variables)


def shard_count(variable: Variable) -> int:
    """How many replicas of a group hold a piece each of the group's value; 1: all hold the
    whole.
    """
    location = variable.location_info
    return location.shard_over if location is not None else variable.shard_over


def copies(variable: Variable) -> list[list[int]]:
    """Replicas that hold the same bytes of a variable: those of its replica group, and where it is
    sharded those of them that have the same piece. Replicas that share theirs with none are left
    out.
    """
    over, grouping = shard_count(variable), variable.replica_grouping
    pieces = {
        replica: piece
        for members in (shard_groups(grouping, over).groups if over > 1 else ())
        for piece, replica in enumerate(members)
    }
    found: dict[tuple[int, int], list[int]] = {}
    for replica, group in enumerate(grouping.assignment):
        found.setdefault((group, pieces.get(replica, 0)), []).append(replica)
    return [replicas for replicas in found.values() if len(replicas) > 1]


def alternate_steps(ir: Ir, together: int) -> None:
    """Let batch-serialised loops do at most so many steps in an iteration, as many as divide
    theirs.

    Their collectives go on beside each other's computation, between machines and between GPUs. The
    numbers are the same.

    Raises:
        ValueError: less than one.
    """
    if together < 1:
        raise ValueError(f"alternate_steps: got {together}; expected at least 1.")
    ir._check_open("alternate_steps")
    ir.alternating_steps = together


def check_device(name: str) -> None:
    """ValueError unless "cpu", "cuda", "cuda:N" or "auto" names a device of this machine, as a
    Session takes it.
    """
    backend().check_device(name)


def compiled_once(ir: Ir) -> AbstractContextManager[None]:
    """A block around plans and needs of a program: what one of them compiles is there for the
    others. Nothing may be added to the program in it.
    """
    return backend().compiled_once(ir)


def device_needs(ir: Ir, device: str = "cpu") -> DeviceNeeds:
    """What a program needs of a device, see `limit_device_memory`. Nothing is allocated.

    Arguments and errors as of `plan`.
    """
    return backend().device_needs(ir, kind_of_device(device, "device_needs"))


def host_needs(ir: Ir, mapped: bool = False) -> HostNeeds:
    """What a program takes of the host's memory in a process that runs its replicas on processors,
    with rows in memory. Nothing is allocated; what the process itself takes is not counted.

    Args:
        mapped: leave out rows for which memory-mapped files of variables stand, where they can: the
            system drops their pages when memory is short.
    Raises:
        as `plan`.
    """
    return backend().host_needs(ir, mapped)


def release_freed_memory() -> None:
    """Hand memory that runs have freed back to the system. It is kept for the next run, whose
    blocks are the same; another program's are not, and would come on top.
    """
    backend().release_freed_memory()


def open_pickled(path: Path) -> Any:
    """What a file that torch.save wrote holds: numbers, texts, lists, dicts, and each tensor as a
    `PickledTensor`, which is read when it is asked for. Nothing in the file is run.

    Raises:
        OSError: the file cannot be read.
        PickledFileError: it is no such file, or asks for code.
    """
    return backend().open_pickled(path)


def file_traffic(session: Session) -> FileTraffic | None:
    """What a session has moved of its remote memory so far; None where rows are used where they
    are.

    In a program over several processes each counts what its own replicas move.
    """
    return session._engine.file_traffic()


def run_times(session: Session) -> RunTimes:
    """The times of a session's last run, by the laps that its program begins (`begin_lap`). In a
    program over several processes each tells of its own replicas.
    """
    return session._engine.run_times()


def compile_seconds(session: Session) -> float:
    """Seconds that a session's program took to be compiled; 0 where it is interpreted."""
    return session._engine.compile_seconds


def run_count(session: Session) -> int:
    """How often a session has run. Save it with the variables, to resume bitwise.

    Stochastic rounding draws from it, except in graphs that `round_from` a seed.
    """
    return session._engine.run_count


def set_run_count(session: Session, count: int) -> None:
    """Go on as a session that has run ``count`` times. ValueError for a negative count."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"set_run_count: got {count!r}; expected a count of runs, 0 or more.")
    with session._lock("set_run_count"):
        session._engine.run_count = count


def round_from(graph: Graph, seed: Tensor) -> None:
    """Let stochastic rounding in a graph, and in all that it calls or repeats, draw from a seed.

    What an update draws then follows from the seed and from its position inside the graph, and no
    more from where in a program, and in which of its runs, the graph is called. So two calls with
    one seed draw the same: split a seed for each. In a called graph that has a seed itself, that
    one counts. Replicas that make the same update need the same seed. The value is the caller's,
    whatever the graph does to its input. A second seed for a graph replaces the first; without
    ``enableStochasticRounding`` it has no effect.

    Args:
        seed: an input of the graph by value, uint32 [2]. The engine computes it on the host if it
            follows from constants, loop counters and variables of few integers, and waits for it at
            each call if not.
    Raises:
        ValueError: another tensor.
        RuntimeError: a Session was made of the Ir before.
    """
    graph._check_open("round_from")
    where = f"graph '{graph.name or 'main'}'"
    if not isinstance(seed, Tensor) or seed not in graph.inputs:
        raise ValueError(
            f"round_from: got {seed!r}; expected an input of {where}. Make one there: "
            "popxl.graph_input((2,), popxl.uint32)."
        )
    if seed.shape != (2,) or seed.dtype is not uint32:
        raise ValueError(
            f"round_from: got %{seed.name}: {seed.spec} of {where}; expected uint32[2]. Make one "
            "with popxl.create_seeds or ops.split_random_seed."
        )
    if seed in graph._by_ref_inputs:
        raise ValueError(
            f"round_from: got %{seed.name} of {where}, an input by reference; expected one by "
            "value. Annotate it as popxl.Tensor, or make it with by_ref=False."
        )
    graph.rounding_seed = seed

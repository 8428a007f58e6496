"""The one door to what goes beyond PopXL. Where its extensions are missing, plain PopXL serves."""

import gc
import importlib
import inspect
import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops
from popxl.context import _execution_context
from popxl.tensor import Variable
from popxl_addons.optimizers.adam import AdamOptimizerStep

try:
    from popxl import extensions
    from popxl_addons import memmap_files
except ImportError:  # plain PopXL
    extensions = memmap_files = None  # type: ignore[assignment]

from popxl_gpt.utils.errors import LostError, UserError

_LOG = logging.getLogger(__name__)


def data_type(precision: str) -> popxl.dtype:
    """The element type that a configuration's `precision` names.

    Raises:
        UserError: if this PopXL lacks it (bfloat16 is an extension).
    """
    if precision == "bfloat16":
        found: popxl.dtype | None = getattr(extensions, "bfloat16", None)
        if found is None:
            raise UserError(
                "precision: got bfloat16; expected a type of this PopXL. Use float16 or float32."
            )
        return found
    return popxl.dtype.from_name(precision)


def accumulator_options(weights: popxl.dtype) -> dict[str, popxl.dtype]:
    """Keyword arguments for `autodiff_with_accumulation` that keep accumulators of 16-bit weights
    in float32.

    Plain PopXL accumulates in the weight's own type, and has no such option.
    """
    parameters = inspect.signature(addons.autodiff_with_accumulation).parameters
    if weights is popxl.float32 or "accumulator_dtype" not in parameters:
        return {}
    return {"accumulator_dtype": popxl.float32}


def attention(
    query: popxl.Tensor,
    key: popxl.Tensor,
    value: popxl.Tensor,
    mask: popxl.Tensor,
    seed: popxl.Tensor | None,
    dropout: float,
) -> popxl.Tensor:
    """Softmax attention of Q queries over S keys, one op where PopXL has it.

    Shapes: query [B, h, Q, D], key and value [B, h, S, D] -> [B, h, Q, D].
    Args:
        mask: what is added to scores, in a shape that broadcasts to [B, h, Q, S].
        seed: what dropout of probabilities draws from; without one nothing is dropped.
    """
    if hasattr(extensions, "attention"):
        rate = 0.0 if seed is None else dropout
        return extensions.attention(query, key, value, mask, seed_tensor=seed, p=rate)
    scores = query @ key.transpose((0, 1, 3, 2)) * (1 / math.sqrt(query.shape[-1])) + mask
    probabilities = ops.softmax(scores, axis=-1)
    if seed is not None:
        probabilities = ops.dropout(probabilities, seed, dropout)
    return probabilities @ value


def rms_norm(x: popxl.Tensor, weight: popxl.Tensor, eps: float) -> popxl.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, one op where PopXL has it.

    Shapes: x [rows, features], weight [features] -> [rows, features].
    """
    if hasattr(extensions, "rms_norm"):
        return extensions.rms_norm(x, weight, eps)
    wide = ops.cast(x, popxl.float32)
    rms = ops.sqrt(ops.mean(wide * wide, axis=1, keepdims=True) + eps)
    return ops.cast(wide / rms * ops.cast(weight, popxl.float32), x.dtype)


def newton_schulz(t: popxl.Tensor) -> popxl.Tensor:
    """Matrices with the singular vectors of these, [n, rows, columns], and singular values near
    one, one op where PopXL has it.
    """
    if hasattr(extensions, "newton_schulz"):
        return extensions.newton_schulz(t)
    is_tall = t.shape[1] > t.shape[2]
    x = ops.cast(t.transpose((0, 2, 1)) if is_tall else t, popxl.float32)
    x = x / (ops.sqrt(ops.sum(x * x, axis=(1, 2), keepdims=True)) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose((0, 2, 1))
        x = x * 3.4445 + (square * -4.7750 + square @ square * 2.0315) @ x
    return ops.cast(x.transpose((0, 2, 1)) if is_tall else x, t.dtype)


def relu2(x: popxl.Tensor) -> popxl.Tensor:
    """max(x, 0)^2, one op where PopXL has it."""
    if hasattr(extensions, "relu2"):
        return extensions.relu2(x)
    y = ops.relu(x)
    return y * y


def swiglu(x: popxl.Tensor) -> popxl.Tensor:
    """swish(gate) * values, which stand side by side, one op where PopXL has it.

    Shapes: x [rows, 2 * features] -> [rows, features].
    """
    if hasattr(extensions, "swiglu"):
        return extensions.swiglu(x)
    gate, values = ops.split(x, 2, axis=1)
    return ops.swish(gate) * values


def softcap(x: popxl.Tensor, cap: float) -> popxl.Tensor:
    """cap * tanh(x / cap), one op where PopXL has it."""
    if hasattr(extensions, "softcap"):
        return extensions.softcap(x, cap)
    return ops.tanh(x * (1 / cap)) * cap


def rotary(x: popxl.Tensor, sin: popxl.Tensor, cos: popxl.Tensor) -> popxl.Tensor:
    """Pairs i and i + D/2 of each head turned by angle i of the row's position, one op where PopXL
    has it.

    Shapes: x [B*S, h*D], sin and cos [S, D/2] -> [B*S, h*D].
    """
    if hasattr(extensions, "rotary"):
        return extensions.rotary(x, sin, cos)
    (positions, pairs), rows = sin.shape, x.shape[0]
    heads = x.shape[1] // (2 * pairs)
    first, second = ops.split(
        x.reshape((rows // positions, positions, heads, 2 * pairs)), 2, axis=3
    )
    sin, cos = (t.reshape((positions, 1, pairs)) for t in (sin, cos))
    turned = ops.concat([first * cos - second * sin, second * cos + first * sin], axis=3)
    return turned.reshape(x.shape)


def short_convolution(
    x: popxl.Tensor, weight: popxl.Tensor, positions: popxl.Tensor
) -> popxl.Tensor:
    """Each row, and those before it in its sequence times factors, the nearest first, one op where
    PopXL has it.

    Shapes: x [rows, features], weight [distances, features], positions in the sequences, int32
    [rows] -> [rows, features].
    """
    if hasattr(extensions, "short_convolution"):
        return extensions.short_convolution(x, weight, positions)
    rows, width = x.shape
    nothing = popxl.constant(np.zeros((1, width), np.float32))
    y = before = ops.cast(x, popxl.float32)
    factors = ops.cast(weight, popxl.float32)
    for distance in range(1, min(weight.shape[0], rows - 1) + 1):
        before = ops.concat([nothing, before[:-1]])
        is_outside = ops.greater(popxl.constant(distance, popxl.int32), positions)
        own = ops.where(is_outside.reshape((rows, 1)), popxl.constant(0.0, popxl.float32), before)
        y = y + own * factors[distance - 1]
    return ops.cast(y, x.dtype)


def seed_spec(count: int) -> popxl.TensorSpec:
    """One random seed, or so many in one tensor, for equal parts of what they drop units of.

    Raises:
        UserError: if this PopXL knows single seeds only.
    """
    if count == 1:
        return popxl.TensorSpec((2,), popxl.uint32)
    if not hasattr(extensions, "stack_seeds"):
        raise UserError(
            f"--widening: got {count} with a PopXL that draws from one seed at a time; expected "
            "this repository's. Install runtime/, or use --widening 1."
        )
    return popxl.TensorSpec((count, 2), popxl.uint32)


def moment_options(precision: str) -> dict[str, popxl.dtype]:
    """Keyword arguments for `AdamOptimizerStep` that give both moments a configuration's
    `moment_precision`.

    Raises:
        UserError: if this PopXL's second moment is always float32.
    """
    if precision == "float32":
        return {"first_order_dtype": popxl.float32}
    if precision == "8bit":
        if not hasattr(extensions, "adamw_8bit_"):
            raise UserError(
                "moment_precision: got 8bit with a PopXL without such moments; expected this "
                "repository's. Install runtime/, or use float32."
            )
        return {"first_order_dtype": popxl.uint8, "second_order_dtype": popxl.uint8}
    if "second_order_dtype" not in inspect.signature(AdamOptimizerStep.build).parameters:
        raise UserError(
            f"moment_precision: got {precision} with a PopXL whose second moment is float32; "
            "expected this repository's. Install runtime/, or use float32."
        )
    return {"first_order_dtype": data_type(precision), "second_order_dtype": data_type(precision)}


def coded_moment(name: str, x: np.ndarray, shards: int) -> np.ndarray:
    """A moment in 8 bits, as `AdamOptimizerStep` keeps it, of all shards: float32 [.., n] -> uint8
    [.., bytes].

    Args:
        name: first_order or second_order.
    """
    length = -(-x.shape[-1] // shards)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, shards * length - x.shape[-1])]
    pieces = np.pad(x, padding).reshape(*x.shape[:-1], shards, length)
    return np.asarray(extensions.MOMENTS[name].encode(pieces)).reshape(*x.shape[:-1], -1)


def decoded_moment(name: str, coded: np.ndarray, count: int, shards: int) -> np.ndarray:
    """Its first numbers, so many: uint8 [.., bytes] -> float32 [.., count]."""
    pieces = coded.reshape(*coded.shape[:-1], shards, -1)
    x = np.asarray(extensions.MOMENTS[name].decode(pieces, -(-count // shards)))
    return x.reshape(*coded.shape[:-1], -1)[..., :count]


def shard_count(variable: Variable) -> int:
    """How many replicas of a group hold a piece each of a variable in 8 bits."""
    return int(extensions.shard_count(variable))


def update_condition() -> dict[str, popxl.TensorSpec]:
    """Keyword arguments for `AdamOptimizerStep` that make its update depend on a bool scalar, which
    it is then given.

    Empty where this PopXL's updates always happen.
    """
    parameters = inspect.signature(AdamOptimizerStep.build).parameters
    return {"update_if": popxl.TensorSpec((), popxl.bool)} if "update_if" in parameters else {}


def gather(value: Any, instances: int, patiently: bool = False) -> list[Any]:
    """Every process's value, by instance; all processes must call it. Plain PopXL leaves that to
    MPI.

    Args:
        patiently: a process may take long to get here, since it does what only it does.
    """
    if instances == 1:
        return [value]
    if hasattr(extensions, "gather"):
        return extensions.gather(value, patiently)
    return list(importlib.import_module("mpi4py.MPI").COMM_WORLD.allgather(value))


def can_gather_beside(instances: int) -> bool:
    """Whether threads of several processes can gather while their programs go on; those of plain
    PopXL cannot.
    """
    return instances == 1 or hasattr(extensions, "gather_beside")


def gather_beside(value: Any, instances: int) -> list[Any]:
    """As `gather`, patiently, in a thread that works beside the program, one in each process."""
    if instances > 1 and can_gather_beside(instances):
        return extensions.gather_beside(value)
    return gather(value, instances, patiently=True)


def replica_digests(
    session: popxl.Session, variables: "list[Any]"
) -> "tuple[list[list[str]], list[list[list[int]]]]":
    """What `popxl.extensions.replica_digests` gives for this process's replicas, and `copies` for
    each variable.

    Raises:
        UserError: if this PopXL cannot.
    """
    if not hasattr(extensions, "replica_digests"):
        raise UserError(
            "--check_replicas: got a PopXL that does not tell what each replica holds; expected "
            "this repository's. Install runtime/, or use --check_replicas 0."
        )
    digests = extensions.replica_digests(session, variables)
    return digests, [extensions.copies(v) for v in variables]


def leave_note(content: Any) -> None:
    """Tell a small value to the next start of this run, where the launcher starts it again after a
    failure; plain PopXL's launcher does not.
    """
    if hasattr(extensions, "leave_note"):
        extensions.leave_note(content)


def read_note() -> Any:
    """What the start before has told this one; None where this is the first."""
    return extensions.read_note() if hasattr(extensions, "read_note") else None


def round_from(graph: popxl.Graph, seed: popxl.Tensor) -> None:
    """Let stochastic rounding in a graph draw from one of its inputs; plain PopXL draws as it
    does.
    """
    if hasattr(extensions, "round_from"):
        extensions.round_from(graph, seed)


def before_reading() -> AbstractContextManager[None]:
    """Ops of the main graph built inside run where the host reads variables after a run, and before
    it does, in place of with the run.
    """
    return _execution_context(popxl.ExecutionContext.WeightsToHostFragment)


def drop_dead_sessions() -> None:
    """Give the system the memory of sessions that nobody has any more, before another one takes as
    much. Programs and sessions refer to each other, so that they are there until they are looked
    for.
    """
    gc.collect()
    release_freed_memory()


def release_freed_memory() -> None:
    """Hand memory that runs have freed back to the system; what plain PopXL does with it is its own
    affair.
    """
    if hasattr(extensions, "release_freed_memory"):
        extensions.release_freed_memory()


def keep_state_once(ir: popxl.Ir) -> None:
    """Do without a second copy of the state on the host; plain PopXL always has one."""
    if hasattr(extensions, "keep_state_once"):
        extensions.keep_state_once(ir)


def keep_remote_memory_in_files(ir: popxl.Ir, folder: str, memory: int) -> None:
    """Let the sessions of a program keep remote rows in files of a folder, with so many bytes of
    memory for them.

    Raises:
        UserError: if this PopXL cannot.
    """
    if not hasattr(extensions, "keep_remote_memory_in_files"):
        raise UserError(
            "--host_memory: got a PopXL without files; expected this repository's. Install "
            "runtime/."
        )
    extensions.keep_remote_memory_in_files(ir, folder, memory)


def limit_device_memory(ir: popxl.Ir, memory: int | float) -> None:
    """Let the sessions of a program take so many bytes, or such a share, of the device's memory,
    and no more.

    Raises:
        UserError: if this PopXL cannot.
    """
    if not hasattr(extensions, "limit_device_memory"):
        raise UserError(
            "--device_memory: got a PopXL without it; expected this repository's. Install runtime/."
        )
    extensions.limit_device_memory(ir, memory)


def host_bytes() -> "tuple[int, int, str]":
    """Host memory for this process: all that it may use, what is left of that now, and what sets
    the limit.
    """
    if not hasattr(extensions, "host_memory"):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return there, there, "this machine"
    found = extensions.host_memory()
    return found.total, found.available, found.limited_by


def expect_session(device: str) -> None:
    """Let a processor's kernels be compiled while a program is built that will run; plain PopXL has
    none.

    Args:
        device: the configuration's, which `session_device` checks.
    """
    if hasattr(extensions, "expect_session") and not device.startswith("cuda"):
        extensions.expect_session()


def session_device(name: str) -> str:
    """What a Session is to be made for, of a configuration's `device`.

    Raises:
        UserError: a device that is not there.
    """
    if not hasattr(extensions, "check_device"):
        return "ipu_hw"
    try:
        extensions.check_device(name)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    return name


def has_device(device: str) -> bool:
    """Whether this machine has the device of a configuration."""
    try:
        session_device(device)
    except UserError:
        return False
    return True


def file_traffic(session: popxl.Session) -> Any | None:
    """What a session has moved between files and memory (`popxl.extensions.FileTraffic`); None
    where it has none.
    """
    return extensions.file_traffic(session) if hasattr(extensions, "file_traffic") else None


def remove_mapped_files(folder: str, names: Iterable[str]) -> None:
    """Remove files of variables, those of the names that are there.

    Raises:
        OSError: the folder does not let them go, or another user can write to it.
    """
    if memmap_files is not None:
        memmap_files.remove_files(Path(folder), names)
        return
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(os.path.join(folder, name))


@contextmanager
def runtime_errors_are_told() -> Iterator[None]:
    """Too little memory, a disk that is full or fails, and variables of the environment are the
    user's to change; a process that is gone is nobody's mistake.
    """
    try:
        yield
    except getattr(extensions, "RemoteMemoryError", ()) as error:
        raise UserError(str(error)) from error
    except getattr(extensions, "EnvironmentVariableError", ()) as error:
        raise UserError(str(error)) from error
    except getattr(extensions, "InstanceError", ()) as error:
        raise LostError(str(error)) from error


@contextmanager
def find_not_finite(session: popxl.Session) -> Iterator[list[Any]]:
    """A block around runs of a session, whose list gets what `popxl.extensions.find_not_finite`
    finds.

    Nothing, if this PopXL does not look, or the session is interpreted.
    """
    with ExitStack() as stack:
        found: list[Any] = []
        if hasattr(extensions, "find_not_finite"):
            try:
                found = stack.enter_context(extensions.find_not_finite(session))
            except RuntimeError as error:
                _LOG.warning("%s", error)
        yield found


@contextmanager
def replay_phases(session: popxl.Session, numbers: "list[int]") -> Iterator[list[Any]]:
    """A block around runs of a session, whose list gets what `popxl.extensions.replay_phases`
    finds.

    Raises:
        UserError: if this PopXL runs no phase twice, or the session is interpreted.
    """
    if not hasattr(extensions, "replay_phases"):
        raise UserError(
            "--verify_every: got a PopXL that does not run phases twice; expected this "
            "repository's. Install runtime/, or use --verify_every 0."
        )
    with ExitStack() as stack:
        try:
            found = stack.enter_context(extensions.replay_phases(session, numbers))
        except RuntimeError as error:
            raise UserError(f"--verify_every: {error}") from error
        yield found


@contextmanager
def profile(session: popxl.Session) -> Iterator[list[Any]]:
    """A block around runs of a session, whose list gets a profile of each
    (`popxl.extensions.Profile`).

    Raises:
        UserError: if this PopXL does not profile, or the session is interpreted.
    """
    if not hasattr(extensions, "profile"):
        raise UserError(
            "--profile: got a PopXL that does not profile; expected this repository's. "
            "Install runtime/."
        )
    with ExitStack() as stack:
        try:
            profiles = stack.enter_context(extensions.profile(session))
        except RuntimeError as error:
            raise UserError(f"--{error}") from error
        yield profiles


def multiply_ceiling(precision: str, device: str) -> float:
    """FLOP/s that this process's threads can multiply at most
    (`popxl.extensions.multiply_ceiling`); 0 where that is not known.

    Args:
        precision: a configuration's.
        device: a configuration's, which a session was made for.
    """
    if not hasattr(extensions, "multiply_ceiling"):
        return 0.0
    return float(extensions.multiply_ceiling(data_type(precision), device))


def planner() -> Any:
    """What plans and measures: `plan`, `phase_time`, `measure`, `Machine`, `timeline` of
    `popxl.extensions`.

    Raises:
        UserError: if this PopXL has no planner.
    """
    if not hasattr(extensions, "plan"):
        raise UserError(
            "--plan: got a PopXL without a planner; expected this repository's. Install runtime/."
        )
    return extensions

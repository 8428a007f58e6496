"""The one door to what goes beyond PopXL: its extensions, and modules of the add-ons that PopXL has
not.
"""

import gc
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import popdist
import popxl
import popxl_addons as addons
from popxl import extensions
from popxl.context import _execution_context
from popxl.extensions import (
    PickledFileError,
    PickledTensor,
    alternate_steps,
    begin_lap,
    compile_seconds,
    count_here,
    expect_replicas,
    file_traffic,
    float8_e4m3fn,
    geglu,
    jump_seed,
    keep_remote_memory_in_files,
    keep_state_once,
    leave_note,
    limit_device_memory,
    multiplies_bfloat16,
    newton_schulz,
    open_pickled,
    read_note,
    release_freed_memory,
    relu2,
    rms_norm,
    rotary,
    round_from,
    run_times,
    shard_count,
    short_convolution,
    softcap,
    split_into_phases,
    swiglu,
    wide_all_reduce,
    wide_reduce_scatter,
)
from popxl_addons.memmap_files import remove_files
from popxl_addons.ops.cross_entropy_sharded_loss import normaliser_and_logit, reduced_loss
from popxl_addons.ops.float8 import float8_product, with_scale
from popxl_addons.transforms.recomputation import Recomputation, recompute_rest

from popxl_gpt.utils.errors import LostError, UserError

__all__ = [
    "PickledFileError", "PickledTensor", "Recomputation", "accumulator_options",
    "after_writing", "alternate_steps", "attention", "before_reading", "begin_lap",
    "coded_moment", "compile_seconds", "count_here", "data_type", "decoded_moment",
    "drop_dead_sessions", "expect_replicas", "expect_session", "file_traffic",
    "find_not_finite", "float8_e4m3fn", "float8_product", "gather", "gather_beside", "geglu",
    "has_device", "host_bytes", "jump_seed", "keep_remote_memory_in_files", "keep_state_once",
    "leave_note", "limit_device_memory", "moment_options", "multiplies_bfloat16",
    "multiply_ceiling", "newton_schulz", "normaliser_and_logit", "open_pickled", "planner",
    "profile", "read_note", "recomputed", "reduced_loss", "release_freed_memory", "relu2",
    "remove_files", "replica_digests", "rms_norm", "rotary", "round_from", "run_times",
    "runs_on_gpu", "runtime_errors_are_told", "seed_spec", "session_device", "shard_count",
    "short_convolution", "softcap", "split_into_phases", "swiglu", "update_condition",
    "wide_all_reduce", "wide_reduce_scatter", "with_scale",
]  # fmt: skip
_LOG = logging.getLogger(__name__)


def data_type(precision: str) -> popxl.dtype:
    """The element type that a configuration's `precision` names."""
    if precision == "bfloat16":
        return extensions.bfloat16
    return popxl.dtype.from_name(precision)


def accumulator_options(weights: Collection[popxl.dtype]) -> dict[str, popxl.dtype]:
    """Keyword arguments for `autodiff_with_accumulation` that keep accumulators of weights of these
    types in float32; PopXL's own are of the weight's type.
    """
    return {} if {*weights} <= {popxl.float32} else {"accumulator_dtype": popxl.float32}


def recomputed(
    grad: addons.GraphWithNamedArgs, kept: Sequence[popxl.Tensor]
) -> addons.GraphWithNamedArgs:
    """A gradient graph that takes so much of the forward pass, and computes the rest again."""
    return recompute_rest(grad, kept)


def attention(
    query: popxl.Tensor,
    key: popxl.Tensor,
    value: popxl.Tensor,
    seed: popxl.Tensor | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> popxl.Tensor:
    """Softmax attention of Q queries over S keys.

    Shapes: query [B, h, Q, D], key and value [B, h, S, D] -> [B, h, Q, D].
    Args:
        seed: what dropout of probabilities draws from; without one nothing is dropped.
        options: what hides keys, and how scores are scaled and bounded, as of
            `popxl.extensions.attention`.
    """
    rate = 0.0 if seed is None else dropout
    return extensions.attention(query, key, value, seed_tensor=seed, p=rate, **options)


def seed_spec(count: int) -> popxl.TensorSpec:
    """One random seed, or so many in one tensor, for equal parts of what they drop units of."""
    return popxl.TensorSpec((2,) if count == 1 else (count, 2), popxl.uint32)


def moment_options(precision: str) -> dict[str, popxl.dtype]:
    """Keyword arguments for `AdamOptimizerStep` that give both moments a configuration's
    `moment_precision`; PopXL's second moment is always float32.
    """
    if precision == "float32":
        return {"first_order_dtype": popxl.float32}
    found = popxl.uint8 if precision == "8bit" else data_type(precision)
    return {"first_order_dtype": found, "second_order_dtype": found}


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


def update_condition() -> dict[str, popxl.TensorSpec]:
    """Keyword arguments for `AdamOptimizerStep` that make its update depend on a bool scalar, which
    it is then given.
    """
    return {"update_if": popxl.TensorSpec((), popxl.bool)}


def gather(value: Any, patiently: bool = False) -> list[Any]:
    """Every process's value, by instance; all processes must call it.

    Args:
        patiently: a process may take long to get here, since it does what only it does.
    """
    return [value] if popdist.getNumInstances() == 1 else extensions.gather(value, patiently)


def gather_beside(value: Any) -> list[Any]:
    """Same as `gather`, patiently, in a thread of each process that works beside the program."""
    return [value] if popdist.getNumInstances() == 1 else extensions.gather_beside(value)


def replica_digests(
    session: popxl.Session, variables: "list[Any]"
) -> "tuple[list[list[str]], list[list[list[int]]]]":
    """What `popxl.extensions.replica_digests` gives for this process's replicas, and `copies` for
    each variable.
    """
    digests = extensions.replica_digests(session, variables)
    return digests, [extensions.copies(v) for v in variables]


def before_reading() -> AbstractContextManager[None]:
    """Ops of the main graph built inside run where the host reads variables after a run, and before
    it does, in place of with the run.
    """
    return _execution_context(popxl.ExecutionContext.WeightsToHostFragment)


def after_writing() -> AbstractContextManager[None]:
    """Ops of the main graph built inside run where the host has written variables, before the next
    run, in place of with the run.
    """
    return _execution_context(popxl.ExecutionContext.WeightsFromHostFragment)


def drop_dead_sessions() -> None:
    """Give the system the memory of sessions that nobody has any more, before another one takes as
    much. Programs and sessions refer to each other, so that they are there until they are looked
    for.
    """
    gc.collect()
    release_freed_memory()


def host_bytes() -> "tuple[int, int, str]":
    """Host memory for this process: all that it may use, what is left of that now, and what sets
    the limit.
    """
    found = extensions.host_memory()
    return found.total, found.available, found.limited_by


def expect_session(device: str, precision: str) -> None:
    """Let a processor's kernels be compiled while a program is built that will run.

    Args:
        device, precision: the configuration's; `session_device` checks the device.
    """
    if not device.startswith("cuda"):
        extensions.expect_session(bfloat16=precision == "bfloat16")


def session_device(name: str) -> str:
    """What a Session is to be made for, of a configuration's `device`.

    Raises:
        UserError: a device that is not there.
    """
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


def runs_on_gpu(device: str) -> bool:
    """Whether a configuration's device is a GPU, there or planned for."""
    return device.startswith("cuda") or (device == "auto" and has_device("cuda"))


@contextmanager
def runtime_errors_are_told() -> Iterator[None]:
    """Too little memory, a disk that is full or fails, and variables of the environment are the
    user's to change; a process that is gone is nobody's mistake.
    """
    try:
        yield
    except (extensions.RemoteMemoryError, extensions.EnvironmentVariableError) as error:
        raise UserError(str(error)) from error
    except extensions.InstanceError as error:
        raise LostError(str(error)) from error


@contextmanager
def find_not_finite(session: popxl.Session) -> Iterator[list[Any]]:
    """A block around runs of a session, whose list gets what `popxl.extensions.find_not_finite`
    finds.

    Nothing, if the session is interpreted.
    """
    with ExitStack() as stack:
        found: list[Any] = []
        try:
            found = stack.enter_context(extensions.find_not_finite(session))
        except RuntimeError as error:
            _LOG.warning("%s", error)
        yield found


@contextmanager
def profile(session: popxl.Session) -> Iterator[list[Any]]:
    """A block around runs of a session, whose list gets a profile of each
    (`popxl.extensions.Profile`).

    Raises:
        UserError: if the session is interpreted.
    """
    with ExitStack() as stack:
        try:
            profiles = stack.enter_context(extensions.profile(session))
        except RuntimeError as error:
            raise UserError(f"--{error}") from error
        yield profiles


def multiply_ceiling(precision: str, device: str) -> float:
    """FLOP/s that this process's threads can multiply at most
    (`popxl.extensions.multiply_ceiling`).

    Args:
        precision: a configuration's.
        device: a configuration's, which a session was made for.
    """
    return float(extensions.multiply_ceiling(data_type(precision), device))


def planner() -> Any:
    """What plans and measures: `plan`, `phase_time`, `measure`, `Machine`, `timeline` of
    `popxl.extensions`.
    """
    return extensions

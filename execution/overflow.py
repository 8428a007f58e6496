"""Steps whose global norm is not finite, and with `--masked_labels` those in which no label counts:
they change nothing and are counted, by the program and on the host.

With `--loss_scaling auto` such a step halves the loss scale, and `loss_scaling_window` others in a
row double it.
"""

# No `from __future__ import annotations`: annotations of graph functions are read at run time.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl_addons import TaskSession
from popxl_addons.named_tensors import NamedTensors

from popxl_gpt.config.schema import Config, Training
from popxl_gpt.execution.block_graphs import stretches
from popxl_gpt.execution.host import StepResult, run_steps
from popxl_gpt.utils.runtime import find_not_finite, gather

COUNTERS = ("skipped", "skipped_in_a_row")
"""Variables of the state that count skipped steps, int32 scalars; the second is 0 after a step that
was not.
"""
SCALING = ("loss_scale", "good_steps")
"""Variables beside them that are the loss scale, float32, and the steps since it changed or one was
skipped.
"""
SPIKES = ("spikes", "norm_mean", "norm_variance", "norm_count")
"""Variables of a program that looks for spikes, see `spikes.py`."""
NO_LABELS = "no_labels"
"""Variable beside them of a program with masked labels: steps in which none counted, int32. To
others such a step is none."""
SEEDS = ("seed", "rounding_seed")
"""Variables of the state that every step adds one to."""
COUNTED = (*COUNTERS, *SCALING, *SPIKES, NO_LABELS)
INITIAL, FLOOR, CEILING = 2.0**16, 1.0, 2.0**24
"""Loss scales, powers of two, so that no gradient's digits change. With the largest, squares of
gradients up to 1e12 are numbers of float32."""


def counters(training: Training) -> tuple[str, ...]:
    """Names of a program's counters."""
    scaling = SCALING if training.is_scaled_by_program else ()
    spikes = SPIKES if training.looks_for_spikes else ()
    return (*COUNTERS, *scaling, *spikes, *([NO_LABELS] if training.masked_labels else ()))


def seeds(training: Training) -> tuple[str, ...]:
    """Names of a program's seeds."""
    return SEEDS if training.stochastic_rounding else SEEDS[:1]


def make_counters(training: Training) -> NamedTensors:
    """The counters as variables. Call it in the main graph."""
    found = NamedTensors()
    for name in counters(training):
        value = read_count({}, name)
        found.insert(name, popxl.variable(value, popxl.dtype.as_dtype(value.dtype), name))
    return found


def read_count(saved: Mapping[str, Any], name: str) -> np.ndarray:
    """A counter's value, as it was saved, or as it begins.

    Raises:
        ValueError: it is none that a program comes to.
    """
    if name == "loss_scale":
        scale = float(saved.get(name, INITIAL))
        if not (FLOOR <= scale <= CEILING and np.log2(scale).is_integer()):
            raise ValueError(f"{name}: {scale}")
        return np.array(scale, np.float32)
    if name in ("norm_mean", "norm_variance"):
        number = saved.get(name, 0.0)
        if type(number) is not float or not 0 <= number < 2.0**127:
            raise ValueError(f"{name}: {number}")
        return np.array(number, np.float32)
    count = saved.get(name, 0)
    if type(count) is not int or not 0 <= count < 2**31:
        raise ValueError(f"{name}: {count}")
    return np.array(count, np.int32)


def count_step(
    training: Training, is_finite: Tensor, counted: NamedTensors, has_labels: Tensor | None
) -> None:
    """Count a step: as one without labels; else as skipped where its norm is not finite; else, if
    the program scales, as a good one.

    Args:
        counted: the counters, by name.
        has_labels: whether a label counts, bool scalar; None where all do.
    """
    is_skipped = ops.cast(ops.logical_not(is_finite), popxl.int32)
    names, in_a_row = ["skipped", "skipped_in_a_row"], (counted.skipped_in_a_row + 1) * is_skipped
    values = [counted.skipped + is_skipped, in_a_row]
    if training.is_scaled_by_program:
        names += SCALING
        values += _scaled_next(
            training.loss_scaling_window, is_finite, counted.loss_scale, counted.good_steps
        )
    for name, value in zip(names, values):
        after = value if has_labels is None else ops.where(has_labels, value, counted[name])
        ops.var_updates.copy_var_update_(counted[name], after)
    if has_labels is not None:
        ops.add_(counted[NO_LABELS], ops.cast(ops.logical_not(has_labels), popxl.int32))


def _scaled_next(
    window: int, is_finite: Tensor, loss_scale: Tensor, good_steps: Tensor
) -> list[Tensor]:
    """The loss scale after a step, and the good steps."""
    count = (good_steps + 1) * ops.cast(is_finite, popxl.int32)
    # a run that goes on with a shorter window has counted beyond it
    is_full = ops.logical_not(ops.greater(popxl.constant(window, popxl.int32), count))
    half = ops.maximum(loss_scale * 0.5, popxl.constant(FLOOR, popxl.float32))
    is_low = ops.greater(popxl.constant(CEILING, popxl.float32), loss_scale)
    grown = ops.where(ops.logical_and(is_full, is_low), loss_scale * 2.0, loss_scale)
    after = ops.where(is_full, popxl.constant(0, popxl.int32), count)
    return [ops.where(is_finite, grown, half), after]


@dataclass
class Skipped:
    """The host's own counts, which go along with the program's."""

    total: int
    in_a_row: int
    spikes: int = 0
    """Steps left out for their norm, though it is finite, was far above those before."""
    no_labels: int = 0
    """Steps left out for none of their labels counted."""

    @classmethod
    def of(cls, session: TaskSession) -> "Skipped":
        """The counts of a session that is not running."""
        state: dict[str, Any] = session.state.to_dict()
        names = (*COUNTERS, SPIKES[0], NO_LABELS)
        return cls(*(int(session.get_tensor_data(state[n])) if n in state else 0 for n in names))

    def count(self, result: StepResult) -> None:
        """Count a step."""
        self.total += result.is_skipped
        self.spikes += result.is_spike
        self.no_labels += not result.has_labels
        if result.has_labels:
            self.in_a_row = self.in_a_row + 1 if result.is_skipped else 0


MICRO_BATCHES = "batch_serial_step"
"""Part of the names of graphs that run once for each micro-batch, or several that run as one."""
GROUPS = "group_of_micro_batches"
"""Name of the graph that runs once for each group of them after the first."""


def name_the_first(
    session: TaskSession,
    config: Config,
    words: np.ndarray,
    labels: np.ndarray,
    results: Sequence[StepResult],
) -> str | None:
    """The place where a number first stopped being finite in the last call of a session, all of
    whose steps were skipped.

    They run again, and their state is restored: weights that nothing changed give the same numbers.
    All processes of a run must call it; None where nothing is found.

    Args:
        words, labels, results: of that call, see `run_steps`.
    """
    assert all(result.is_skipped for result in results), (
        "else weights are others than those that it began with"
    )
    state: dict[str, Any] = session.state.to_dict()
    now = {v: session.get_tensor_data(v) for name, v in state.items() if name in (*COUNTED, *SEEDS)}
    before = {
        state[name]: now[state[name]] - np.uint32(len(results)) for name in SEEDS if name in state
    }
    if config.training.is_scaled_by_program:
        before[state["loss_scale"]] = np.array(results[0].loss_scale, np.float32)
    session.write_variables_data(before)
    with find_not_finite(session) as found:
        run_steps(session, config, words, labels, [0.0] * len(results))
    session.write_variables_data(now)
    own = [(first.order, first.replica, _described(first, config)) for first in found]
    everyone = [entry for theirs in gather(own) for entry in theirs]
    return str(min(everyone)[-1]) if everyone else None


def layer_of_iteration(phase: str, number: int, config: Config) -> int:
    """The layer of an iteration, counted from 0 over all steps, of a phase of the decoder."""
    layers = config.model.layers
    # the last ones, which keep more; where all are alike, there is one phase for them
    kept = len(stretches(config)[-1].layers) % layers
    if "fwd" not in phase and "bwd" not in phase:  # an update's has iterations for all layers
        return number % layers
    first, count = (layers - kept, kept) if "keeping" in phase else (0, layers - kept)
    number %= count
    return first + (number if "fwd" in phase else count - 1 - number)


def _described(first: Any, config: Config) -> str:
    """What `popxl.extensions.NotFinite` says, in the words of the application."""
    widening = config.execution.widening
    together = widening * config.interleaved_runs
    places = [f"phase {first.phase}"]
    if first.phase.startswith("decoder") and first.phase_runs is not None:
        places.append(f"layer {layer_of_iteration(first.phase, first.phase_runs, config)}")
    if MICRO_BATCHES in first.graph:
        run = next((count for name, count in first.loops if MICRO_BATCHES in name), 0)
        groups = next((count + 1 for name, count in first.loops if name.startswith(GROUPS)), 0)
        begin = groups * config.runs_per_phase * widening + run * together
        places.append(
            f"micro-batch {begin}"
            if together == 1
            else f"micro-batches {begin} to {begin + together - 1}"
        )
    where = f"replica {first.replica}, made at {first.where}"
    return f"{', '.join(places)}: tensor {first.tensor} ({first.value}), by {first.op} of {where}"

"""Steps whose global norm is not finite: they change nothing and are counted, by the program and on the host.

With `--loss_scaling auto` such a step halves the loss scale, and `loss_scaling_window` others in a row double it.
"""

# No `from __future__ import annotations`: annotations of graph functions are read at run time.

from dataclasses import dataclass
from typing import Any, List, Mapping, Tuple

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl_addons import TaskSession
from popxl_addons.named_tensors import NamedTensors

from config import Training
from execution.host import StepResult

COUNTERS = ("skipped", "skipped_in_a_row")
"""Variables of the state that count skipped steps, int32 scalars; the second is 0 after a step that was not."""
SCALING = ("loss_scale", "good_steps")
"""Variables beside them that are the loss scale, float32, and the steps since it changed or one was skipped."""
SEEDS = ("seed", "rounding_seed")
"""Variables of the state that every step adds one to."""
COUNTED = (*COUNTERS, *SCALING)
LOSS_SCALE_INDEX = COUNTED.index("loss_scale")
INITIAL, FLOOR, CEILING = 2.0**16, 1.0, 2.0**24
"""Loss scales, powers of two, so that no gradient's digits change. With the largest, squares of gradients up to 1e12
are numbers of float32."""


def counters(training: Training) -> Tuple[str, ...]:
    """Names of a program's counters."""
    return COUNTED if training.is_scaled_by_program else COUNTERS


def make_counters(training: Training, state: NamedTensors) -> List[Tensor]:
    """The counters, put into the state's tree. Call it in the main graph."""
    found: List[Tensor] = []
    for name in counters(training):
        value = read_count({}, name)
        variable = popxl.variable(value, popxl.dtype.as_dtype(value.dtype), name)
        state.insert(name, variable)
        found.append(variable)
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
    count = saved.get(name, 0)
    if type(count) is not int or not 0 <= count < 2**31:
        raise ValueError(f"{name}: {count}")
    return np.array(count, np.int32)


def count_step(training: Training, norm: Tensor, skipped: Tensor, in_a_row: Tensor, *scaling: Tensor) -> None:
    """Count a step: as skipped where its norm is not finite, else, if the program scales, as a good one."""
    is_finite = ops.isfinite(norm)
    is_skipped = ops.cast(ops.logical_not(is_finite), popxl.int32)
    ops.add_(skipped, is_skipped)
    ops.var_updates.copy_var_update_(in_a_row, (in_a_row + 1) * is_skipped)
    if scaling:
        _scale_next(training.loss_scaling_window, is_finite, *scaling)


def _scale_next(window: int, is_finite: Tensor, loss_scale: Tensor, good_steps: Tensor) -> None:
    """Change the loss scale after a step."""
    count = (good_steps + 1) * ops.cast(is_finite, popxl.int32)
    is_full = ops.equal(count, popxl.constant(window, popxl.int32))
    half = ops.maximum(loss_scale * 0.5, popxl.constant(FLOOR, popxl.float32))
    is_low = ops.greater(popxl.constant(CEILING, popxl.float32), loss_scale)
    grown = ops.where(ops.logical_and(is_full, is_low), loss_scale * 2.0, loss_scale)
    ops.var_updates.copy_var_update_(loss_scale, ops.where(is_finite, grown, half))
    ops.var_updates.copy_var_update_(good_steps, ops.where(is_full, popxl.constant(0, popxl.int32), count))


@dataclass
class Skipped:
    """The host's own counts, which go along with the program's."""

    total: int
    in_a_row: int

    @classmethod
    def of(cls, session: TaskSession) -> "Skipped":
        """Those of a session that is not running."""
        total, in_a_row = (int(session.get_tensor_data(session.state[name])) for name in COUNTERS)
        return cls(total, in_a_row)

    def count(self, result: StepResult) -> None:
        """Count a step."""
        self.total += result.is_skipped
        self.in_a_row = self.in_a_row + 1 if result.is_skipped else 0

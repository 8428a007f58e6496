"""Steps whose global norm is not finite: they change nothing and are counted, by the program and on the host."""

# No `from __future__ import annotations`: annotations of graph functions are read at run time.

from dataclasses import dataclass
from typing import List

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl_addons import TaskSession
from popxl_addons.named_tensors import NamedTensors

from execution.host import StepResult

COUNTERS = ("skipped", "skipped_in_a_row")
"""Variables of the state that count skipped steps, int32 scalars; the second is 0 after a step that was not."""


def make_counters(state: NamedTensors) -> List[Tensor]:
    """The counters, put into the state's tree. Call it in the main graph."""
    found: List[Tensor] = []
    for name in COUNTERS:
        variable = popxl.variable(np.zeros((), np.int32), popxl.int32, name)
        state.insert(name, variable)
        found.append(variable)
    return found


def count_skipped(norm: Tensor, skipped: Tensor, in_a_row: Tensor) -> None:
    """Count a step in both counters where its norm is not finite."""
    is_skipped = ops.cast(ops.logical_not(ops.isfinite(norm)), popxl.int32)
    ops.add_(skipped, is_skipped)
    ops.var_updates.copy_var_update_(in_a_row, (in_a_row + 1) * is_skipped)


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

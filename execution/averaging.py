"""The moving average of a parameter, which stands for it wherever the model is used."""

import numpy as np
import popxl
import popxl_addons as addons
from popxl import ReplicaGrouping, Tensor, ops

from popxl_gpt.execution.sharded_state import add_zeros

AVERAGE = "average"
"""The name of a parameter's average in the optimizer's state of it."""
AVERAGED = "averaged"
"""The name of the number of steps in it."""


class AverageStep(addons.Module):
    """A module whose graph takes a parameter's weights after a step into their average.

    State: ``average``, float32, and ``averaged`` (float32 scalar), the steps that count.

        averaged += 1; average += (var - average) / min(averaged, steps)

    Args:
        steps: weights of as many count: at first all alike, later the older the less.
    """

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps

    @popxl.in_sequence()
    def build(self, var: Tensor, update_if: Tensor, *, holders: ReplicaGrouping) -> None:
        """One step; where ``update_if`` is false, no bit of the state changes.

        Args:
            var: the weights after the step; may be a shard.
            holders: the replicas that have the variable's piece of the parameter.
        """
        average = add_zeros(self, AVERAGE, var, popxl.float32, holders)
        count = self.add_variable_input(AVERAGED, lambda: np.zeros(()), popxl.float32, by_ref=True)
        one, most = (popxl.constant(n, popxl.float32) for n in (1.0, 1.0 / self.steps))
        after = count + one
        share = ops.maximum(one / after, most)
        moved = average + (ops.cast(var, popxl.float32) - average) * share
        for t, new in ((average, moved), (count, after)):
            ops.var_updates.copy_var_update_(t, ops.where(update_if, new, t))

"""`TrainState`: what all updates of an optimizer step share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import popxl
from popxl import Tensor

from popxl_gpt.config.schema import Training

LossScale = Tensor | float
"""What the loss is multiplied by: a tensor where the program finds it, else a constant of its
graphs.
"""
Rounding = Tensor | Literal["nearest"]
"""How updated weights are rounded to their type: at random, by this seed, or to the nearest."""


@dataclass(frozen=True, eq=False)
class TrainState:
    """What an update needs beside a layer's gradients, weights and moments."""

    learning_rate: Tensor
    grad_norm: Tensor
    """Global L2 norm of all gradients, of the unscaled loss."""
    is_applied: Tensor
    """Whether the step's updates happen, bool scalar: else they change nothing."""
    loss_scale: LossScale
    """What the gradients are multiplied by."""
    rounding: Rounding
    """Another one for each kind of layer."""

    @classmethod
    def in_variables(cls, training: Training) -> "TrainState":
        """A state that variables hold, at first of updates that do not happen. Call it in the main
        graph.
        """

        def scalar(name: str) -> Tensor:
            return popxl.variable(1.0, popxl.float32, f"pending.{name}")

        scale: LossScale = training.fixed_scale
        rounding: Rounding = "nearest"
        if training.is_scaled_by_program:
            scale = scalar("loss_scale")
        if training.stochastic_rounding:
            rounding = popxl.variable(np.zeros(2, np.uint32), popxl.uint32, "pending.rounding")
        return cls(
            learning_rate=scalar("learning_rate"),
            grad_norm=scalar("grad_norm"),
            is_applied=popxl.variable(False, popxl.bool, "pending.is_applied"),
            loss_scale=scale,
            rounding=rounding,
        )

    def tensors(self) -> list[Tensor]:
        """The members that are tensors: what a graph is called with, and `unpack` makes a state of.

        The seed comes first, since a loop over layers carries its first inputs from one to the
        next, and the seed alone changes.
        """
        members = (
            self.rounding,
            self.learning_rate,
            self.grad_norm,
            self.is_applied,
            self.loss_scale,
        )
        return [member for member in members if isinstance(member, Tensor)]

    @classmethod
    def unpack(cls, training: Training, tensors: Sequence[Tensor]) -> "TrainState":
        """The state of which these are the tensors."""
        rest = iter(tensors)
        rounding: Rounding = next(rest) if training.stochastic_rounding else "nearest"
        learning_rate, grad_norm, is_applied = next(rest), next(rest), next(rest)
        scale = next(rest) if training.is_scaled_by_program else training.fixed_scale
        return cls(learning_rate, grad_norm, is_applied, scale, rounding)

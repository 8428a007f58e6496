"""Layer norm and RMS norm.

N rows (micro_batch * sequence), H hidden size, h heads per tp1 replica, D head size. tp1, tp2:
replica groups.
"""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, ops
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer, enter, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table
from popxl_gpt.utils.runtime import rms_norm


def gain(model: Model, features: int, **split: Any) -> Parameter:
    """What a norm scales features by, less its offset; split as of `Parameter`."""
    mean = 1.0 - gain_offset(model)
    return Parameter(shape=(features,), role=Role.GAIN, mean=mean, **split)


def gain_offset(model: Model) -> float:
    """What is added to a norm's weight."""
    return 1.0 if model.zero_centered_gains else 0.0


class Norm(Layer):
    """Normalises rows that are split over tp2; statistics in float32."""

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Gain, and the bias of a layer norm, [H] each."""
        table = {"weight": gain(model, model.hidden_size, tp2_axis=0)}
        if model.norm == "layer_norm" and model.biases:
            table["bias"] = Parameter(shape=(model.hidden_size,), role=Role.BIAS, tp2_axis=0)
        return table

    def build(self, x: Tensor) -> Tensor:  # [N, H/tp2]
        """[N, H/tp2] -> [N, H/tp2]."""
        weight, eps = self.parameter("weight"), self.model.layer_norm_eps
        if self.model.norm == "rms_norm":
            return _rms_norm(self.model, x, weight, self.layout.tp2)
        bias = self.parameter("bias") if "bias" in self.table else _zeros(weight)
        if self.layout.tp2.group_size > 1:
            return layer_norm_distributed(x, weight, bias, eps, self.layout.tp2)
        return ops.layer_norm(x, weight, bias, eps)


def _rms_norm(model: Model, x: Tensor, weight: Tensor, group: ReplicaGrouping) -> Tensor:
    """RMS norm of rows that are split over a group, whose replicas send sums of squares of their
    features, and add them up.
    """
    eps, offset, pieces = model.layer_norm_eps, gain_offset(model), group.group_size
    if pieces == 1:
        return rms_norm(x, weight, eps, offset)
    wide, factors = ops.cast(x, popxl.float32), ops.cast(weight, popxl.float32)
    squares = ops.sum(wide * wide, axis=1, keepdims=True)  # [N, 1], of this replica's features
    squares = enter(leave(squares, group), group)  # of all; so are its gradients
    rms = ops.sqrt(squares * (1 / (pieces * x.shape[1])) + eps)
    return ops.cast(wide / rms * (factors + offset if offset else factors), x.dtype)


class HeadNorm(Layer):
    """RMS norm of each head's features, by one gain for all heads; or of those of all heads.

    Sources: Henry et al. 2020, arXiv:2010.04245; OLMo Team 2024, arXiv:2501.00656, section 2.1 (of
    all heads).
    """

    def __init__(self, model: Model, layout: Layout, heads: int):
        super().__init__(model, layout, self.parameters(model, heads))

    @staticmethod
    def parameters(model: Model, heads: int) -> Table:
        """Gain, [D], or of so many heads, [heads*D]."""
        if model.qk_norm_over == "all":
            return {"weight": gain(model, heads * model.head_width, tp1_axis=0)}
        return {"weight": gain(model, model.head_width)}

    def build(self, x: Tensor) -> Tensor:  # [N, h*D], identical over tp2
        """[N, h*D] -> [N, h*D], identical over tp2."""
        weight, tp1 = self.parameter("weight"), self.layout.tp1  # heads are split over tp1
        if self.model.qk_norm_over == "all":
            return _rms_norm(self.model, x, weight, tp1)
        rows = x.reshape((-1, self.model.head_width))
        return _rms_norm(self.model, rows, enter(weight, tp1), self.layout.alone).reshape(x.shape)


def _zeros(like: Tensor) -> Tensor:
    zeros = np.zeros(like.shape, like.dtype.as_numpy())
    return popxl.constant(zeros, like.dtype, "no_bias")

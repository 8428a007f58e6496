"""Layer norm and RMS norm.

N rows (micro_batch * sequence), H hidden size, h heads per tp1 replica, D head size. tp1, tp2:
replica groups.
"""

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer, enter, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table
from popxl_gpt.utils.runtime import rms_norm


class Norm(Layer):
    """Normalises rows that are split over tp2; statistics in float32."""

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Gain, and the bias of a layer norm, [H] each."""
        shape = (model.hidden_size,)
        table = {"weight": Parameter(shape=shape, role=Role.GAIN, tp2_axis=0, mean=1.0)}
        if model.norm == "layer_norm" and model.biases:
            table["bias"] = Parameter(shape=shape, role=Role.BIAS, tp2_axis=0)
        return table

    def build(self, x: Tensor) -> Tensor:  # [N, H/tp2]
        """[N, H/tp2] -> [N, H/tp2]."""
        weight, eps, is_split = (
            self.parameter("weight"),
            self.model.layer_norm_eps,
            self.layout.tp2.group_size > 1,
        )
        if self.model.norm == "rms_norm":
            return self._split_rms_norm(x, weight) if is_split else rms_norm(x, weight, eps)
        bias = self.parameter("bias") if "bias" in self.table else _zeros(weight)
        if is_split:
            return layer_norm_distributed(x, weight, bias, eps, self.layout.tp2)
        return ops.layer_norm(x, weight, bias, eps)

    def _split_rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Replicas send sums of squares of their features, and add them up."""
        tp2, wide = self.layout.tp2, ops.cast(x, popxl.float32)
        squares = ops.sum(wide * wide, axis=1, keepdims=True)  # [N, 1], of this replica's features
        squares = enter(leave(squares, tp2), tp2)  # of all; so are its gradients
        rms = ops.sqrt(squares * (1 / self.model.hidden_size) + self.model.layer_norm_eps)
        return ops.cast(wide / rms * ops.cast(weight, popxl.float32), x.dtype)


class HeadNorm(Layer):
    """RMS norm of each head's features, by one gain for all heads."""

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Gain, [D]."""
        return {"weight": Parameter(shape=(model.head_width,), role=Role.GAIN, mean=1.0)}

    def build(self, x: Tensor) -> Tensor:  # [N, h*D], identical over tp2
        """[N, h*D] -> [N, h*D], identical over tp2."""
        weight = enter(self.parameter("weight"), self.layout.tp1)  # heads are split over tp1
        rows = x.reshape((-1, self.model.head_width))
        return rms_norm(rows, weight, self.model.layer_norm_eps).reshape(x.shape)


def _zeros(like: Tensor) -> Tensor:
    zeros = np.zeros(like.shape, like.dtype.as_numpy())
    return popxl.constant(zeros, like.dtype, "no_bias")

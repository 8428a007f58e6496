"""Linear layer split in two dimensions, and layer norm.

N rows (micro_batch * sequence), H hidden size. tp1, tp2: replica groups.
"""

from typing import Literal

from popxl import Tensor, ops
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed

from config import Model
from modelling.layer import Layer, enter, leave
from modelling.layout import Layout
from modelling.parameters import Parameter, Role, Table

Split = Literal["tp2 to tp1", "tp1 to tp2"]
"""Over which group the features are split before and after a linear layer."""


class Linear(Layer):
    """x @ weight + bias, where x's features are split over one group and the result's over the
    other.
    """

    def __init__(self, model: Model, layout: Layout, table: Table, split: Split):
        super().__init__(model, layout, table)
        groups = (layout.tp2, layout.tp1)
        self.features_in, self.features_out = groups if split == "tp2 to tp1" else groups[::-1]

    @staticmethod
    def parameters(shape: "tuple[int, int]", split: Split, *, std: float, blocks: int = 1) -> Table:
        """Weight [in, out] and bias [out]."""
        if split == "tp2 to tp1":
            weight_axes, bias_axes = {"tp1_axis": 1, "tp2_axis": 0}, {"tp1_axis": 0}
        else:
            weight_axes, bias_axes = {"tp1_axis": 0, "tp2_axis": 1}, {"tp2_axis": 0}
        return {
            "weight": Parameter(
                shape=shape, role=Role.WEIGHT, std=std, blocks=blocks, **weight_axes
            ),
            "bias": Parameter(shape=shape[1:], role=Role.BIAS, blocks=blocks, **bias_axes),
        }

    # [N, in/a], identical over b (a: features_in, b: features_out)
    def build(self, x: Tensor) -> Tensor:
        """[N, in/a] -> [N, out/b], identical over a."""
        x = enter(x, self.features_out)
        y = x @ self.parameter("weight")  # [N, out/b], partial sums over a
        y = leave(y, self.features_in)  # [N, out/b], identical over a
        return y + self.parameter("bias")


class Norm(Layer):
    """Layer norm of rows that are split over tp2; statistics in float32."""

    def __init__(self, model: Model, layout: Layout):
        super().__init__(model, layout, self.parameters(model))

    @staticmethod
    def parameters(model: Model) -> Table:
        """Gain and bias, [H] each."""
        shape = (model.hidden_size,)
        return {
            "weight": Parameter(shape=shape, role=Role.GAIN, tp2_axis=0),
            "bias": Parameter(shape=shape, role=Role.BIAS, tp2_axis=0),
        }

    def build(self, x: Tensor) -> Tensor:  # [N, H/tp2]
        """[N, H/tp2] -> [N, H/tp2]."""
        weight, bias = self.parameter("weight"), self.parameter("bias")
        if self.layout.tp2.group_size == 1:
            return ops.layer_norm(x, weight, bias, self.model.layer_norm_eps)
        return layer_norm_distributed(x, weight, bias, self.model.layer_norm_eps, self.layout.tp2)

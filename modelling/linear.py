"""Linear layer split in two dimensions.

N rows (micro_batch * sequence), H hidden size, R rank of adapters. tp1, tp2: replica groups.
"""

import math
from typing import Any, Literal

import numpy as np
import popxl
from popxl import Tensor

from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.layer import Layer, enter, leave
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table
from popxl_gpt.utils.runtime import float8_e4m3fn, float8_product, with_scale

Split = Literal["tp2 to tp1", "tp1 to tp2"]
"""The groups over which the features are split before and after a linear layer."""


DOWN, UP = "lora_a", "lora_b"
"""An adapter's two parameters."""


class Linear(Layer):
    """x @ weight + bias, or without a bias, where x's features are split over one group and the
    result's over the other. With an adapter, weight + lora_a @ lora_b * lora_alpha / lora_rank is
    the weight.

    Source of adapters: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
    arXiv:2106.09685, section 4.1.
    """

    def __init__(self, model: Model, layout: Layout, table: Table, split: Split):
        super().__init__(model, layout, table)
        groups = (layout.tp2, layout.tp1)
        self.features_in, self.features_out = groups if split == "tp2 to tp1" else groups[::-1]

    @staticmethod
    def parameters(
        model: Model,
        shape: "tuple[int, int]",
        split: Split,
        *,
        std: float,
        blocks: "tuple[int, ...]" = (1,),
        heads: int = 1,
        has_bias: bool | None = None,
    ) -> Table:
        """Weight [in, out] and bias [out]; with adapters one, [in, R] and [R, out]: it is 0 at
        first, for the second one is.

        Args:
            has_bias: none: as the model's linear layers have.
        """
        out, into = ("tp1_axis", "tp2_axis") if split == "tp2 to tp1" else ("tp2_axis", "tp1_axis")
        cut: dict[str, Any] = {"blocks": blocks, "heads": heads}
        columns = {out: 1, **cut}  # where what comes out is split, and what goes in
        row = {out: 0, **cut}
        rows: dict[str, Any] = {into: 0}
        table = {"weight": Parameter(shape=shape, role=Role.WEIGHT, std=std, **columns, **rows)}
        if model.biases if has_bias is None else has_bias:
            table["bias"] = Parameter(shape=shape[1:], role=Role.BIAS, **row)
        if model.lora_rank:
            down, up = (shape[0], model.lora_rank), (model.lora_rank, shape[1])
            fresh = 1 / math.sqrt(shape[0])
            table[DOWN] = Parameter(shape=down, role=Role.ADAPTER, std=fresh, **rows)
            table[UP] = Parameter(shape=up, role=Role.ADAPTER, **columns)
        return table

    # [N, in/a], identical over b (a: features_in, b: features_out)
    def build(self, x: Tensor) -> Tensor:
        """[N, in/a] -> [N, out/b], identical over a."""
        x = enter(x, self.features_out)
        y = self._product(x)  # [N, out/b], partial sums over a
        if self.model.lora_rank:
            y = y + self._adapted(x)
        y = leave(y, self.features_in)  # [N, out/b], identical over a
        return y + self.parameter("bias") if "bias" in self.table else y

    def _product(self, x: Tensor) -> Tensor:
        """x @ weight: [N, in/a] -> [N, out/b], partial sums over a."""
        if self.model.products == "precision":
            return x @ self.parameter("weight")
        weight = self.parameter("weight", float8_e4m3fn)
        everyone, zero = self.layout.everyone, np.zeros((), np.float32)
        # of the whole weight
        weight_amax = self.add_variable_input(
            amax_name("weight"), lambda: zero, popxl.float32, replica_grouping=everyone
        )
        # x is split over a, and the gradient of the product over b
        narrow, x_amax = with_scale(x, float8_e4m3fn, self.features_in)
        amaxes = x_amax, weight_amax
        return float8_product(narrow, weight, *amaxes, self.dtype, self.features_out)

    def _adapted(self, x: Tensor) -> Tensor:
        """What the adapter adds: [N, in/a] -> [N, out/b], partial sums over a."""
        # each is identical over a group over which the computation is split
        down = enter(self.parameter(DOWN), self.features_out)  # [in/a, R]
        up = enter(self.parameter(UP), self.features_in)  # [R, out/b]
        return ((x @ down) * adapter_scale(self.model)) @ up


def amax_name(weight: str) -> str:
    """The name of what the scale of a weight in 8 bits comes from."""
    return f"{weight}_amax"


def adapter_scale(model: Model) -> float:
    """What an adapter's product is multiplied by."""
    return model.lora_alpha / model.lora_rank


def merged(model: Model, weight: np.ndarray, down: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The weight of the same layer without an adapter, float32: [in, out], [in, R], [R, out] ->
    [in, out].
    """
    added = down.astype(np.float32) @ up.astype(np.float32) * np.float32(adapter_scale(model))
    return weight.astype(np.float32) + added

"""Affine map of the last axis, multiplied in float8."""

from typing import Any

import numpy as np
import popxl
from popxl import ReplicaGrouping, Tensor, dtypes, ops

from popxl_addons.layers.initial import truncated_normal
from popxl_addons.layers.linear import Linear
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale
from popxl_addons.utils import WeightsDict

METRICS = {"amax": fp8_amax_scale, "mse": fp8_mse_scale}
LOWEST, HIGHEST = -15, 16
"""Scales of operands: the product's is the negative of the sum of two, and must lie between -32 and
31.
"""


class LinearFP8(Module):
    """``x @ weight + bias`` with the variables of `Linear`, whose products are of float8 tensors.

    x and the weight are cast to float8_143, the gradient to float8_152, each with a scale of its
    own that the product takes back. Products are float16 and then cast to x's dtype. The gradient
    is that of the exact product at the rounded operands, which are kept for it.

    Args:
        scale_metric: where scales come from: "amax" (`fp8_amax_scale`), "mse" (`fp8_mse_scale`) or
            "manual_scale". Scales are clipped to -15 .. 16.
        scale: the log2 scale of all operands with "manual_scale", from -15 to 16.
        replica_grouping: replicas that share the variables; default: all.
    Raises:
        ValueError: for another metric, or a scale out of range.
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        scale_metric: str = "amax",
        scale: int = 0,
        replica_grouping: ReplicaGrouping | None = None,
    ) -> None:
        super().__init__()
        if scale_metric not in (*METRICS, "manual_scale"):
            raise ValueError(
                f"LinearFP8: got scale_metric {scale_metric!r}; expected "
                f"{', '.join(map(repr, METRICS))} or 'manual_scale'."
            )
        if not LOWEST <= scale <= HIGHEST:
            raise ValueError(
                f"LinearFP8: got scale {scale}; expected {LOWEST} <= scale <= {HIGHEST}."
            )
        self.out_features = out_features
        self.bias = bias
        self.scale_metric = scale_metric
        self.scale = scale
        self.replica_grouping = replica_grouping

    def build(self, x: Tensor) -> Tensor:
        """Shapes: ``[..., in] -> [..., out]``, float16, bfloat16 or float32."""
        shape = (x.shape[-1], self.out_features)
        self.weight = self.add_variable_input(
            "weight",
            lambda: truncated_normal(shape),
            x.dtype,
            replica_grouping=self.replica_grouping,
        )
        x_codes, x_scale = self._narrow(x, dtypes.float8_143)
        weight_codes, weight_scale = self._narrow(self.weight, dtypes.float8_143)
        self.aux["x"], self.aux["x_scale"] = x_codes, x_scale
        self.aux["weight"], self.aux["weight_scale"] = weight_codes, weight_scale
        y = _product(x_codes, weight_codes, x_scale + weight_scale, x.dtype)
        if self.bias:
            self.b = self.add_variable_input(
                "bias",
                lambda: np.zeros(self.out_features),
                x.dtype,
                replica_grouping=self.replica_grouping,
            )
            y = y + self.b
        return y

    def build_grad(self, dLdy: Tensor) -> Tensor | None:  # type: ignore[override]
        """Shapes: ``[..., out] -> [..., in]``; the variables' gradients are set beside it. Only
        what is required.
        """
        x, weight = self.aux["x"], self.aux["weight"]
        dy, dy_scale = self._narrow(dLdy, dtypes.float8_152)
        if "weight" in self.var_grad:
            rows, dy_rows = (t.reshape((-1, t.shape[-1])) for t in (x, dy))
            self.var_grad["weight"] = _product(
                rows.T, dy_rows, self.aux["x_scale"] + dy_scale, dLdy.dtype
            )
        if "bias" in self.var_grad:
            self.var_grad["bias"] = ops.sum(dLdy, axis=range(dLdy.rank - 1))
        if not self.var_grad.inputs:
            return None
        return _product(dy, weight.T, dy_scale + self.aux["weight_scale"], dLdy.dtype)

    def _narrow(self, t: Tensor, dtype: popxl.dtype) -> tuple[Tensor, Tensor]:
        """(t in float8, the log2 scale that it was multiplied with)."""
        if self.scale_metric == "manual_scale":
            log2_scale: Tensor = popxl.constant(self.scale, dtypes.int32, "scale")
        else:
            log2_scale = ops.clip(METRICS[self.scale_metric](t, dtype), LOWEST, HIGHEST)
        return ops.pow2scale_cast_to_fp8(t, log2_scale, dtype), log2_scale

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """``{variable: host weight}`` from a torch linear layer, as for `Linear`."""
        return Linear.torch_mapping(variables, nn_layer, dtype)


def _product(lhs: Tensor, rhs: Tensor, log2_scale: Tensor, dtype: popxl.dtype) -> Tensor:
    """lhs @ rhs without the scales of both, whose sum is ``log2_scale``."""
    y = ops.matmul_pow2scaled(lhs, rhs, -log2_scale)
    return y if dtype is dtypes.float16 else ops.cast(y, dtype)

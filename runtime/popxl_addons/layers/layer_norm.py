"""Normalisation of rows."""

from typing import Any

import numpy as np
import popxl
from popxl import Tensor, ops
from popxl.utils import to_numpy

from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict


class LayerNorm(Module):
    """Rows of [N, C] to mean 0 and variance 1, times ``weight`` (ones) plus ``bias`` (zeros)."""

    def build(self, x: Tensor, eps: float = 1e-5) -> Tensor:
        """Shapes: ``[N, C] -> [N, C]``. ValueError for another rank."""
        if len(x.shape) != 2:
            raise ValueError(
                f"LayerNorm: got x {x.spec}; expected two axes [N, C]. Reshape it first."
            )
        self.weight = self.add_variable_input("weight", lambda: np.ones(x.shape[-1]), x.dtype)
        self.bias = self.add_variable_input("bias", lambda: np.zeros(x.shape[-1]), x.dtype)
        return ops.layer_norm(x, self.weight, self.bias, eps)

    @staticmethod
    def torch_mapping(
        variables: NamedTensors, nn_layer: Any, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """``{variable: host weight}`` from a torch layer norm; several axes are flattened."""
        return WeightsDict(
            {
                variables.weight: to_numpy(to_numpy(nn_layer.weight).reshape(-1), dtype),
                variables.bias: to_numpy(to_numpy(nn_layer.bias).reshape(-1), dtype),
            }
        )

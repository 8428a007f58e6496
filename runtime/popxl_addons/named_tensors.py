"""Trees of tensors and of their host data."""

from collections.abc import Mapping

import numpy as np
from popxl import Tensor, ops

from popxl_addons.dot_tree import DotTree

TensorMap = Mapping[Tensor, Tensor]


class NamedTensorData(DotTree[np.ndarray]):
    """Arrays by name."""


class NamedTensors(DotTree[Tensor]):
    """Tensors by name."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, sorted by their own names."""
        return tuple(sorted(self.values_flat(), key=lambda t: t.name))

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """Flat ``{dotted name: tensor}``."""
        return self.to_dict()

    def remap(self, mapping: TensorMap) -> "NamedTensors":
        """The same names with every tensor replaced through ``mapping``. KeyError for a tensor that
        it lacks.
        """
        return self.map(lambda t: mapping[t])


def print_named_tensors(named_tensors: NamedTensors) -> NamedTensors:
    """Print every tensor when executed, whatever MODEL_LOG_LEVEL says; returns the tensors to use
    downstream.
    """
    names = named_tensors.to_dict()
    return NamedTensors.from_dict(
        {name: ops.print_tensor(t, title=name) for name, t in names.items()}
    )

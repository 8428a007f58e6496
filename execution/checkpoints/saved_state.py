"""What of a session a checkpoint holds: layers with their tensors, seeds, counters."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
from popxl.tensor import Variable

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.overflow import COUNTED, SEEDS
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Parameter, Table
from popxl_gpt.utils.runtime import coded_moment, decoded_moment, shard_count


@dataclass(frozen=True)
class Position:
    """Where a run stands."""

    step: int
    """Optimizer steps done."""
    data: str
    """Fingerprint of the training data."""
    metrics: int | None = None
    """Lines that metrics.jsonl has by then; None where that was not written down."""
    validation_loss: float | None = None
    """The loss on held-out text after this step, where it was measured and is a number."""
    tokens: int | None = None
    """Seen so far; None: as many as so many steps of the configuration's batch have."""
    schedule: dict[str, Any] | None = None
    """Of a run that ends by the clock, once its end is fixed: see `minutes.schedule`."""
    validation_fingerprint: str | None = None
    """Names what the loss on held-out text was measured on; None where there is no loss, or an
    earlier version wrote it.
    """


def layers_of(config: Config) -> "list[str]":
    """Names of layers, in the order of a checkpoint's files."""
    return ["embedding", *(f"decoder.{n}" for n in range(config.model.layers)), "head"]


def layer_variables(
    session: addons.TaskSession, config: Config
) -> "dict[str, dict[str, Variable]]":
    """Variables of the state by layer and by name in the layer's file."""
    return {
        layer: {
            f"{kind}.{name}": variable
            for kind in ("weights", "optimizer")
            if f"{kind}.{layer}" in session.state
            for name, variable in session.state[f"{kind}.{layer}"].to_dict().items()
        }
        for layer in layers_of(config)
    }


def layer_bytes(session: addons.TaskSession, config: Config) -> "dict[str, int]":
    """Bytes of each layer's tensors in a checkpoint."""
    table = model_table(config.model)

    def size(layer: str, name: str, variable: Variable) -> int:
        parameter = parameter_of(table, layer, name)
        width = 2 if variable.dtype is popxl.float16 else 4
        return width * (1 if parameter is None else math.prod(parameter.shape))

    return {
        layer: sum(size(layer, name, variable) for name, variable in variables.items())
        for layer, variables in layer_variables(session, config).items()
    }


def scalars_of(session: addons.TaskSession) -> "dict[str, Variable]":
    """Variables of the state that belong to no layer, seeds and counters, by name."""
    found: dict[str, Any] = session.state.to_dict()
    return {name: found[name] for name in (*SEEDS, *COUNTED) if name in found}


def parameter_of(table: Table, layer: str, name: str) -> Parameter | None:
    """The parameter that a tensor of the state is laid out like; none for scalars."""
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        rest, _, moment = rest.rpartition(".")
        if moment == "step":
            return None
    return table[f"{layer}.{rest}"]


@dataclass(frozen=True)
class TensorCodec:
    """From a tensor as a checkpoint has it to the host data of its variable, and back."""

    name: str
    """In the layer's file."""
    parameter: Parameter | None
    """What the tensor is laid out like; none for scalars."""
    config: Config
    shards: int | None
    """Pieces of a moment in 8 bits, each of which has its own bytes; none: numbers are kept as they
    are.
    """

    @classmethod
    def of(
        cls, table: Table, layer: str, name: str, variable: Variable, config: Config
    ) -> "TensorCodec":
        """That of a layer's variable."""
        shards = shard_count(variable) if variable.dtype is popxl.uint8 else None
        return cls(name, parameter_of(table, layer, name), config, shards)

    def whole(self, pieces: np.ndarray) -> np.ndarray:
        """The tensor as a checkpoint has it, from the host data of its variable."""
        if self.parameter is None:
            # not ascontiguousarray, which gives scalars an axis
            return np.asarray(pieces, order="C")
        if self.shards is not None:
            count = math.prod(self.parameter.shard_shape(*self._split))
            pieces = decoded_moment(self._moment, pieces, count, self.shards)
        return self.parameter.unshard(pieces, *self._split)

    def pieces(self, whole: np.ndarray) -> np.ndarray:
        """The inverse: what the variable is given."""
        if self.parameter is None:
            return whole
        pieces = self.parameter.shard(whole, *self._split)
        if self.shards is None:
            return pieces
        rank = len(self.parameter.shape)
        flat = pieces.reshape(*pieces.shape[: pieces.ndim - rank], -1)
        return coded_moment(self._moment, flat, self.shards)

    @property
    def _split(self) -> "tuple[int, int]":
        execution = self.config.execution
        return execution.tensor_parallel_1, execution.tensor_parallel_2

    @property
    def _moment(self) -> str:
        return self.name.rpartition(".")[2]


def is_finite(array: np.ndarray) -> bool:
    """Whether all numbers are; minimum and maximum are NaN where one is, and need no memory."""
    return array.size == 0 or bool(np.isfinite(array.min()) and np.isfinite(array.max()))

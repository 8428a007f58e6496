"""What of a session a checkpoint holds: layers with their tensors, seeds, counters."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import popxl
import popxl_addons as addons
from popxl.tensor import Variable

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.averaging import AVERAGED
from popxl_gpt.execution.overflow import COUNTED, SEEDS
from popxl_gpt.modelling.gpt import model_table, program_table
from popxl_gpt.modelling.parameters import Parameter, cut, joined, part_number, whole_name
from popxl_gpt.utils.runtime import coded_moment, decoded_moment, shard_count

BESIDE = ("metrics", "validation_loss", "validation_fingerprint", "schedule", "elapsed")
"""What a checkpoint's description has of a position beside step and data, where there is any."""


COUNTERS = ("step", AVERAGED)
"""Optimizer state of a parameter that is one number."""


@dataclass(frozen=True)
class Position:
    """The point that a run has come to."""

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
    """Schedule of a run that ends by the clock, once its end is fixed: `TimedSchedule.state`."""
    elapsed: float | None = None
    """Seconds of its minutes that are used; None for other runs, and of earlier versions."""
    validation_fingerprint: str | None = None
    """Names what the loss on held-out text was measured on; None where there is no loss, or an
    earlier version wrote it.
    """

    @classmethod
    def of(cls, manifest: "dict[str, Any]") -> "Position":
        """What a checkpoint's description says. One without its tokens had batches of one size."""
        saved, data, step = manifest["config"], manifest["data"], manifest["step"]
        per_step = saved["training"]["global_batch_size"] * saved["model"]["sequence_length"]
        beside = {name: manifest.get(name) for name in BESIDE}
        return cls(step, data["fingerprint"], tokens=data.get("tokens", step * per_step), **beside)

    def beside(self) -> "dict[str, Any]":
        """What a description has of it beside step and data."""
        found = {name: getattr(self, name) for name in BESIDE}
        return {name: value for name, value in found.items() if value is not None}


def layers_of(config: Config) -> "list[str]":
    """Names of layers, in the order of a checkpoint's files."""
    return ["embedding", *(f"decoder.{n}" for n in range(config.model.layers)), "head"]


def file_of(layer: str) -> str:
    """Name of a layer's file."""
    return f"{layer}.safetensors"


def layer_tensors(
    session: addons.TaskSession, config: Config
) -> "dict[str, dict[str, TensorCodec]]":
    """The tensors of the state by layer and by name. Of what is in parts each has a tensor; in the
    layer's file they are one, of the name that `whole_name` gives.
    """
    table, state = program_table(config.model, config.execution), session.state
    found: dict[str, dict[str, TensorCodec]] = {layer: {} for layer in layers_of(config)}
    for layer, kind in itertools.product(found, ("weights", "optimizer")):
        part = state[f"{kind}.{layer}"].to_dict() if f"{kind}.{layer}" in state else {}
        for name, variable in part.items():
            of, _, moment = (name, "", "") if kind == "weights" else name.rpartition(".")
            parameter = None if moment in COUNTERS else table[f"{layer}.{of}"]
            codec = TensorCodec(f"{kind}.{name}", variable, parameter, config)
            found[layer][codec.name] = codec
    return found


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a layer's file, and what holds it: one variable, or one for each part."""

    parameter: Parameter | None
    """What the whole is laid out like; none for scalars, which all parts have alike."""
    codecs: "tuple[TensorCodec, ...]"
    config: Config

    @property
    def shape(self) -> "tuple[int, ...]":
        """Shape of the whole."""
        return () if self.parameter is None else self.parameter.shape

    def joined(self, parts: "Mapping[str, np.ndarray]") -> np.ndarray:
        """The tensor, from its parts by their codecs' names."""
        arrays = [parts[codec.name] for codec in self.codecs]
        if self.parameter is None:
            return arrays[0]
        return joined(self.parameter, arrays, self.config.execution.tensor_parallel_1)

    def cut(self, whole: np.ndarray) -> "list[np.ndarray]":
        """The inverse: what each codec takes."""
        if self.parameter is None:
            return [whole] * len(self.codecs)
        tp1 = self.config.execution.tensor_parallel_1
        return cut(self.parameter, whole, len(self.codecs), tp1)


def file_tensors(
    layer: str, codecs: "Mapping[str, TensorCodec]", config: Config
) -> "dict[str, FileTensor]":
    """The tensors of a layer's file by name, of the codecs of its state."""
    groups: dict[str, list[TensorCodec]] = {}
    for name, codec in codecs.items():
        groups.setdefault(whole_name(name), []).append(codec)
    table, found = model_table(config.model), {}
    for name, group in groups.items():
        kind, _, of = name.partition(".")
        of = of if kind == "weights" else of.rpartition(".")[0]
        parameter = None if group[0].parameter is None else table[f"{layer}.{of}"]
        in_order = sorted(group, key=lambda codec: part_number(codec.name))
        found[name] = FileTensor(parameter, tuple(in_order), config)
    return found


def scalars_of(session: addons.TaskSession) -> "dict[str, Variable]":
    """Variables of the state that belong to no layer, seeds and counters, by name."""
    found: dict[str, Any] = session.state.to_dict()
    return {name: found[name] for name in (*SEEDS, *COUNTED) if name in found}


@dataclass(frozen=True)
class TensorCodec:
    """The way from a tensor as a checkpoint has it to the host data of its variable, and back."""

    name: str
    """The tensor's name in the layer's file."""
    variable: Variable
    parameter: Parameter | None
    """What the tensor is laid out like; none for scalars."""
    config: Config

    @property
    def shape(self) -> "tuple[int, ...]":
        """Shape of the whole tensor."""
        return () if self.parameter is None else self.parameter.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in a checkpoint."""
        return (2 if self.variable.dtype is popxl.float16 else 4) * math.prod(self.shape)

    @property
    def shards(self) -> int | None:
        """Pieces of a moment in 8 bits, each of which has its own bytes; none: numbers are kept as
        they are.
        """
        return shard_count(self.variable) if self.variable.dtype is popxl.uint8 else None

    def whole(self, pieces: np.ndarray) -> np.ndarray:
        """The tensor as a checkpoint has it, from the host data of its variable."""
        if self.parameter is None:
            # not ascontiguousarray, which gives scalars an axis
            return np.asarray(pieces, order="C")
        if (shards := self.shards) is not None:
            count = math.prod(self.parameter.shard_shape(*self._split))
            pieces = decoded_moment(self._moment, pieces, count, shards)
        return self.parameter.unshard(pieces, *self._split)

    def pieces(self, whole: np.ndarray) -> np.ndarray:
        """The inverse: what the variable is given."""
        if self.parameter is None:
            return whole
        pieces, shards = self.parameter.shard(whole, *self._split), self.shards
        if shards is None:
            return pieces
        rank = len(self.parameter.shape)
        flat = pieces.reshape(*pieces.shape[: pieces.ndim - rank], -1)
        return coded_moment(self._moment, flat, shards)

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

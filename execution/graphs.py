"""The graphs of each kind of layer, and what the phases of a program are given.

Layers of a kind share graphs; row n of a buffer is layer n's. Training and inference have records
of their own: a layer in training has gradients and an optimizer, a layer in inference has weights
and a forward pass.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

import popxl
import popxl_addons as addons
from popxl import Tensor, ops
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import NamedRemoteBuffers
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.batch_serialisation import LayerIO
from popxl_gpt.execution.optimizer import Optimizer, grad_norm_sq
from popxl_gpt.execution.train_state import Rounding, TrainState
from popxl_gpt.execution.transfers import Gather, Load, Reduce, Row, Store
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Table, trained

COUNTER = "mean_accum_counter"
"""The name of the counter beside a gradient's accumulators."""
Tree = TypeVar("Tree", NamedTensors, NamedVariableFactories)


def summed(accumulators: Tree) -> Tree:
    """The sums over micro-batches by parameter, of a gradient's accumulators: none where nothing is
    trained.
    """
    found: Tree = accumulators.accum if "accum" in accumulators else type(accumulators)()
    return found


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's weights in remote memory, and how they come to the device."""

    factories: NamedVariableFactories
    """The layer's own variables: weights, and on split layers its replica's place in a group."""
    buffers: NamedRemoteBuffers
    """A buffer for everything that the layer's graphs name, tied weights of another layer
    included.
    """
    load: Load
    gather: Gather


@dataclass(frozen=True, eq=False)
class NarrowWeights:
    """Weights of 8 bits, beside the rows that updates change: phases move half of the bytes."""

    weights: Weights
    """What layers load that multiply 8 bits."""
    loads: Mapping[str, Load]
    """The load of each of these weights as it is trained."""
    stores: Mapping[str, Store]
    """The store of each, rounded."""

    def store(self, name: str, weight: Tensor, row: Row) -> None:
        """Store a weight, or a shard, in 8 bits; all replicas do, for the scale is of the whole."""
        self.stores[name](NamedTensors.pack([name], [weight]), row)

    def renew(self, row: Row) -> None:
        """Store all weights of a row as they are trained."""
        for name, load in self.loads.items():
            self.store(name, load(row)[name], row)


@dataclass(frozen=True, eq=False)
class Gradients:
    """A layer's gradients: where they are summed, and where they wait for the update."""

    accumulators: NamedVariableFactories
    """Sums over micro-batches (`accum.<name>`) and their counter, for everything that the layer's
    graphs name.
    """
    factories: NamedVariableFactories
    """The rows of the layer's own gradients: sums, in the type in which they wait."""
    buffers: NamedRemoteBuffers
    """A buffer for each gradient, tied weights included; none where the gradient never leaves the
    phase.
    """
    reduce: Reduce
    store: Store
    loads: Mapping[str, Load]
    """The load of each of them."""
    per_group: int
    """Gradients whose mean a group of micro-batches adds to the accumulators."""


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """A layer's optimizer and its state.

    An update takes one parameter after the other, so that no more than the largest one's state is
    there at a time.
    """

    optimizer: Optimizer
    buffers: NamedRemoteBuffers
    """A buffer for each tensor of the state."""
    loads: Mapping[str, Load]
    """The load of each parameter: its `weight`, and the optimizer's `state` of it."""
    stores: Mapping[str, Store]
    """The store of each parameter: the same tensors."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerGraphs:
    """What a kind of layer has in every program."""

    table: Table
    """The layer's own parameters."""
    rows: int
    """Layers of this kind."""
    weights: Weights

    def fwd_load(self, row: Row) -> NamedTensors:
        """Shards of a layer's weights."""
        return self.weights.load(row)

    def fwd_all_gather(self, shards: NamedTensors) -> NamedTensors:
        """Whole weights from their shards."""
        return self.weights.gather(shards)


@dataclass(frozen=True, eq=False, kw_only=True)
class InferenceGraphs(LayerGraphs):
    """A kind of layer in a program that only runs forward."""

    fwd: addons.GraphWithNamedArgs
    """Forward pass over all micro-batches."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingGraphs(LayerGraphs):
    """A kind of layer in training: backward pass and update. Of the head, this is all."""

    config: Config
    layout: Layout
    grad: addons.GraphWithNamedArgs
    """Adds the gradients of all micro-batches to accumulators; the head's does its forward pass
    too.
    """
    gradients: Gradients
    optimizer_state: OptimizerState
    narrow: NarrowWeights | None = None
    """The weights in 8 bits, where some of the layers multiply these."""

    @property
    def trained(self) -> Table:
        """The parameters that training changes."""
        return trained(self.table, self.config.model.lora_rank > 0)

    def grad_begin(self, row: Row, group: Tensor | None) -> NamedTensors:
        """Accumulators and their counter as a group of micro-batches begins with them: as groups
        before it have left them, where these waited as they were; else zeros.

        Args:
            group: how many groups went before, int32 scalar; None: none did.
        """
        own = self.gradients
        if group is None or own.reduce.graph is not None or not own.loads:
            return own.accumulators.init_zero()
        found = {f"accum.{name}": self.grad_load(name, row) for name in own.loads}
        found[COUNTER] = ops.cast(group, popxl.float32) * float(own.per_group)
        return NamedTensors.from_dict(found)

    def grad_end(self, sums: NamedTensors, row: Row, group: Tensor | None) -> NamedTensors:
        """The means over micro-batches of all groups so far, and over the data-parallel replicas,
        as shards, by parameter.

        Where replicas reduce theirs, each group's mean is added to that of the groups before it: a
        sum of other parts than without groups, which differs by rounding.
        """
        means = self.gradients.reduce(summed(sums))
        if group is None or self.gradients.reduce.graph is None:
            return means
        count, found = ops.cast(group, popxl.float32), {}
        for name, mean in means.to_dict().items():
            found[name] = self.grad_load(name, row)
            ops.var_updates.accumulate_mean_(found[name], mean, count)
        return NamedTensors.from_dict(found)

    def grad_norm_sq(self, gradients: NamedTensors) -> Tensor:
        """This replica's part of the layer's own squared gradient norm."""
        return grad_norm_sq(self.trained, gradients, self.layout, self.config.training)

    def grad_store(self, gradients: NamedTensors, row: Tensor, rounding: Rounding) -> None:
        """Store reduced gradients until the update.

        Args:
            rounding: of the layer's kind; each row draws from a seed of its own.
        """
        if isinstance(rounding, Tensor):
            rounding = rounding + ops.cast(row, popxl.uint32)
        self.gradients.store(gradients, row, rounding)

    def grad_load(self, name: str, row: Row) -> Tensor:
        """A reduced gradient that waits in its buffer, in float32."""
        return self.gradients.loads[name](row)[name]

    def optim_fwd_load(self, name: str, row: Row) -> NamedTensors:
        """A parameter's `weight`, a shard, and the optimizer's `state` of it."""
        return self.optimizer_state.loads[name](row)

    def optim_fwd_store(self, name: str, tensors: NamedTensors, row: Row) -> None:
        """Store both, and the weight in 8 bits where layers multiply that."""
        self.optimizer_state.stores[name](tensors, row)
        if self.narrow is not None and name in self.narrow.stores:
            self.narrow.store(name, tensors.weight, row)

    def optimize(
        self, name: str, tensors: NamedTensors, gradient: Tensor, state: TrainState
    ) -> None:
        """Change a parameter's weight and the optimizer's state of it in place, where the norm is
        finite.
        """
        self.optimizer_state.optimizer(name, tensors.weight, gradient, tensors.state, state)


@dataclass(frozen=True, eq=False, kw_only=True)
class TwoPassGraphs(TrainingGraphs):
    """A kind of layer in training whose forward pass is a phase of its own: embedding, decoder."""

    fwd: addons.GraphWithNamedArgs
    """Forward pass over all micro-batches."""

    @classmethod
    def of(cls, graphs: TrainingGraphs, fwd: addons.GraphWithNamedArgs) -> "TwoPassGraphs":
        """The graphs of the backward pass and the update, with a forward pass."""
        return cls(**vars(graphs), fwd=fwd)


Graphs = TypeVar("Graphs")
Kind = TypeVar("Kind", bound=Hashable)


@dataclass(frozen=True, eq=False)
class LayerRun(Generic[Graphs]):
    """Layers, one after the other, that share graphs."""

    layers: range
    graphs: Graphs
    keeps: bool = False
    """Whether they keep more activations for their gradients than the layers before."""

    @classmethod
    def of(
        cls,
        kinds: Sequence[Kind],
        layers: range,
        by_kind: Mapping[Kind, Graphs],
        keeps: bool = False,
    ) -> "tuple[LayerRun[Graphs], ...]":
        """The runs of some layers, from the kind of each layer and the graphs of each kind."""
        found = []
        for kind, group in groupby(layers, kinds.__getitem__):
            first, *others = group
            found.append(cls(range(first, first + 1 + len(others)), by_kind[kind], keeps))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """All that the phases of a training step need."""

    config: Config
    layout: Layout
    io: LayerIO
    embedding: TwoPassGraphs | InferenceGraphs
    """Only runs forward where adapters alone are trained."""
    decoder: TwoPassGraphs
    """What all layers share, and the passes of one kind of them."""
    head: TrainingGraphs
    layers: tuple[LayerRun[TwoPassGraphs], ...]
    """All layers of the decoder, in order."""


@dataclass(frozen=True, eq=False)
class ForwardGraphs:
    """The layers of a program that only runs forward."""

    config: Config
    embedding: InferenceGraphs
    decoder: InferenceGraphs
    """What all layers share, and the pass of one kind of them."""
    head: InferenceGraphs
    layers: tuple[LayerRun[InferenceGraphs], ...]
    """All layers of the decoder, in order."""


@dataclass(frozen=True, eq=False)
class ForwardPass(ForwardGraphs):
    """All that the phases of a program need that runs forward over batches."""

    io: LayerIO

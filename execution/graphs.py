"""`Graphs`: one kind of layer's part of the step. Layers of a kind share graphs; row n of a buffer
is layer n's.
"""

from dataclasses import dataclass
from typing import Mapping, Optional

import popxl_addons as addons
from popxl import Tensor
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import NamedRemoteBuffers
from popxl_addons.variable_factory import NamedVariableFactories

from config import Config
from execution.batch_serialisation import Connections
from execution.optimizer import Optimizer, sum_of_squares
from execution.transfers import Gather, Load, Reduce, Row, Store
from modelling import Layout, Table


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
class Update:
    """What a trained layer has beside its weights: gradients, optimizer, and their transfers.

    An update takes one parameter after the other, so that no more than the largest one's state is
    there at a time.
    """

    accumulators: NamedVariableFactories
    """Gradient accumulators (`accum.<name>`) and their counter, for everything that the layer's
    graphs name.
    """
    gradients: NamedRemoteBuffers
    """A buffer for each gradient, tied weights included; none where the gradient never leaves the
    phase.
    """
    state: NamedRemoteBuffers
    """A buffer for each tensor of the optimizer's state."""
    optimizer: Optimizer
    reduce: Reduce
    gradient_store: Store
    gradient_loads: Mapping[str, Load]
    """For each of the layer's own parameters."""
    loads: Mapping[str, Load]
    """For each: its `weight`, and the optimizer's `state` of it."""
    stores: Mapping[str, Store]
    """For each: the same."""


@dataclass(frozen=True, eq=False)
class Graphs:
    """One kind of layer's part of the step."""

    config: Config
    layout: Layout
    table: Table
    """The layer's own parameters."""
    rows: int
    """Layers of this kind."""
    weights: Weights
    fwd: Optional[addons.GraphWithNamedArgs] = None
    """Forward pass over all micro-batches; the head in training has none by itself."""
    grad: Optional[addons.GraphWithNamedArgs] = None
    """Adds the gradients of all micro-batches to accumulators; the head's does its forward pass
    too.
    """
    update: Optional[Update] = None
    """None in a program that only runs forward."""

    def fwd_load(self, row: Row) -> NamedTensors:
        """Shards of a layer's weights."""
        return self.weights.load(row)

    def fwd_all_gather(self, shards: NamedTensors) -> NamedTensors:
        """Whole weights from their shards."""
        return self.weights.gather(shards)

    def grad_zeros(self) -> NamedTensors:
        """Fresh accumulators and their counter."""
        return self.trained.accumulators.init_zero()

    def grad_reduce(self, accumulators: NamedTensors) -> NamedTensors:
        """Means over the data-parallel replicas, as shards, by parameter."""
        return self.trained.reduce(accumulators)

    def grad_squares(self, gradients: NamedTensors) -> Tensor:
        """This replica's part of the layer's own squared gradient norm."""
        return sum_of_squares(self.table, gradients, self.layout, self.config.training)

    def grad_store(self, gradients: NamedTensors, row: Row) -> None:
        """Put reduced gradients away until the update."""
        self.trained.gradient_store(gradients, row)

    def grad_load(self, name: str, row: Row) -> Tensor:
        """The reduced gradient of one of the layer's own parameters."""
        return self.trained.gradient_loads[name](row)[name]

    def optim_fwd_load(self, name: str, row: Row) -> NamedTensors:
        """A parameter's `weight`, a shard, and the optimizer's `state` of it."""
        return self.trained.loads[name](row)

    def optim_fwd_store(self, name: str, tensors: NamedTensors, row: Row) -> None:
        """Put both back."""
        self.trained.stores[name](tensors, row)

    def optimize(
        self,
        name: str,
        tensors: NamedTensors,
        gradient: Tensor,
        learning_rate: Tensor,
        norm: Tensor,
        is_finite: Tensor,
        scale: Optional[Tensor],
    ) -> None:
        """Change a parameter's weight and state in place, where the norm is finite."""
        self.trained.optimizer(
            name, tensors.weight, gradient, tensors.state, learning_rate, norm, is_finite, scale
        )

    @property
    def trained(self) -> Update:
        """What only a trained layer has."""
        assert self.update is not None, "forward-only graphs have no update"
        return self.update


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """All that the phases of a step need."""

    config: Config
    layout: Layout
    connections: Connections
    embedding: Graphs
    decoder: Graphs
    head: Graphs
    tied_load: Optional[Load] = None
    """Loads the head's gradient of the tied word embedding; none without gradients."""

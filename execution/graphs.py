"""`Graphs`: one kind of layer's part of the step. Layers of a kind share graphs; row n of a buffer is layer n's."""

from dataclasses import dataclass
from typing import Optional, Tuple

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
    """A buffer for everything that the layer's graphs name, tied weights of another layer included."""
    load: Load
    gather: Gather


@dataclass(frozen=True, eq=False)
class Update:
    """What a trained layer has beside its weights: gradients, optimizer, and their transfers."""

    accumulators: NamedVariableFactories
    """Gradient accumulators (`accum.<name>`) and their counter, for everything that the layer's graphs name."""
    gradients: NamedRemoteBuffers
    """A buffer for each gradient, tied weights included; none where the gradient never leaves the phase."""
    state: NamedRemoteBuffers
    """A buffer for each tensor of the optimizer's state."""
    optimizer: Optimizer
    reduce: Reduce
    gradient_load: Load
    gradient_store: Store
    weight_load: Load
    weight_store: Store
    state_load: Load
    state_store: Store


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
    """Adds the gradients of all micro-batches to accumulators; the head's does its forward pass too."""
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

    def grad_load(self, row: Row) -> NamedTensors:
        """The reduced gradients of the layer's own parameters."""
        return self.trained.gradient_load(row)

    def optim_fwd_load(self, row: Row) -> Tuple[NamedTensors, NamedTensors]:
        """Shards of the layer's own weights, and the optimizer's state."""
        return self.trained.weight_load(row), self.trained.state_load(row)

    def optim_fwd_store(self, weights: NamedTensors, state: NamedTensors, row: Row) -> None:
        """Put both back."""
        self.trained.weight_store(weights, row)
        self.trained.state_store(state, row)

    def optimize(
        self, weights: NamedTensors, gradients: NamedTensors, state: NamedTensors, learning_rate: Tensor, norm: Tensor
    ) -> None:
        """Change weights and state in place."""
        self.trained.optimizer(weights, gradients, state, learning_rate, norm)

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

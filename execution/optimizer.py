"""The optimizer's graphs: one per parameter, AdamW or Muon, with loss scaling and clipping by the
global norm.

An update happens only where the global norm is finite: then every gradient is. Else, and where the
norm is a spike, nothing changes, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import popxl
import popxl_addons as addons
from popxl import Tensor, TensorSpec, ops
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.config.schema import Config, Training
from popxl_gpt.execution.averaging import AverageStep
from popxl_gpt.execution.muon import MuonStep
from popxl_gpt.execution.train_state import TrainState
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table
from popxl_gpt.utils.runtime import data_type, moment_options, update_condition

SCALAR, UPDATE_IF = TensorSpec((), popxl.float32), TensorSpec((), popxl.bool)


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Updates the parameters of one layer: all by AdamW, or matrices by Muon."""

    graphs: dict[str, addons.GraphWithNamedArgs]
    """The graph of each parameter's update."""
    factories: NamedVariableFactories
    """Optimizer state by parameter: moments and step."""
    rate_multipliers: Mapping[str, float]
    """Learning rates of parameters over that of the step."""
    is_clipped: bool
    averages: dict[str, addons.GraphWithNamedArgs]
    """The graph of each parameter's average, where weights are averaged."""
    conditional: frozenset[str]
    """Parameters whose graphs have the condition of an update as an input; with AdamW none in plain
    PopXL."""

    @classmethod
    def of(
        cls,
        table: Table,
        weights: Mapping[str, TensorSpec],
        gradients: NamedTensors,
        layout: Layout,
        config: Config,
    ) -> "Optimizer":
        """Graphs for tensors like these. Weight decay is given by each parameter's role, and so is
        the optimizer.
        """
        graphs, factories, multipliers, conditional = {}, NamedVariableFactories(), {}, set()
        averages = {}
        for name, parameter in table.items():
            tensors = weights[name], gradients[name].spec
            is_matrix = is_by_muon(config.training, parameter)
            if is_matrix:
                state, graph = _muon(*tensors, parameter, layout, config)
            else:
                state, graph = _adamw(*tensors, parameter, layout, config.training)
            if is_matrix or update_condition():
                conditional.add(name)
            graphs[name] = graph
            multipliers[name] = rate_multiplier(config.training, parameter)
            if config.training.average_weights:
                own, averages[name] = AverageStep(config.training.average_weights).create_graph(
                    weights[name], UPDATE_IF, holders=layout.holders(parameter)
                )
                state.update(own)
            factories.insert(name, state, overwrite=True)
        is_clipped = config.training.max_norm > 0
        return cls(graphs, factories, multipliers, is_clipped, averages, frozenset(conditional))

    def __call__(
        self,
        name: str,
        weight: Tensor,
        gradient: Tensor,
        moments: NamedTensors,
        state: TrainState,
    ) -> None:
        """Change a parameter's weight, and the state that it has, in place, unless the step is left
        out.

        Args:
            gradient: of the scaled loss.
        """
        rate, multiplier = state.learning_rate, self.rate_multipliers[name]
        scalars = [rate if multiplier == 1.0 else rate * multiplier]
        if isinstance(state.loss_scale, Tensor):
            scalars.append(state.loss_scale)
        if self.is_clipped:
            scalars.append(state.grad_norm)
        graph = self.graphs[name].bind(moments)
        if name in self.conditional:
            graph.call(weight, gradient, *scalars, state.is_applied)
        else:
            changed = (weight, *moments.values_flat())
            kept = [ops.identity(t) for t in changed]
            graph.call(weight, gradient, *scalars)
            for t, before in zip(changed, kept):
                ops.var_updates.copy_var_update_(t, ops.where(state.is_applied, t, before))
        if name in self.averages:
            self.averages[name].bind(moments).call(weight, state.is_applied)


Made = tuple[NamedVariableFactories, addons.GraphWithNamedArgs]


def is_by_muon(training: Training, parameter: Parameter) -> bool:
    """Whether Muon updates a parameter: matrices of hidden layers, where it is asked for."""
    return training.optimizer == "muon" and parameter.role is Role.WEIGHT


def rate_multiplier(training: Training, parameter: Parameter) -> float:
    """A parameter's learning rate over that of the step."""
    of_role = training.embedding_rate_multiplier if parameter.role is Role.EMBEDDING else 1.0
    return of_role * parameter.rate


def _common(parameter: Parameter, training: Training) -> dict[str, Any]:
    """Arguments of every optimizer, those that are inputs in the order of `Optimizer.__call__`."""
    clip = {"global_norm": SCALAR, "global_norm_max": training.max_norm}
    return {
        "lr": SCALAR,
        "weight_decay": training.weight_decay if parameter.decays else 0.0,
        "loss_scaling": SCALAR if training.is_scaled_by_program else training.fixed_scale,
        **(clip if training.max_norm > 0 else {}),
    }


def _adamw(
    weight: TensorSpec,
    gradient: TensorSpec,
    parameter: Parameter,
    layout: Layout,
    training: Training,
) -> Made:
    return AdamOptimizerStep().create_graph(
        weight,
        gradient,
        replica_grouping=layout.holders(parameter),
        beta1=training.beta1,
        beta2=training.beta2,
        eps=training.epsilon,
        bias_correction=True,
        **_common(parameter, training),
        **moment_options(training.moment_precision),
        **update_condition(),
    )


def _muon(
    weight: TensorSpec, gradient: TensorSpec, parameter: Parameter, layout: Layout, config: Config
) -> Made:
    is_narrow = config.model.precision == "bfloat16"
    step = MuonStep(parameter, layout, data_type("bfloat16" if is_narrow else "float32"))
    return step.create_graph(
        weight,
        gradient,
        momentum=config.training.muon_momentum,
        moment_dtype=data_type(config.training.moment_precision),
        **_common(parameter, config.training),
        update_if=UPDATE_IF,
    )


def grad_norm_sq(
    table: Table, gradients: NamedTensors, layout: Layout, training: Training
) -> Tensor:
    """This replica's part of the squared global norm, float32 scalar; the sum over all replicas is
    the whole.

    A fixed loss scale is divided out, one that the program finds is not. A parameter or shard that
    several replicas hold is counted once: each gives its share.
    """
    total: Tensor = popxl.constant(0.0, popxl.float32, "grad_norm_sq")
    for name, parameter in table.items():
        t = gradients[name]
        part = grad_reduce_square_add(t, training.fixed_scale)
        # no shard is padding alone: `shard_groups` of `layer_weights.py` cuts into no more pieces
        shards = -(-ops.multiply_tuple(t.meta_shape) // t.nelms) if t.meta_shape else 1
        copies = layout.holders(parameter).group_size // shards
        total = total + (part if copies == 1 else part * (1.0 / copies))
    return total

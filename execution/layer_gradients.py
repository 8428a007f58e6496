"""Gradient graphs of layers."""

from collections.abc import Mapping

import popxl
import popxl_addons as addons
from popxl.transforms.autodiff import GradGraphInfo
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.parameters import trained
from popxl_gpt.utils.runtime import accumulator_options


def layer_gradient(
    fwd: addons.GraphWithNamedArgs,
    factories: NamedVariableFactories,
    layer: Layer,
    required: int,
    gradients: Mapping[popxl.Graph, GradGraphInfo] | None = None,
) -> tuple[NamedVariableFactories, addons.GraphWithNamedArgs]:
    """Accumulators and gradient graph for every parameter that the layer names and that is trained,
    and for its first `required` inputs.

    gradients: those of graphs that the layer calls, where they are given.
    """
    names = trained(layer.table, layer.model.lora_rank > 0)
    if not names:
        graph = addons.autodiff(fwd, fwd.graph.outputs[:1], fwd.graph.inputs[:required], gradients)
        return NamedVariableFactories(), graph
    return addons.autodiff_with_accumulation(
        fwd,
        [fwd.args[name] for name in names],
        grads_provided=fwd.graph.outputs[:1],
        grads_required=fwd.graph.inputs[:required],
        called_graphs_grad_info=gradients,
        replica_groupings=factories.replica_groupings,
        **accumulator_options([factories[name].dtype for name in names]),
    )

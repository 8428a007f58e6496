"""Rows of a layer's weights in remote memory, and other variables' that are cut like them."""

import copy
from collections.abc import Collection

import popxl
import popxl_addons as addons
from popxl import TensorSpec, ops
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.remote import NamedRemoteBuffers
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.graphs import LayerGraphs, NarrowWeights, Weights
from popxl_gpt.execution.transfers import Gather, Load, Store, selected, shard_length, shard_spec
from popxl_gpt.modelling.head import TIED
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.linear import amax_name
from popxl_gpt.utils.runtime import data_type, float8_e4m3fn


def layer_weights(
    config: Config,
    layout: Layout,
    factories: NamedVariableFactories,
    rows: int,
    tied_to: LayerGraphs | None,
    updated: Collection[str] = (),
) -> Weights:
    """A layer's weights in remote memory, with the buffer of another layer's word embedding where
    it is tied to that.

    Args:
        updated: weights that training changes, whose rows may be of a wider type than the layer's
            graphs. Loading casts a row, a shard, so that gathering moves no more bytes.
    """
    groups = shard_groups(config, layout, factories)
    types = {name: factory.dtype for name, factory in factories.to_dict().items()}
    own = in_type(factories, updated, data_type(config.weight_precision))
    if tied_to is not None:
        own.pop(TIED)
    buffers = buffers_of(own, rows, groups)
    if tied_to is not None:
        buffers.insert(TIED, tied_to.weights.buffers[TIED], overwrite=True)
    load = Load.in_types(buffers, types)
    return Weights(own, buffers, load, Gather.of(load.results, groups))


def narrow_weights(
    config: Config, layout: Layout, factories: NamedVariableFactories, wide: LayerGraphs
) -> NarrowWeights:
    """The rows of weights in 8 bits, of layers whose others have the rows that they have in `wide`.
    All layers have such rows, as one update serves all: also those that do not multiply 8 bits.

    Args:
        factories: of a layer that multiplies 8 bits.
    """
    trained, groups = wide.weights.buffers, shard_groups(config, layout, factories)
    own = factories.copy()
    for name in trained.to_dict():
        if factories[name].dtype is not float8_e4m3fn:
            own.pop(name)
    buffers = buffers_of(own, wide.rows, groups)
    loads, stores = {}, {}
    for name, buffer in trained.to_dict().items():
        if name not in own:
            buffers.insert(name, buffer, overwrite=True)
            continue
        spec = TensorSpec(buffer.tensor_shape, buffer.tensor_dtype, buffer.meta_shape)
        loads[name] = Load.of(selected(trained, (name,)), wide.rows)
        both = buffers[name], buffers[amax_name(name)]
        stores[name] = Store.narrowing(spec, name, both, layout)
    types = {name: factory.dtype for name, factory in factories.to_dict().items()}
    load = Load.in_types(buffers, types)
    weights = Weights(factories, buffers, load, Gather.of(load.results, groups))
    return NarrowWeights(weights, loads, stores)


def in_type(
    factories: NamedVariableFactories, names: Collection[str], dtype: popxl.dtype
) -> NamedVariableFactories:
    """The same variables, some of them of another type."""
    result = factories.copy()
    for name in names:
        other = copy.copy(factories[name])
        other.dtype = dtype
        result.insert(name, other, overwrite=True)
    return result


def shard_groups(
    config: Config, layout: Layout, factories: NamedVariableFactories
) -> NamedReplicaGrouping:
    """The replicas over which each variable's rows are cut (replicated tensor sharding): those that
    would hold the same.

    The last pieces are padded. A variable with so few elements that one piece would be all padding
    is kept whole.
    """
    groups = {}
    for name, factory in factories.to_dict().items():
        holders = factories.replica_groupings[name]
        group, elements = holders.const_rg, ops.multiply_tuple(factory.shape)
        # where the last piece begins
        last = (group.group_size - 1) * shard_length(elements, group.group_size)
        is_cut = (
            config.execution.replicated_tensor_sharding and last < elements >= holders.group_size
        )
        groups[name] = group if is_cut else layout.alone
    return NamedReplicaGrouping.from_dict(groups)


def buffers_of(
    factories: NamedVariableFactories, rows: int, groups: NamedReplicaGrouping
) -> NamedRemoteBuffers:
    """A buffer for each variable's shards over its group, or for the whole variable where that is
    one replica.
    """
    found = {
        name: addons.create_remote_buffer(
            shard_spec(TensorSpec(factory.shape, factory.dtype), groups[name]), rows
        )
        for name, factory in factories.to_dict().items()
    }
    return NamedRemoteBuffers.from_dict(found)

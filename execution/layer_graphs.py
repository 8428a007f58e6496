"""Building the graphs of layers: traced, differentiated, run over micro-batches, and given their
buffers and transfers.
"""

from collections.abc import Callable
from dataclasses import replace

import popxl
import popxl_addons as addons
from popxl import TensorSpec
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import NamedRemoteBuffers
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.batch_serialisation import (
    KeptRows,
    LayerIO,
    serialise,
    serialise_with_gradient,
)
from popxl_gpt.execution.block_graphs import (
    BlockGraphs,
    activation_spec,
    beside_specs,
    prices_of_layers,
    words_spec,
)
from popxl_gpt.execution.graphs import (
    Gradients,
    InferenceGraphs,
    LayerRun,
    NarrowWeights,
    OptimizerState,
    TrainingGraphs,
    TwoPassGraphs,
    summed,
)
from popxl_gpt.execution.head_steps import LOSS_SCALE, HeadStep, forward_head
from popxl_gpt.execution.layer_gradients import layer_gradient
from popxl_gpt.execution.layer_plan import (
    LayerPlan,
    decoder_plan,
    embedding_plan,
    head_plan,
    logits_plan,
    loss_plan,
    score_plan,
    without_seed,
)
from popxl_gpt.execution.layer_weights import (
    buffers_of,
    in_type,
    layer_weights,
    narrow_weights,
    shard_groups,
)
from popxl_gpt.execution.optimizer import Optimizer
from popxl_gpt.execution.transfers import (
    Load,
    Reduce,
    Store,
    selected,
)
from popxl_gpt.modelling.decoder import DecoderBlock
from popxl_gpt.modelling.embedding import Embedding
from popxl_gpt.modelling.head import (
    TIED,
    Head,
    LogitsHead,
    LossHead,
    MaskedLossHead,
    ScoreHead,
    TokenLossHead,
)
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Table, trained
from popxl_gpt.utils.runtime import data_type, seed_spec


def embedding_graphs(
    config: Config, layout: Layout, io: LayerIO
) -> TwoPassGraphs | InferenceGraphs:
    """The embedding's part of a training step. Its gradient needs nothing that would be worth
    computing again. Beside adapters it is frozen, and only runs forward.
    """
    layer = Embedding(config.model, layout)
    seed, (positions, _) = seed_spec(config.execution.widening), beside_specs(config)
    factories, fwd = layer.create_graph(words_spec(config), seed, positions)
    plan = embedding_plan(config.model)
    table = layout.in_parts(Embedding.parameters(config.model))
    if config.model.lora_rank:
        weights = layer_weights(config, layout, factories, 1, None)
        return InferenceGraphs(table=table, rows=1, weights=weights, fwd=serialise(fwd, plan, io))
    accumulators, grad = layer_gradient(fwd, factories, layer, required=0)
    fwd_all, grad_all = serialise_with_gradient(fwd, grad, plan, io)
    graphs = _training_graphs(config, layout, table, 1, factories, accumulators, grad_all)
    return TwoPassGraphs.of(graphs, fwd_all)


def decoder_graphs(
    config: Config, layout: Layout, io: LayerIO
) -> tuple[TwoPassGraphs, tuple[LayerRun[TwoPassGraphs], ...]]:
    """The decoder blocks' part of a training step, and the layers in order: those that compute more
    of the forward pass again, and the last ones, which keep more. All but the passes is the same
    for all.
    """
    model = config.model
    decoder: TwoPassGraphs | None = None
    narrow: NarrowWeights | None = None
    layers: tuple[LayerRun[TwoPassGraphs], ...] = ()
    blocks = model.blocks
    for own, price in prices_of_layers(config, layout):
        rows, graphs = KeptRows(own), {}
        for of_block in dict.fromkeys(blocks[n] for n in own):
            block = BlockGraphs.of(config, layout, price, of_block)
            plan = decoder_plan(model)
            fwd, grad = serialise_with_gradient(block.fwd, block.grad(price), plan, io, rows)
            if decoder is None:
                table, factories = DecoderBlock.parameters(model), block.factories
                made = _training_graphs(
                    config, layout, table, model.layers, factories, block.accumulators, grad
                )
                decoder = TwoPassGraphs.of(made, fwd)
            graphs[of_block] = replace(decoder, fwd=fwd, grad=grad)
            if of_block.products == "fp8":
                narrow = narrow or narrow_weights(config, layout, block.factories, decoder)
                graphs[of_block] = replace(graphs[of_block], weights=narrow.weights)
        layers += LayerRun.of(blocks, own, graphs, own.start > 0)
    assert decoder is not None, "a model has layers"
    return replace(decoder, narrow=narrow), layers


def head_graphs(
    config: Config,
    layout: Layout,
    io: LayerIO,
    embedding: TrainingGraphs | InferenceGraphs,
) -> TrainingGraphs:
    """The head's part of a training step: forward and backward pass in one graph."""
    is_masked, losses = config.training.masked_labels, config.training.losses
    head = (MaskedLossHead if is_masked else LossHead)(config.model, layout, losses)
    weight = TensorSpec((), popxl.float32) if is_masked else None
    scaling = None if config.training.is_scaled_by_program else config.training.fixed_scale
    pieces = config.execution.head_serialisation
    factories, both = HeadStep().create_graph(
        activation_spec(config), words_spec(config), weight, head, scaling, pieces
    )
    args = both.args.fwd.copy()
    args.update(both.args.grad)
    if scaling is None:
        args.insert(LOSS_SCALE, both.args[LOSS_SCALE])
    plan = head_plan(config.model.layers, is_masked, config.training.losses_apart)
    graph = serialise(addons.GraphWithNamedArgs(both.graph, args), plan, io)
    table = layout.in_parts(Head.parameters(config.model))
    return _training_graphs(
        config,
        layout,
        table,
        1,
        factories.fwd,
        factories.grad,
        graph,
        tied_to=embedding if config.model.tied_head else None,
        pieces=pieces,
    )


HEADS: "dict[type[Head], Callable[[int], LayerPlan]]" = {
    TokenLossHead: loss_plan,
    ScoreHead: score_plan,
    LogitsHead: logits_plan,
}
"""Heads of programs that only run forward, with what each reads and writes."""


def fwd_graphs(
    config: Config, layout: Layout, io: LayerIO, head: type[Head], rows: int | None
) -> tuple[
    InferenceGraphs, InferenceGraphs, InferenceGraphs, tuple[LayerRun[InferenceGraphs], ...]
]:
    """Embedding, decoder and head of a program that only runs forward, without dropout, and the
    decoder's layers in order.

    Args:
        head: one of `HEADS`.
        rows: rows per run of the head that it gives something for; None: those of all tokens.
    """
    model = config.model
    labels = words_spec(config) if rows is None else TensorSpec((rows,), popxl.int32)
    x, (positions, words) = activation_spec(config), beside_specs(config)
    pieces = config.execution.head_serialisation if rows is None else 1

    embedding = Embedding(model, layout)
    factories, fwd = embedding.create_graph(words_spec(config), None, positions)
    first = InferenceGraphs(
        table=layout.in_parts(Embedding.parameters(model)),
        rows=1,
        weights=layer_weights(config, layout, factories, 1, None),
        fwd=serialise(fwd, without_seed(embedding_plan(model)), io),
    )
    by_kind: dict[str, InferenceGraphs] = {}
    for kind in dict.fromkeys(model.kinds):
        block = DecoderBlock(model.of_kind(kind), layout)
        factories, fwd = block.create_graph(x, None, positions, words)
        weights = next((graphs.weights for graphs in by_kind.values()), None)
        by_kind[kind] = InferenceGraphs(
            table=DecoderBlock.parameters(model),
            rows=model.layers,
            weights=weights or layer_weights(config, layout, factories, model.layers, None),
            fwd=serialise(fwd, without_seed(decoder_plan(model)), io),
        )
    factories, fwd = forward_head(head(model, layout), x, labels, pieces)
    tied_to = first if TIED in factories else None
    last = InferenceGraphs(
        table=layout.in_parts(Head.parameters(model)),
        rows=1,
        weights=layer_weights(config, layout, factories, 1, tied_to),
        fwd=serialise(fwd, HEADS[head](model.layers), io),
    )
    layers = LayerRun.of(model.kinds, range(model.layers), by_kind)
    return first, by_kind[model.kinds[0]], last, layers


def _training_graphs(
    config: Config,
    layout: Layout,
    table: Table,
    rows: int,
    factories: NamedVariableFactories,
    accumulators: NamedVariableFactories,
    grad: addons.GraphWithNamedArgs,
    tied_to: None | TrainingGraphs | InferenceGraphs = None,
    pieces: int = 1,
) -> TrainingGraphs:
    """The graphs of a layer's backward pass and update.

    Args:
        pieces: gradients that its accumulators get in each run.
    """
    changed = trained(table, config.model.lora_rank > 0)
    weights = layer_weights(config, layout, factories, rows, tied_to, changed)
    sums = summed(accumulators)
    groups = shard_groups(config, layout, sums)
    own_sums = sums.copy()
    # a tied gradient waits where the embedding's is added to it, unless both wait for other groups
    shared = tied_to.gradients.buffers if isinstance(tied_to, TrainingGraphs) else None
    if shared is not None and config.groups == 1:
        own_sums.pop(TIED)
    training = config.training
    precision = training.gradient_precision
    own_sums = in_type(own_sums, tuple(own_sums.to_dict()), data_type(precision))
    buffers = buffers_of(own_sums, rows, groups)
    if shared is not None and config.groups == 1:
        buffers.insert(TIED, shared[TIED], overwrite=True)
    waiting = tuple(buffers.to_dict())
    wide = dict.fromkeys(waiting, popxl.float32)
    loads = {name: Load.in_types(selected(buffers, (name,)), wide) for name in waiting}
    own = NamedTensors.pack(list(changed), [loads[name].results[name] for name in changed])
    specs = {
        name: TensorSpec(b.tensor_shape, b.tensor_dtype, b.meta_shape)
        for name, b in weights.buffers.to_dict().items()
    }
    optimizer = Optimizer.of(changed, specs, own, layout, config)
    state = addons.named_variable_buffers(optimizer.factories, rows, False)
    updated = {
        name: NamedRemoteBuffers(weight=weights.buffers[name], state=state[name])
        for name in changed
    }
    return TrainingGraphs(
        table=table,
        rows=rows,
        weights=weights,
        config=config,
        layout=layout,
        grad=grad,
        gradients=Gradients(
            accumulators,
            own_sums,
            buffers,
            Reduce.of(summed(grad.args), groups, layout.dp, data_type(training.reduce_precision)),
            Store.of(buffers, rows) if precision == "float32" else Store.rounding(buffers),
            loads,
            config.runs_per_phase * pieces,
        ),
        optimizer_state=OptimizerState(
            optimizer,
            state,
            {name: Load.of(both, rows) for name, both in updated.items()},
            {name: Store.of(both, rows) for name, both in updated.items()},
        ),
    )

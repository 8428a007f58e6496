"""The graphs of a decoder block over one micro-batch, and the levels of what its gradient computes
again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import popdist
import popxl
import popxl_addons as addons
from popxl import Tensor, TensorSpec
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.config.schema import Config, Execution, Model
from popxl_gpt.execution.layer_gradients import layer_gradient
from popxl_gpt.execution.layer_plan import POSITIONS, WORDS, beside
from popxl_gpt.execution.recomputation import (
    ALL_AGAIN,
    CHEAP,
    NONE_AGAIN,
    Level,
    Stretch,
    bought,
)
from popxl_gpt.modelling.attention import recomputing_gradients
from popxl_gpt.modelling.decoder import DecoderBlock
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.utils.runtime import Recomputation, data_type, recomputed, seed_spec

WEIGHT = ".weight"
"""The end of the name of a layer's matrix, or of its factors."""


def activation_spec(config: Config) -> TensorSpec:
    """What travels between layers: [widening * micro_batch * sequence, hidden / tp2]."""
    model = config.model
    width = model.hidden_size // config.execution.tensor_parallel_2
    return TensorSpec((_tokens(config), width), data_type(model.precision))


def activation_specs(config: Config) -> dict[str, TensorSpec]:
    """What travels forward, by the names of buffers: activations, and what is beside them."""
    others = dict.fromkeys(beside(config.model), words_spec(config))
    return {"x": activation_spec(config), **others}


def words_spec(config: Config) -> TensorSpec:
    """Token ids of one run of a layer: [widening * micro_batch * sequence]."""
    return TensorSpec((_tokens(config),), popxl.int32)


def beside_specs(config: Config) -> "tuple[TensorSpec | None, ...]":
    """The specs of tokens' positions, and of tokens, where decoder blocks get them."""
    names = beside(config.model)
    return tuple(words_spec(config) if name in names else None for name in (POSITIONS, WORDS))


def _tokens(config: Config) -> int:
    return (
        config.execution.widening * config.execution.micro_batch_size * config.model.sequence_length
    )


@dataclass(frozen=True, eq=False)
class BlockGraphs:
    """A decoder block's graphs over one micro-batch."""

    factories: NamedVariableFactories
    fwd: addons.GraphWithNamedArgs
    accumulators: NamedVariableFactories
    own_grad: addons.GraphWithNamedArgs
    """The gradient that is given all that it takes of the forward pass."""

    @classmethod
    def of(cls, config: Config, layout: Layout, price: float, model: Model) -> "BlockGraphs":
        """The graphs of layers of a model, for a price. Call it in the main graph."""
        layer = DecoderBlock(model, layout)
        seed = seed_spec(config.execution.widening)
        factories, fwd = layer.create_graph(activation_spec(config), seed, *beside_specs(config))
        # What runs attention again makes the probabilities of whole attention anyway.
        runs_again = price != NONE_AGAIN and config.model.attention_serialisation == 1
        again = {} if runs_again else recomputing_gradients(fwd.graph)
        accumulators, grad = layer_gradient(fwd, factories, layer, required=1, gradients=again)
        return cls(factories, fwd, accumulators, grad)

    @classmethod
    def by_model(cls, config: Config, layout: Layout, price: float) -> "dict[Model, BlockGraphs]":
        """The graphs of each of the models that layers have."""
        models = dict.fromkeys(config.model.blocks)
        return {model: cls.of(config, layout, price, model) for model in models}

    def grad(self, price: float) -> addons.GraphWithNamedArgs:
        """The gradient that takes what is kept at a price, and computes the rest again."""
        if price == NONE_AGAIN:
            return self.own_grad
        return recomputed(self.own_grad, self.kept(price))

    @cached_property
    def recomputation(self) -> Recomputation:
        """What the gradient takes of the forward pass, and what making it again costs."""
        return Recomputation(self.own_grad)

    @cached_property
    def prices(self) -> "dict[Tensor, float]":
        """The prices of what can be kept."""
        return self.recomputation.prices(self.recomputation.values)

    def kept(self, price: float) -> list[Tensor]:
        """What is kept of the forward pass at a price."""
        if price == NONE_AGAIN:
            inputs = set(self.fwd.graph.inputs)
            return [t for t in self.recomputation.taken if t not in inputs]
        return [t for t, own in self.prices.items() if own > price] if price < ALL_AGAIN else []

    def flops(self, price: float) -> int:
        """Operations of the gradient at a price."""
        own: int = addons.evaluate_FLOPs(self.own_grad.graph)["TOT"]  # type: ignore[assignment]
        return own + self.recomputation.flops(self.kept(price))

    def again(self, price: float) -> list[str]:
        """Linear layers whose products are made again at a price."""
        read = {t for op in self.recomputation.ops(self.kept(price)) for t in op.inputs}
        weights = {n: t for n, t in self.fwd.args.to_dict().items() if n.endswith(WEIGHT)}
        return [
            n.removesuffix(WEIGHT) for n, t in weights.items() if t in read and len(t.shape) == 2
        ]


@cache
def levels(config: Config) -> tuple[Level, ...]:
    """`levels_here` of a configuration. Not for graphs to call."""
    ir = replicated_ir(config.execution)
    with ir.main_graph:
        return levels_here(config, Layout.of(ir, config.execution))


def levels_here(config: Config, layout: Layout) -> tuple[Level, ...]:
    """What each decoder block may keep of its forward pass, from nothing on. Call it in the main
    graph.
    """
    some, every = (BlockGraphs.by_model(config, layout, price) for price in (ALL_AGAIN, NONE_AGAIN))
    prices = {price for block in some.values() for price in block.prices.values()}
    dear = sorted((price for price in prices if price > CHEAP), reverse=True)
    return (
        *(_level(config, some, price) for price in (ALL_AGAIN, *dear[1:], CHEAP)),
        _level(config, every, NONE_AGAIN),
    )


def _level(config: Config, blocks: "Mapping[Model, BlockGraphs]", price: float) -> Level:
    """What blocks keep at a price: those of each model in the same buffers, which have a place for
    all that any of them keeps.
    """
    layers, places = config.model.layers, Counter[TensorSpec]()
    for block in blocks.values():
        places |= Counter(t.spec for t in block.kept(price))
    shares = Counter(config.model.blocks)
    return Level(
        price=price,
        kept_bytes=config.runs_per_phase * sum(n * spec.nbytes for spec, n in places.items()),
        flops=sum(n * blocks[model].flops(price) for model, n in shares.items()) / layers,
        again=tuple(dict.fromkeys(n for block in blocks.values() for n in block.again(price))),
    )


def stretches(config: Config) -> tuple[Stretch, ...]:
    """What the decoder blocks keep, in order: one level for all, or two. Not for graphs to call."""
    budget = config.execution.activation_memory
    without = replace(config, execution=replace(config.execution, activation_memory=None))
    if budget is not None:
        return bought(levels(without), config.model.layers, budget)
    level = levels(without)[0 if config.execution.recomputation else -1]
    return (Stretch(range(config.model.layers), level),)


def prices_of_layers(config: Config, layout: Layout) -> "list[tuple[range, float]]":
    """The price at which layers keep something, by stretches. Call it in the main graph."""
    execution, layers = config.execution, config.model.layers
    if execution.activation_memory is None:
        return [(range(layers), ALL_AGAIN if execution.recomputation else NONE_AGAIN)]
    found = bought(levels_here(config, layout), layers, execution.activation_memory)
    return [(each.layers, each.level.price) for each in found]


def kept_bytes(config: Config) -> int:
    """Bytes that each decoder block of a configuration keeps where all keep all. Not for graphs to
    call.
    """
    return levels(config)[-1].kept_bytes


def replicated_ir(execution: Execution) -> popxl.Ir:
    """An empty program for so many replicas, wherever the launcher put them."""
    replicas = execution.replication_factor
    return popxl.Ir(replication="popdist" if popdist.isPopdistEnvSet() else replicas)

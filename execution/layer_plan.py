"""What each layer reads, writes and keeps while it runs over the micro-batches.

Activations between layers travel in `x`, a buffer with one row per layer boundary, filled from row
0 upwards. Their gradients travel in `dx`, which has one row: the gradient that a layer makes takes
the place of the one that it got. Rows of a plan count from the layer's own number n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from popxl_gpt.config.schema import Model


@dataclass(frozen=True)
class FromStream:
    """An input that comes from the host, one value per run of the layer."""

    name: str


@dataclass(frozen=True)
class FromBuffer:
    """An input that was stored by another layer: row n + `row` of a buffer."""

    name: str
    row: int | None
    """None: the only row."""


@dataclass(frozen=True)
class Seed:
    """An input that is a random seed, another one for each micro-batch; of several that run as one,
    all of theirs.
    """


@dataclass(frozen=True)
class ToStream:
    """An output that goes to the host."""

    name: str


@dataclass(frozen=True)
class ToBuffer:
    """An output that another layer reads: row n + `row` of a buffer."""

    name: str
    row: int | None
    """None: the only row."""


POSITIONS = "positions"
"""Stream and buffer of tokens' positions in their documents."""
WORDS = "words"
"""Stream and buffer of tokens."""
FROM_DX, TO_DX = FromBuffer("dx", None), ToBuffer("dx", None)
"""The gradient of what travels between layers."""
Item = TypeVar("Item")
Source = FromStream | FromBuffer | Seed
Target = ToStream | ToBuffer


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The sources and targets of the tensors of one kind of layer, in the order of the graphs'
    inputs and outputs.
    """

    layers: int = 1
    """Layers that share the graphs; n runs from 0 to layers - 1."""
    inputs: tuple[Source, ...]
    outputs: tuple[Target, ...]
    gradient_inputs: tuple[FromBuffer, ...] = ()
    """Gradients of the outputs."""
    gradient_outputs: tuple[ToBuffer, ...] = ()
    """Gradients of the inputs, as far as another layer needs them."""


def beside(model: Model) -> tuple[str, ...]:
    """What decoder blocks get of tokens beside activations, int32, in the order of their arguments:
    positions with document attention, the tokens themselves with value embeddings.
    """
    return (*_if(model.document_attention, POSITIONS), *_if(model.value_embeddings, WORDS))


def embedding_plan(model: Model) -> LayerPlan:
    """Words to row 0 of x, and beside it what blocks get; back from dx."""
    positions = _if(model.document_attention, FromStream(POSITIONS))
    return LayerPlan(
        inputs=(FromStream(WORDS), Seed(), *positions),
        outputs=(ToBuffer("x", 0), *(ToBuffer(name, 0) for name in beside(model))),
        gradient_inputs=(FROM_DX,),
    )


def decoder_plan(model: Model) -> LayerPlan:
    """Row n of x to row n + 1, and what is beside it; dx to dx."""
    return LayerPlan(
        layers=model.layers,
        inputs=(FromBuffer("x", 0), Seed(), *(FromBuffer(name, 0) for name in beside(model))),
        outputs=(ToBuffer("x", 1), *(ToBuffer(name, 1) for name in beside(model))),
        gradient_inputs=(FROM_DX,),
        gradient_outputs=(TO_DX,),
    )


def head_plan(layers: int, is_masked: bool, losses: Sequence[str]) -> LayerPlan:
    """The last row of x and the labels to the loss; its gradient to dx. With masked labels
    there is the weight of those that count, and `losses` are those that are told apart.
    """
    weight = _if(is_masked, FromStream("label_weight"))
    return LayerPlan(
        inputs=(FromBuffer("x", layers), FromStream("labels"), *weight),
        outputs=(ToStream("loss"), *map(ToStream, losses), TO_DX),
    )


def loss_plan(layers: int) -> LayerPlan:
    """The last row of x and the labels to the loss, for a program without gradients."""
    return LayerPlan(
        inputs=(FromBuffer("x", layers), FromStream("labels")), outputs=(ToStream("loss"),)
    )


def score_plan(layers: int) -> LayerPlan:
    """The last row of x and the labels to the loss, and to whether they are the likeliest."""
    return LayerPlan(
        inputs=(FromBuffer("x", layers), FromStream("labels")),
        outputs=(ToStream("loss"), ToStream("is_likeliest")),
    )


def logits_plan(layers: int) -> LayerPlan:
    """The last row of x and the numbers of the wanted rows to their logits."""
    return LayerPlan(
        inputs=(FromBuffer("x", layers), FromStream("rows")), outputs=(ToStream("logits"),)
    )


def _if(is_so: bool, item: Item) -> tuple[Item, ...]:
    return (item,) if is_so else ()


def without_seed(plan: LayerPlan) -> LayerPlan:
    """The same layer in a program that drops no units."""
    return LayerPlan(
        layers=plan.layers,
        inputs=tuple(source for source in plan.inputs if not isinstance(source, Seed)),
        outputs=plan.outputs,
    )

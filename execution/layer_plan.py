"""What each layer reads, writes and keeps while it runs over the micro-batches.

Activations between layers travel in two buffers with one row per layer boundary: `x`, filled from
row 0 upwards, and `dx`, filled from the last row downwards. Rows of a plan count from the layer's
own number n.
"""

from dataclasses import dataclass
from typing import Tuple, TypeVar, Union


@dataclass(frozen=True)
class FromStream:
    """An input that comes from the host, one value per run of the layer."""

    name: str


@dataclass(frozen=True)
class FromBuffer:
    """An input that was stored by another layer: row n + `row` of a buffer."""

    name: str
    row: int


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
    row: int


POSITIONS = "positions"
"""Stream and buffer of tokens' positions in their documents."""
Slot = TypeVar("Slot")
Source = Union[FromStream, FromBuffer, Seed]
Target = Union[ToStream, ToBuffer]


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Where the tensors of one kind of layer come from and go to, in the order of the graphs'
    inputs and outputs.
    """

    layers: int = 1
    """Layers that share the graphs; n runs from 0 to layers - 1."""
    inputs: Tuple[Source, ...]
    outputs: Tuple[Target, ...]
    gradient_inputs: Tuple[FromBuffer, ...] = ()
    """Gradients of the outputs."""
    gradient_outputs: Tuple[ToBuffer, ...] = ()
    """Gradients of the inputs, as far as another layer needs them."""


def embedding_plan(has_positions: bool) -> LayerPlan:
    """Words to row 0 of x; back from row 0 of dx. With document attention their positions in
    documents travel beside x.
    """
    return LayerPlan(
        inputs=(FromStream("words"), Seed(), *_if(has_positions, FromStream(POSITIONS))),
        outputs=(ToBuffer("x", 0), *_if(has_positions, ToBuffer(POSITIONS, 0))),
        gradient_inputs=(FromBuffer("dx", 0),),
    )


def decoder_plan(layers: int, has_positions: bool) -> LayerPlan:
    """Row n of x to row n + 1; row n + 1 of dx to row n. Positions as of `embedding_plan`."""
    return LayerPlan(
        layers=layers,
        inputs=(FromBuffer("x", 0), Seed(), *_if(has_positions, FromBuffer(POSITIONS, 0))),
        outputs=(ToBuffer("x", 1), *_if(has_positions, ToBuffer(POSITIONS, 1))),
        gradient_inputs=(FromBuffer("dx", 1),),
        gradient_outputs=(ToBuffer("dx", 0),),
    )


def head_plan(layers: int, is_masked: bool) -> LayerPlan:
    """The last row of x and the labels to the loss; its gradient to the last row of dx. With masked
    labels there is the weight of those that count.
    """
    weight = _if(is_masked, FromStream("label_weight"))
    return LayerPlan(
        inputs=(FromBuffer("x", layers), FromStream("labels"), *weight),
        outputs=(ToStream("loss"), ToBuffer("dx", layers)),
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


def _if(is_so: bool, slot: Slot) -> Tuple[Slot, ...]:
    return (slot,) if is_so else ()


def without_seed(plan: LayerPlan) -> LayerPlan:
    """The same layer in a program that drops no units."""
    return LayerPlan(
        layers=plan.layers,
        inputs=tuple(source for source in plan.inputs if not isinstance(source, Seed)),
        outputs=plan.outputs,
    )

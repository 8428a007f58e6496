"""The head over the rows of a run, in pieces, so that few logits exist at a time."""

# No `from __future__ import annotations`: annotations of graph functions are read at run time.

from collections.abc import Iterable, Sequence

import numpy as np
import popxl
import popxl_addons as addons
from popxl import Tensor, TensorSpec, ops
from popxl_addons.variable_factory import NamedVariableFactories

from popxl_gpt.execution.layer_gradients import layer_gradient
from popxl_gpt.modelling.head import Head, LossHead

LOSS_SCALE = "loss_scale"
"""The head's input by name that is the loss scale, where the program finds it."""


class HeadStep(addons.Module):
    """Loss and gradients of one run of the head. Variables `fwd.*` are the head's, `grad.*` its
    accumulators.

    Without a fixed loss scale, `loss_scale` is a further input by name.

    The rows come in pieces, and each piece's gradient right after its loss, so that the logits of
    one piece exist at a time and nothing is computed twice. Pieces of the vocabulary would need
    their logits again, once the sum over all of it is known: a product more for the three that
    there are. Source: Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, for a chunked loss.
    """

    def build(
        self,
        x: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        head: LossHead,
        loss_scaling: float | None,
        pieces: int,
    ) -> tuple[Tensor, ...]:
        """[N, H/tp2], int32 [N] -> what the head gives, float32 scalars, the loss first, and the
        gradient of the scaled loss by x, [N, H/tp2].

        Args:
            weight: of `MaskedLossHead`.
            pieces: into which the rows are cut. To the accumulators each is a run of the head.
        """
        # a run of fewer rows has the weight of a whole one
        shared = () if weight is None else (weight if pieces == 1 else weight * pieces,)
        inputs = [(*rows, *shared) for rows in _rows_in_pieces((x, labels), pieces)]
        factories, fwd = head.create_graph(*inputs[0])
        told = len(fwd.graph.outputs)  # the gradient adds what it needs
        accumulators, grad = layer_gradient(fwd, factories, head, required=1)
        weights = self.add_variable_inputs("fwd", factories)
        sums = self.add_variable_inputs("grad", accumulators)
        if loss_scaling is None:
            scale = self.add_variable_input(LOSS_SCALE, lambda: np.ones(()), popxl.float32)
        else:
            scale = popxl.constant(loss_scaling, popxl.float32, "loss_scaling")
        losses: list[tuple[Tensor, ...]] = []
        gradients: list[Tensor] = []
        with popxl.in_sequence():  # one piece after the other
            for piece in inputs:
                site = fwd.bind(weights).call_with_info(*piece)
                losses.append(site.outputs[:told])
                at_site = grad.grad_graph_info.inputs_dict(site)
                gradients += grad.bind(sums).call(scale, args=at_site)
        if pieces == 1:
            return (*losses[0], gradients[0])
        # each is of a mean over a piece's rows, and what is asked for of that over all rows
        means = [ops.sum(_stacked(of_pieces)) * (1 / pieces) for of_pieces in zip(*losses)]
        return (*means, ops.concat(gradients) * (1 / pieces))


def forward_head(
    head: Head, x: TensorSpec, labels: TensorSpec, pieces: int
) -> tuple[NamedVariableFactories, addons.GraphWithNamedArgs]:
    """A head's variables and graph for a program that only runs forward, over the rows in
    pieces.
    """
    if pieces == 1:
        return head.create_graph(x, labels)
    factories, graph = ForwardHead().create_graph(x, labels, head, pieces)
    return factories.fwd, addons.GraphWithNamedArgs(graph.graph, graph.args.fwd)


class ForwardHead(addons.Module):
    """A head of a program that only runs forward, over its rows in pieces. Variables `fwd.*` are
    the head's.
    """

    def build(self, x: Tensor, labels: Tensor, head: Head, pieces: int) -> tuple[Tensor, ...]:
        """[N, H/tp2], int32 [N] -> what the head gives for each row."""
        inputs = list(_rows_in_pieces((x, labels), pieces))
        factories, fwd = head.create_graph(*inputs[0])
        weights = self.add_variable_inputs("fwd", factories)
        with popxl.in_sequence():
            results = [fwd.bind(weights).call(*piece) for piece in inputs]
        return tuple(ops.concat(list(parts)) for parts in zip(*results))


def _rows_in_pieces(tensors: tuple[Tensor, ...], pieces: int) -> Iterable[tuple[Tensor, ...]]:
    """Equal parts of the rows of several tensors."""
    return [tensors] if pieces == 1 else zip(*(ops.split(t, pieces) for t in tensors))


def _stacked(scalars: Sequence[Tensor]) -> Tensor:
    return ops.concat([t.reshape((1,)) for t in scalars])

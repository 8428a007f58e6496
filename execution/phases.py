"""The phases of a training step: graphs that the main graph calls in order, each over all
micro-batches of the global batch.

A phase loads its layer's weights, gathers them from their shards, uses them and drops them. `n` is
the number of the layer, int32 scalar: phases of the decoder are repeated, and count it up or down.
`state` in a phase's parameters are the tensors of a `TrainState`.
"""

# No `from __future__ import annotations`: annotations of graph functions are read at run time.

import popxl
from popxl import Tensor, ops
from popxl_addons.named_tensors import NamedTensors

from popxl_gpt.execution.graphs import (
    InferenceGraphs,
    TrainingGraphs,
    TrainingStep,
    TwoPassGraphs,
)
from popxl_gpt.execution.head_steps import LOSS_SCALE
from popxl_gpt.execution.spikes import is_at_most
from popxl_gpt.execution.train_state import LossScale, Rounding, TrainState
from popxl_gpt.execution.transfers import first_row
from popxl_gpt.modelling.head import TIED
from popxl_gpt.modelling.parameters import whole_name
from popxl_gpt.utils.runtime import begin_lap, jump_seed, round_from

Group = Tensor | None
"""How many groups of micro-batches went through all layers before in a step, int32 scalar; None in
the first one.
"""


def embedding_fwd_phase(step: TrainingStep, seed: Tensor, group: Group) -> Tensor:
    """Words to row 0 of `x`. Returns the seed for the next phase."""
    return _run_forward(step, step.embedding, first_row(), seed, group)


def decoder_fwd_phase(
    step: TrainingStep, n: Tensor, seed: Tensor, graphs: TwoPassGraphs, group: Group
) -> tuple[Tensor, Tensor]:
    """Layer n forward: row n of `x` to row n + 1. Returns n + 1 and the next seed."""
    return n + 1, _run_forward(step, graphs, n, seed, group)


def decoder_fwd_keeping_phase(
    step: TrainingStep, n: Tensor, seed: Tensor, graphs: TwoPassGraphs, group: Group
) -> tuple[Tensor, Tensor]:
    """`decoder_fwd_phase` of a layer that keeps more activations than others."""
    return decoder_fwd_phase(step, n, seed, graphs, group)


def head_phase(
    step: TrainingStep, loss_scale: LossScale, rounding: Rounding, group: Group
) -> Tensor:
    """Head forward and backward: the last row of `x` to the loss and to `dx`.

    The gradient of a tied word embedding waits in its own buffer. Returns this replica's part of
    the squared norm.
    """
    gradients = _run_gradient(step.head, first_row(), group, loss_scale)
    grad_norm_sq = step.head.grad_norm_sq(gradients)
    step.head.grad_store(gradients, first_row(), rounding)
    return grad_norm_sq


def decoder_bwd_phase(
    step: TrainingStep,
    n: Tensor,
    grad_norm_sq: Tensor,
    graphs: TwoPassGraphs,
    rounding: Rounding,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Layer n backward, from `dx` to `dx`. Returns n - 1 and the squared norm so far."""
    return n - 1, _run_backward(graphs, n, grad_norm_sq, rounding, group)


def decoder_bwd_keeping_phase(
    step: TrainingStep,
    n: Tensor,
    grad_norm_sq: Tensor,
    graphs: TwoPassGraphs,
    rounding: Rounding,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """`decoder_bwd_phase` of a layer that has kept more activations than others."""
    return decoder_bwd_phase(step, n, grad_norm_sq, graphs, rounding, group)


def embedding_group_bwd_phase(step: TrainingStep, rounding: Rounding, group: Group) -> None:
    """Embedding backward of one group of micro-batches: the gradient waits for the last group."""
    row, embedding = first_row(), step.embedding
    assert isinstance(embedding, TwoPassGraphs), "a frozen embedding has no such phase"
    embedding.grad_store(_run_gradient(embedding, row, group), row, rounding)


def embedding_bwd_phase(
    step: TrainingStep,
    grad_norm_sq: Tensor,
    learning_rate: Tensor,
    loss_scale: LossScale,
    rounding: Rounding,
    gradient_rounding: Rounding,
    norm_limit: Tensor | None,
    has_labels: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Embedding backward, or the gradient that groups of micro-batches have left; a tied gradient
    added, global norm, and the embedding's update.

    The update takes the gradient that is at hand, as the norm does; what is stored of it is for the
    host to read.

    Args:
        rounding: of the update; `gradient_rounding`, of gradients that are stored.
    Returns:
        The global L2 norm of all gradients, without the loss scaling, and whether the step's
        updates happen: it is finite, not above its limit, and of labels that count.
    """
    row, embedding = first_row(), step.embedding
    assert isinstance(embedding, TwoPassGraphs), "a frozen embedding has no such phase"
    if step.config.groups == 1:
        gradients = _run_gradient(embedding, row, None)
    else:
        found = {name: embedding.grad_load(name, row) for name in embedding.trained}
        gradients = NamedTensors.from_dict(found)
    if step.config.model.tied_head:
        gradients = with_tied_gradient(step.head, gradients, row)
    embedding.grad_store(gradients, row, gradient_rounding)
    grad_norm_sq = grad_norm_sq + embedding.grad_norm_sq(gradients)
    norm, is_applied = global_norm_phase(step, grad_norm_sq, loss_scale, norm_limit, has_labels)
    state = TrainState(learning_rate, norm, is_applied, loss_scale, rounding)
    # those of parts wait in their buffers, so that one is there at a time
    _update(embedding, row, state, gradients if step.layout.parts == 1 else None)
    return norm, is_applied


def global_norm_phase(
    step: TrainingStep,
    grad_norm_sq: Tensor,
    loss_scale: LossScale,
    norm_limit: Tensor | None,
    has_labels: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The global norm from replicas' parts: a phase by itself where the embedding is frozen.
    Returns what `embedding_bwd_phase` does.
    """
    if step.layout.everyone.group_size > 1:
        grad_norm_sq = ops.collectives.replicated_all_reduce(
            grad_norm_sq, group=step.layout.everyone
        )
    norm = ops.sqrt(grad_norm_sq)
    if isinstance(loss_scale, Tensor):  # a constant is divided out of each gradient's part
        norm = norm / loss_scale
    is_applied = ops.isfinite(norm)
    if norm_limit is not None:
        is_applied = ops.logical_and(is_applied, is_at_most(norm, norm_limit))
    if has_labels is not None:
        is_applied = ops.logical_and(is_applied, has_labels)
    return norm, is_applied


def with_tied_gradient(head: TrainingGraphs, gradients: NamedTensors, row: Tensor) -> NamedTensors:
    """Gradients with the word embedding's added to the head's, which waited in its buffer."""
    result = gradients.copy()
    for name, gradient in gradients.to_dict().items():
        if whole_name(name) == TIED:
            total = head.grad_load(name, row)
            ops.add_(total, gradient)
            result.insert(name, total, overwrite=True)
    return result


def head_optim_phase(step: TrainingStep, state: list[Tensor]) -> None:
    """The update of the head's own parameters; a tied word embedding's is done."""
    _update(step.head, first_row(), TrainState.unpack(step.config.training, state))


def decoder_optim_phase(step: TrainingStep, n: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
    """Layer n's update. Returns n + 1 and the next seed for rounding, if there is one."""
    own = TrainState.unpack(step.config.training, state)
    _update(step.decoder, n, own)
    return (n + 1, own.rounding + 1) if isinstance(own.rounding, Tensor) else (n + 1,)


def decoder_narrow_phase(step: TrainingStep, n: Tensor) -> Tensor:
    """Layer n's weights in 8 bits, as they are trained. Returns n + 1."""
    assert step.decoder.narrow is not None, "else there is no such phase"
    step.decoder.narrow.renew(n)
    return n + 1


def decoder_optim_fwd_phase(
    step: TrainingStep, n: Tensor, seed: Tensor, state: list[Tensor], graphs: TwoPassGraphs
) -> tuple[Tensor, ...]:
    """Layer n's update by the gradients of the step before, and layer n forward. Returns n + 1 and
    the next seeds.
    """
    n_next, *rounding = decoder_optim_phase(step, n, state)
    return (n_next, _run_forward(step, graphs, n, seed, None), *rounding)


def decoder_optim_fwd_keeping_phase(
    step: TrainingStep, n: Tensor, seed: Tensor, state: list[Tensor], graphs: TwoPassGraphs
) -> tuple[Tensor, ...]:
    """`decoder_optim_fwd_phase` of a layer that keeps more activations than others."""
    return decoder_optim_fwd_phase(step, n, seed, state, graphs)


def _run_forward(
    step: TrainingStep,
    graphs: TwoPassGraphs | InferenceGraphs,
    row: Tensor,
    seed: Tensor,
    group: Group,
) -> Tensor:
    """Run a layer forward. Returns the next seed."""
    begin_lap("forward")
    weights = graphs.fwd_all_gather(graphs.fwd_load(row))
    layer_seed, next_seed = ops.split_random_seed(seed)
    if group is not None and step.config.model.dropout > 0:
        # each micro-batch draws as it does without groups
        before = step.config.runs_per_phase * step.config.execution.widening
        layer_seed = jump_seed(layer_seed, group * before)
    graphs.fwd.bind(weights).call(row, layer_seed)
    return next_seed


def _run_gradient(
    graphs: TrainingGraphs, row: Tensor, group: Group, loss_scale: LossScale | None = None
) -> NamedTensors:
    """Run a layer backward. Returns the gradients' means over micro-batches and replicas, as
    shards.

    Args:
        loss_scale: for the head, where the backward pass begins.
    """
    begin_lap("backward")
    inputs = graphs.fwd_all_gather(graphs.fwd_load(row))
    sums = graphs.grad_begin(row, group)
    inputs.update(sums)
    if isinstance(loss_scale, Tensor):
        inputs.insert(LOSS_SCALE, loss_scale)
    graphs.grad.bind(inputs).call(row)
    return graphs.grad_end(sums, row, group)


def _run_backward(
    graphs: TrainingGraphs, row: Tensor, grad_norm_sq: Tensor, rounding: Rounding, group: Group
) -> Tensor:
    """Run a layer backward, and store its gradients. Returns the squared norm so far."""
    gradients = _run_gradient(graphs, row, group)
    grad_norm_sq = grad_norm_sq + graphs.grad_norm_sq(gradients)
    graphs.grad_store(gradients, row, rounding)
    return grad_norm_sq


def _update(
    graphs: TrainingGraphs,
    row: Tensor,
    state: TrainState,
    gradients: NamedTensors | None = None,
) -> None:
    """Update a layer, one parameter after the other, by gradients that are at hand or wait in their
    buffers.

    Where the step is left out it stays as it was. Rows come and go all the same: their course is
    known beforehand. A program without updates leaves rows alone.
    """
    if not graphs.config.training.updates:
        return
    begin_lap("update")
    if isinstance(state.rounding, Tensor):
        round_from(popxl.gcg(), state.rounding)
    for name in graphs.trained:
        gradient = graphs.grad_load(name, row) if gradients is None else gradients[name]
        tensors = graphs.optim_fwd_load(name, row)
        graphs.optimize(name, tensors, gradient, state)
        graphs.optim_fwd_store(name, tensors, row)

"""The phases of a step: graphs that the main graph calls in order, each over all micro-batches of
the global batch.

A phase loads its layer's weights, gathers them from their shards, uses them and drops them. `n` is
the number of the layer, int32 scalar: phases of the decoder are repeated, and count it up or down.
"""

# No `from __future__ import annotations`: annotations of graph functions are read at run time.

from typing import Optional, Tuple

import popxl
from popxl import Tensor, ops
from popxl_addons.named_tensors import NamedTensors

from execution.graphs import Graphs, TrainingStep
from execution.layer_graphs import LOSS_SCALE
from execution.transfers import first_row
from modelling.head import TIED
from utils.runtime import round_from


def embedding_fwd_phase(step: TrainingStep, seed: Optional[Tensor] = None) -> Tuple[Tensor, ...]:
    """Words to row 0 of `x`. Returns the seed for the next phase, if there is one."""
    return _run_forward(step.embedding, first_row(), seed)


def decoder_fwd_phase(
    step: TrainingStep, n: Tensor, seed: Optional[Tensor] = None
) -> Tuple[Tensor, ...]:
    """Layer n forward: row n of `x` to row n + 1. Returns n + 1 and the next seed, if there is
    one.
    """
    return (n + 1, *_run_forward(step.decoder, n, seed))


def head_fwd_phase(step: TrainingStep) -> None:
    """The last row of `x` to the loss or the logits, in a program that only runs forward."""
    _run_forward(step.head, first_row(), None)


def head_phase(step: TrainingStep, scale: Optional[Tensor] = None) -> Tensor:
    """Head forward and backward: the last row of `x` to the loss and to the last row of `dx`.

    The gradient of the tied word embedding waits in its own buffer. Returns this replica's part of
    the squared norm.

    Args:
        scale: the loss scale, where the program finds it; so in all phases.
    """
    gradients = _run_gradient(step.head, first_row(), scale)
    squares = step.head.grad_squares(gradients)
    step.head.grad_store(gradients, first_row())
    return squares


def decoder_bwd_phase(step: TrainingStep, n: Tensor, squares: Tensor) -> Tuple[Tensor, Tensor]:
    """Layer n backward: row n + 1 of `dx` to row n. Returns n - 1 and the squared norm so far."""
    gradients = _run_gradient(step.decoder, n)
    squares = squares + step.decoder.grad_squares(gradients)
    step.decoder.grad_store(gradients, n)
    return n - 1, squares


def embedding_bwd_phase(
    step: TrainingStep,
    squares: Tensor,
    learning_rate: Tensor,
    rounding: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Embedding backward, tied gradient added, global norm, and the embedding's update.

    Args:
        rounding: seed of the update's stochastic rounding, if there is any.
    Returns:
        The global L2 norm of all gradients, without the loss scaling, and whether it is finite.
    """
    row = first_row()
    _round_from(rounding)
    gradients = with_tied_gradient(step, _run_gradient(step.embedding, row), row)
    step.embedding.grad_store(gradients, row)
    squares = squares + step.embedding.grad_squares(gradients)
    if step.layout.everyone.group_size > 1:
        squares = ops.collectives.replicated_all_reduce(squares, group=step.layout.everyone)
    norm = ops.sqrt(squares)
    if scale is not None:
        norm = norm / scale
    is_finite = ops.isfinite(norm)
    _update(step.embedding, row, learning_rate, norm, is_finite, scale, gradients)
    return norm, is_finite


def with_tied_gradient(step: TrainingStep, gradients: NamedTensors, row: Tensor) -> NamedTensors:
    """Gradients with the word embedding's added to the head's, which waited in its buffer and goes
    back there.
    """
    assert step.tied_load is not None, "a training step has a tied gradient"
    total = step.tied_load(row)[TIED]
    ops.add_(total, gradients[TIED])
    result = gradients.copy()
    result.insert(TIED, total, overwrite=True)
    return result


def decoder_optim_fwd_phase(
    step: TrainingStep,
    n: Tensor,
    seed: Tensor,
    rounding: Optional[Tensor],
    learning_rate: Tensor,
    norm: Tensor,
    is_finite: Tensor,
    scale: Optional[Tensor] = None,
) -> Tuple[Tensor, ...]:
    """Layer n's update by the gradients of the step before, and layer n forward. Returns n + 1 and
    the next seeds.
    """
    n_next, *rounding_next = decoder_optim_phase(
        step, n, rounding, learning_rate, norm, is_finite, scale
    )
    return (n_next, *_run_forward(step.decoder, n, seed), *rounding_next)


def decoder_optim_phase(
    step: TrainingStep,
    n: Tensor,
    rounding: Optional[Tensor],
    learning_rate: Tensor,
    norm: Tensor,
    is_finite: Tensor,
    scale: Optional[Tensor] = None,
) -> Tuple[Tensor, ...]:
    """Layer n's update. Returns n + 1 and the next seed for rounding, if there is one."""
    _round_from(rounding)
    _update(step.decoder, n, learning_rate, norm, is_finite, scale)
    return (n + 1,) if rounding is None else (n + 1, rounding + 1)


def head_optim_phase(
    step: TrainingStep,
    learning_rate: Tensor,
    norm: Tensor,
    is_finite: Tensor,
    rounding: Optional[Tensor] = None,
    scale: Optional[Tensor] = None,
) -> None:
    """The update of the head's own parameters; the word embedding's is done."""
    _round_from(rounding)
    _update(step.head, first_row(), learning_rate, norm, is_finite, scale)


def _run_forward(graphs: Graphs, row: Tensor, seed: Optional[Tensor]) -> Tuple[Tensor, ...]:
    """Run a layer forward. Returns the next seed, if there is one."""
    weights = graphs.fwd_all_gather(graphs.fwd_load(row))
    assert graphs.fwd is not None, "the head in training has no forward graph of its own"
    if seed is None:
        graphs.fwd.bind(weights).call(row)
        return ()
    layer_seed, next_seed = ops.split_random_seed(seed)
    graphs.fwd.bind(weights).call(row, layer_seed)
    return (next_seed,)


def _run_gradient(graphs: Graphs, row: Tensor, scale: Optional[Tensor] = None) -> NamedTensors:
    """Run a layer backward. Returns the gradients' means over micro-batches and replicas, as
    shards.
    """
    inputs = graphs.fwd_all_gather(graphs.fwd_load(row))
    sums = graphs.grad_zeros()
    inputs.update(sums)
    if scale is not None:
        inputs.insert(LOSS_SCALE, scale)
    assert graphs.grad is not None, "a program that only runs forward has no gradients"
    graphs.grad.bind(inputs).call(row)
    return graphs.grad_reduce(sums.accum)


def _round_from(seed: Optional[Tensor]) -> None:
    """Let updates of the phase that is being traced draw from a seed, whatever the run that does
    them.
    """
    if seed is not None:
        round_from(popxl.gcg(), seed)


def _update(
    graphs: Graphs,
    row: Tensor,
    learning_rate: Tensor,
    norm: Tensor,
    is_finite: Tensor,
    scale: Optional[Tensor],
    gradients: Optional[NamedTensors] = None,
) -> None:
    """Update a layer, one parameter after the other, by gradients that are at hand or wait in their
    buffers.

    Where the norm is not finite it stays as it was. Rows come and go all the same: their course is
    known beforehand.
    """
    for name in graphs.table:
        gradient = graphs.grad_load(name, row) if gradients is None else gradients[name]
        tensors = graphs.optim_fwd_load(name, row)
        graphs.optimize(name, tensors, gradient, learning_rate, norm, is_finite, scale)
        graphs.optim_fwd_store(name, tensors, row)

"""Host arrays of streams: what a run is given, and what it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import popxl_addons as addons
from popxl_addons.array_munging import tensor_parallel_input

from config import Config


def token_array(session: addons.TaskSession, name: str, tokens: np.ndarray, config: Config) -> np.ndarray:
    """The stream's array from samples in global order.

    Args:
        tokens: int [steps * global_batch_size, sequence]; within a batch, first by accumulation step, then
            by data-parallel replica. In a program over several processes: this process's samples.
    """
    execution = config.execution
    tensor_parallel = execution.tensor_parallel_1 * execution.tensor_parallel_2
    micro_batches = tokens.reshape(-1, execution.micro_batch_size * tokens.shape[1])
    laid_out = tensor_parallel_input(micro_batches, tensor_parallel, session.ir.instance_replication_factor)
    shape = session._full_input_shape(session.inputs[name].shape)
    return np.ascontiguousarray(laid_out, dtype=np.int32).reshape(shape)


def scalar_array(session: addons.TaskSession, name: str, values: Sequence[float]) -> np.ndarray:
    """The array of a scalar stream of which a run loads one value per step; the slots after those are not read."""
    transfers, replicas = session.ir.num_host_transfers, session.ir.instance_replication_factor
    array = np.zeros((transfers, replicas), np.float32)
    array[: len(values)] = np.asarray(values, np.float32)[:, None]
    return array.reshape(session._full_input_shape(()))


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gives back."""

    loss: float
    """Mean over the global batch."""
    gradient_norm: float
    """Global L2 norm before clipping."""


def run_steps(
    session: addons.TaskSession, config: Config, words: np.ndarray, labels: np.ndarray, learning_rates: Sequence[float]
) -> "list[StepResult]":
    """Run the session once: as many optimizer steps as the program's device iterations.

    Args:
        words, labels: int [device_iterations * global_batch_size, sequence].
        learning_rates: one per optimizer step.
    """
    outputs = session.run(
        {
            session.inputs.words: token_array(session, "words", words, config),
            session.inputs.labels: token_array(session, "labels", labels, config),
            session.inputs.learning_rate: scalar_array(session, "learning_rate", learning_rates),
        }
    )
    steps = len(learning_rates)
    losses = outputs[session.outputs.loss].reshape(steps, -1).mean(axis=1, dtype=np.float64)
    norms = outputs[session.outputs.gradient_norm].reshape(session.ir.num_host_transfers, -1)[:steps, 0]
    return [StepResult(float(loss), float(norm)) for loss, norm in zip(losses, norms)]

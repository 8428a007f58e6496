"""Host arrays of streams: what a run is given, and what it gives back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import popdist
import popxl_addons as addons
from popxl import DeviceToHostStream, HostToDeviceStream
from popxl_addons.array_munging import tensor_parallel_input

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.layer_plan import POSITIONS
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import gather


@dataclass(frozen=True)
class DataShare:
    """The part of each accumulation step's samples that this process's replicas read: part `index`
    of `count`.
    """

    index: int = 0
    count: int = 1


def data_share(config: Config) -> DataShare:
    """The share of this process. Processes that together hold one copy of the model read the same
    samples.

    Raises:
        UserError: a process would hold one copy of the model and a part of another.
    """
    execution, instances = config.execution, popdist.getNumInstances()
    tensor_parallel = execution.tensor_parallel_1 * execution.tensor_parallel_2
    local = execution.replication_factor // instances
    if local % tensor_parallel == 0:
        return DataShare(popdist.getInstanceIndex(), instances)
    if tensor_parallel % local:
        raise UserError(
            f"instances: got {instances} with {local} replicas each; expected a divisor or a "
            f"multiple of tensor_parallel_1 * tensor_parallel_2 = {tensor_parallel} replicas. "
            "Choose another number of instances."
        )
    return DataShare(popdist.getInstanceIndex() * local // tensor_parallel, execution.data_parallel)


def own_samples(samples: np.ndarray, config: Config) -> np.ndarray:
    """This process's samples of a global batch: [global_batch_size, ...] -> [samples, ...], in the
    same order.
    """
    share = data_share(config)
    parts = samples.reshape(config.gradient_accumulation, share.count, -1, *samples.shape[1:])
    return parts[:, share.index].reshape(-1, *samples.shape[1:])


def all_replicas(
    session: addons.TaskSession, stream: DeviceToHostStream, array: np.ndarray
) -> np.ndarray:
    """A stream's output over all processes: this one's array -> [transfers, replicas, *shape]."""
    ir = session.ir
    own = array.reshape(-1, ir.instance_replication_factor, *stream.shape)
    all_are_here = ir.instance_replication_factor == ir.replication_factor
    told = [own.tolist()] if all_are_here else gather(own.tolist())
    return np.concatenate([np.array(part, own.dtype).reshape(own.shape) for part in told], axis=1)


def token_array(
    session: addons.TaskSession, name: str, tokens: np.ndarray, config: Config
) -> np.ndarray:
    """The stream's array from samples in global order.

    Args:
        tokens: int [steps * global_batch_size, sequence]; within a batch, first by accumulation
            step, then by data-parallel replica. In a program over several processes: this process's
            samples.
    Raises:
        UserError: words or labels that the vocabulary does not have.
    """
    _check_known(name, tokens, config.model.vocabulary_size)
    execution = config.execution
    local = session.ir.instance_replication_factor
    copies = min(execution.tensor_parallel_1 * execution.tensor_parallel_2, local)
    samples = tokens.reshape(
        -1, execution.widening, local // copies, execution.micro_batch_size * tokens.shape[1]
    )
    # a replica's come together
    runs = samples.swapaxes(1, 2).reshape(-1, execution.widening * samples.shape[-1])
    laid_out = tensor_parallel_input(runs, copies, local)
    shape = session._full_input_shape(session.inputs[name].shape)
    return np.ascontiguousarray(laid_out, dtype=np.int32).reshape(shape)


def _check_known(name: str, tokens: np.ndarray, vocabulary: int) -> None:
    """UserError for tokens that would take the vector of another one."""
    is_checked = name in ("words", "labels") and tokens.size > 0
    least, most = (tokens.min(), tokens.max()) if is_checked else (0, 0)
    if most >= vocabulary or (least < 0 and name == "words"):
        raise UserError(
            f"{name}: got token {most if most >= vocabulary else least}; expected tokens from 0 to "
            f"{vocabulary - 1}, those of the vocabulary. Make them with the model's tokenizer."
        )


def word_arrays(
    session: addons.TaskSession, words: np.ndarray, config: Config
) -> "dict[HostToDeviceStream, np.ndarray]":
    """The arrays of words, as of `token_array`, and with document attention of their positions."""
    arrays = {session.inputs.words: token_array(session, "words", words, config)}
    if config.model.document_attention:
        positions = document_positions(words, config.model.end_of_text)
        arrays[session.inputs.positions] = token_array(session, POSITIONS, positions, config)
    return arrays


def document_positions(words: np.ndarray, end: int) -> np.ndarray:
    """Positions of tokens in their documents, int [samples, sequence], of which those that a sample
    begins within count from its beginning.

    Args:
        end: the token that is the last of a document.
    """
    places = np.arange(words.shape[1])
    begins = np.zeros_like(words)
    begins[:, 1:] = np.where(words[:, :-1] == end, places[1:], 0)
    positions: np.ndarray = places - np.maximum.accumulate(begins, axis=1)
    return positions


def scalar_array(session: addons.TaskSession, name: str, values: Sequence[float]) -> np.ndarray:
    """The array of a scalar stream, of values in the order in which they are loaded; the slots
    after those are not read.
    """
    transfers, replicas = session.ir.num_host_transfers, session.ir.instance_replication_factor
    array = np.zeros((transfers, replicas), np.float32)
    array[: len(values)] = np.asarray(values, np.float32)[:, None]
    return array.reshape(session._full_input_shape(()))


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gives back."""

    loss: float
    """Mean over the global batch, of the sum that is trained; nan where none of its labels
    counts.
    """
    gradient_norm: float
    """Global L2 norm before clipping."""

    loss_scale: float | None = None
    """What the loss was multiplied by, where the program finds that."""

    norm_limit: float | None = None
    """The gradient norm above which the step is a spike, where the program looks for them."""

    labels: int | None = None
    """Labels of the global batch that count: each loss is a mean over so many. None: not known."""

    losses: Mapping[str, float] = field(default_factory=dict)
    """Means over the global batch of the losses whose sum is trained, where there are several."""

    @property
    def has_labels(self) -> bool:
        """Whether a label of the global batch counts: else the step changed nothing."""
        return self.labels != 0

    @property
    def is_spike(self) -> bool:
        """Whether the step changed nothing, for its norm is far above those before."""
        return (
            self.norm_limit is not None
            and self.has_labels
            and not self.is_skipped
            and self.gradient_norm > self.norm_limit
        )

    @property
    def is_skipped(self) -> bool:
        """Whether the step changed nothing, for its norm is not finite."""
        return self.has_labels and not math.isfinite(self.gradient_norm)


def run_steps(
    session: addons.TaskSession,
    config: Config,
    words: np.ndarray,
    labels: np.ndarray,
    learning_rates: Sequence[float],
) -> "list[StepResult]":
    """Run the session once: as many optimizer steps as the program's device iterations.

    Args:
        words, labels: int [device_iterations * global_batch_size, sequence]; in a program over
            several processes, this process's share (`data_share`) of each accumulation step. With
            `masked_labels`, labels below zero do not count.
        learning_rates: one per optimizer step.
    Raises:
        UserError: labels are masked, and the program has no masked labels.
    """
    steps = len(learning_rates)
    inputs = {
        **word_arrays(session, words, config),
        session.inputs.labels: token_array(session, "labels", labels, config),
        session.inputs.learning_rate: scalar_array(session, "learning_rate", learning_rates),
    }
    counts = np.full(steps, config.tokens_per_step)
    if config.training.masked_labels:
        counts = label_counts(labels, steps, config)
        weights = np.repeat(label_weights(counts, config), config.runs_per_step).tolist()
        inputs[session.inputs.label_weight] = scalar_array(session, "label_weight", weights)
        inputs[session.inputs.label_count] = scalar_array(session, "label_count", counts.tolist())
    elif labels.min() < 0:
        raise UserError(
            "labels: got some that do not count, such as those of prompts, while masked_labels is "
            "false; expected true. Give --masked_labels."
        )
    outputs = session.run(inputs)
    apart = config.training.losses_apart
    losses = [_means(session, outputs, name, counts) for name in ("loss", *apart)]
    norms = _per_step(session, outputs[session.outputs.gradient_norm], steps)
    scales: Sequence[float | None] = [None] * steps
    limits: Sequence[float | None] = [None] * steps
    if config.training.is_scaled_by_program:
        scales = _per_step(session, outputs[session.outputs.loss_scale], steps)
    if config.training.looks_for_spikes:
        limits = _per_step(session, outputs[session.outputs.norm_limit], steps)
    each = [dict(zip(apart, values)) for values in zip(*losses[1:])] or [{}] * steps
    found = zip(losses[0], norms, scales, limits, counts.tolist(), each)
    return [StepResult(*values) for values in found]


def _means(
    session: addons.TaskSession,
    outputs: Mapping[DeviceToHostStream, np.ndarray],
    name: str,
    counts: np.ndarray,
) -> "list[float]":
    """A loss of each step, over its runs of the head and replicas; nan where no label counts."""
    stream = session.outputs[name]
    values = all_replicas(session, stream, outputs[stream])
    means = values.reshape(len(counts), -1).mean(axis=1, dtype=np.float64)
    means[counts == 0] = np.nan
    found: list[float] = means.tolist()
    return found


def label_counts(labels: np.ndarray, steps: int, config: Config) -> np.ndarray:
    """The labels that count in each step's global batch: int [steps]."""
    own = (labels.reshape(steps, -1) >= 0).sum(axis=1).tolist()
    told = gather([data_share(config).index, own])
    # processes that hold parts of one copy of the model read the same samples
    shares = {index: counts for index, counts in told}
    counts: np.ndarray = np.sum(list(shares.values()), axis=0)
    return counts


def label_weights(counts: np.ndarray, config: Config) -> np.ndarray:
    """One over the labels that count in each step's global batch, times the runs of the head that
    the batch takes: float64 [steps].
    """
    runs = config.runs_per_step * config.execution.data_parallel
    weights: np.ndarray = runs / np.maximum(counts, 1)
    return weights


def _per_step(session: addons.TaskSession, array: np.ndarray, steps: int) -> "list[float]":
    """A scalar stream of which a run stores one value per step, the same on all replicas."""
    values: list[float] = array.reshape(session.ir.num_host_transfers, -1)[:steps, 0].tolist()
    return values

"""Programs that only run forward, without dropout: the loss of held-out text, and logits to write
text with.

They hold weights under the same names as the training program, from which
`execution.variables.copy_weights` copies.
"""

import dataclasses

import numpy as np
import popxl
import popxl_addons as addons

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.block_graphs import words_spec
from popxl_gpt.execution.host import all_replicas, own_samples, token_array, word_arrays
from popxl_gpt.execution.inference.forward import Description, build_forward
from popxl_gpt.execution.layer_graphs import LayerIO
from popxl_gpt.execution.pretraining import make_ir
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.head import TIED, Head, LogitsHead, ScoreHead, TokenLossHead
from popxl_gpt.utils.runtime import session_device


def evaluation(config: Config) -> addons.TaskSession:
    """A session whose run gives the loss of each token of `samples_per_run` samples; see
    `token_losses`.
    """
    return _session(config, *evaluation_program(config))


def evaluation_program(config: Config) -> "tuple[popxl.Ir, LayerIO, addons.NamedTensors]":
    """The program of `evaluation`, its streams and its weights."""
    config = config.in_inference
    words = (words_spec(config).shape, popxl.int32)
    inputs: dict[str, Description] = {"words": words, "labels": words}
    return _program(config, inputs, {"loss": (words[0], popxl.float32)}, TokenLossHead)


def scoring(config: Config) -> addons.TaskSession:
    """Same as `evaluation`, and whether each token is the likeliest one; see `token_scores`."""
    config = config.in_inference
    words = (words_spec(config).shape, popxl.int32)
    inputs: dict[str, Description] = {"words": words, "labels": words}
    outputs: dict[str, Description] = {"loss": (words[0], popxl.float32), "is_likeliest": words}
    return _session(config, *_program(config, inputs, outputs, ScoreHead))


def samples_per_run(config: Config) -> int:
    """Samples of a run of such a session: the device iterations' global batches."""
    own = config.in_inference
    return own.execution.device_iterations * own.training.global_batch_size


def token_losses(
    session: addons.TaskSession, config: Config, words: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Loss of each label of a run in nats, float32 [samples_per_run, sequence], the same in every
    process.

    Args:
        words, labels: int [samples_per_run, sequence]; over several processes this one's share,
            as in `run_steps`.
    """
    (losses,) = _by_sample(session, config, words, labels, ("loss",))
    return losses


def token_scores(
    session: addons.TaskSession, config: Config, words: np.ndarray, labels: np.ndarray
) -> "tuple[np.ndarray, np.ndarray]":
    """Same as `token_losses`, and whether each label is the likeliest token, bool, of a session of
    `scoring`.
    """
    losses, found = _by_sample(session, config, words, labels, ("loss", "is_likeliest"))
    return losses, found > 0


def _by_sample(
    session: addons.TaskSession,
    config: Config,
    words: np.ndarray,
    labels: np.ndarray,
    names: "tuple[str, ...]",
) -> "list[np.ndarray]":
    """Run the session once. For each of these streams, what it gives for every token,
    [samples_per_run, sequence].
    """
    config = config.in_inference
    outputs = session.run(
        {
            **word_arrays(session, words, config),
            session.inputs.labels: token_array(session, "labels", labels, config),
        }
    )
    execution, sequence = config.execution, config.model.sequence_length
    # [runs, data-parallel replica, its copies, widening, micro-batch * sequence]
    size = execution.micro_batch_size * sequence
    copies = execution.tensor_parallel_1 * execution.tensor_parallel_2
    shape = (-1, execution.data_parallel, copies, execution.widening, size)
    result = []
    for name in names:
        stream = session.outputs[name]
        found = all_replicas(session, stream, outputs[stream]).reshape(shape)[:, :, 0]
        result.append(found.swapaxes(1, 2).reshape(-1, sequence))
    return result


def evaluate(
    session: addons.TaskSession, config: Config, words: np.ndarray, labels: np.ndarray
) -> float:
    """Mean loss of a run; as `token_losses`."""
    return float(token_losses(session, config, words, labels).mean(dtype=np.float64))


def generation(config: Config, rows: int) -> addons.TaskSession:
    """A session whose run gives the logits of chosen rows of each micro-batch, one by one; see
    `logits`.

    Args:
        rows: how many rows of a micro-batch, of its micro_batch * sequence.
    """
    config = _one_by_one(config)
    tp1 = config.execution.tensor_parallel_1
    table = model_table(config.model)[f"embedding.{TIED}"]
    classes = table.shard_shape(tp1, config.execution.tensor_parallel_2)[0]
    inputs: dict[str, Description] = {
        "words": (words_spec(config).shape, popxl.int32),
        "rows": ((rows,), popxl.int32),
    }
    outputs: dict[str, Description] = {"logits": ((rows, classes), popxl.float32)}
    return _session(config, *_program(config, inputs, outputs, LogitsHead, rows))


def logits(
    session: addons.TaskSession, config: Config, words: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Logits of chosen rows, float32 [micro-batches, rows, vocabulary], the same in every process.

    Args:
        words: int [global_batch_size, sequence].
        rows: int [micro-batches, rows], each from 0 to micro_batch * sequence - 1.
    """
    config = _one_by_one(config)
    outputs = session.run(
        {
            **word_arrays(session, own_samples(words, config), config),
            session.inputs.rows: token_rows(session, own_samples(rows, config), config),
        }
    )
    execution = config.execution
    shape = (
        -1,
        execution.tensor_parallel_1,
        execution.tensor_parallel_2,
        *session.outputs.logits.shape,
    )
    found = all_replicas(session, session.outputs.logits, outputs[session.outputs.logits])
    pieces = found.reshape(shape)[:, :, 0]  # identical over tp2
    whole = np.concatenate([pieces[:, i] for i in range(execution.tensor_parallel_1)], axis=-1)
    return whole[..., : config.model.vocabulary_size]


def _one_by_one(config: Config) -> Config:
    """The same configuration without widening, and one global batch a run."""
    config = config.in_inference
    execution = dataclasses.replace(config.execution, widening=1, device_iterations=1)
    return dataclasses.replace(config, execution=execution)


def token_rows(session: addons.TaskSession, rows: np.ndarray, config: Config) -> np.ndarray:
    """The array of the stream `rows`, one entry per micro-batch."""
    single = dataclasses.replace(config.execution, micro_batch_size=1)
    return token_array(session, "rows", rows, dataclasses.replace(config, execution=single))


def _program(
    config: Config,
    inputs: "dict[str, Description]",
    outputs: "dict[str, Description]",
    head: "type[Head]",
    rows: "int | None" = None,
) -> "tuple[popxl.Ir, LayerIO, addons.NamedTensors]":
    ir = make_ir(config)
    return ir, *build_forward(ir, config, inputs, outputs, head, rows)


def _session(
    config: Config, ir: popxl.Ir, io: LayerIO, state: addons.NamedTensors
) -> addons.TaskSession:
    device = session_device(config.execution.device)
    return addons.TaskSession(io.inputs, io.outputs, state, 1, ir, device)

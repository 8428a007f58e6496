"""The measurement of a model on held-out text, and on its training data."""

import hashlib
import json
from collections.abc import Callable

import numpy as np
import popxl_addons as addons

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import token_bytes
from popxl_gpt.execution.inference.evaluation import Evaluation
from popxl_gpt.execution.inference.inference import evaluation
from popxl_gpt.execution.variables import copy_weights
from popxl_gpt.utils.errors import DataError


def bytes_of_tokens(config: Config, tokenizer: TextTokenizer | None) -> np.ndarray | None:
    """Bytes of text that each of the model's tokens stands for, as `token_bytes`, float64
    [vocabulary]; None where that is not known.
    """
    sizes = None if tokenizer is None else token_bytes(tokenizer)
    if sizes is None:
        return None
    return np.pad(sizes, (0, config.model.vocabulary_size - len(sizes)))


class Validation:
    """The loss on held-out text, by a forward-only program with the training weights: on always the
    same part of it, or on all. If asked, the loss on as much of the training data, too.
    """

    def __init__(
        self,
        config: Config,
        held_out: Dataset,
        training_data: Dataset,
        token_bytes: np.ndarray | None,
    ):
        self.session = evaluation(config)
        wanted = config.training.validation_batches
        batches = None if isinstance(wanted, str) else wanted
        self.held_out = Evaluation(self.session, config, held_out, batches, token_bytes)
        facts = [held_out.fingerprint, held_out.sequence_length, len(self.held_out.samples)]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        """Names what is measured: losses of others cannot be compared with it."""
        number = -(-len(self.held_out.samples) // config.training.global_batch_size)
        self.training_data = (
            Evaluation(self.session, config, training_data, number)
            if config.training.validate_training
            else None
        )
        for each in (self.held_out, self.training_data):
            if each is not None and (config.training.masked_labels or each.dataset.is_masked):
                each.check_labels()  # rather than after some hours

    def measure(
        self, training: addons.TaskSession, is_to_stop: Callable[[DataError | None], bool]
    ) -> "dict[str, float] | None":
        """What is found, by the names that `metrics.jsonl` has for it; None where it is to stop,
        which is asked before each batch, see `Evaluation.measure`.
        """
        if is_to_stop(None):
            return None
        copy_weights(training, self.session)
        found = self.held_out.measure(is_to_stop)
        if found is None:
            return None
        values = {
            "validation_loss": found.loss,
            "validation_standard_error": found.standard_error,
            "validation_bits_per_byte": found.bits_per_byte,
        }
        if self.training_data is not None:
            trained = self.training_data.measure(is_to_stop)
            if trained is None:
                return None
            values["training_loss"] = trained.loss
        return {name: value for name, value in values.items() if value is not None}

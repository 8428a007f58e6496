"""The loss of a model on a data set: of all of it, every token once, or of a part spread over all
of it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import popxl_addons as addons

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.masking import IGNORED, ids_of, labels_of
from popxl_gpt.data.sampling import permute
from popxl_gpt.execution.host import own_samples
from popxl_gpt.execution.inference.inference import samples_per_run, token_losses
from popxl_gpt.utils.errors import DataError

ORDER = 0x5DEECE66D
"""Key of the order that parts of data sets are taken in: the same for every run."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found on a data set."""

    loss: float
    """Mean over tokens, nats."""
    standard_error: float | None
    """The standard error of the loss, which is that of a part; None where every token was counted.
    """
    tokens: int
    """Tokens that were counted."""
    bytes: int | None
    """Bytes of the text that these tokens stand for, in UTF-8; None where that is not known."""

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where no float holds it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for all tokens over the bytes that they stand for: the same measure whatever the
        tokenizer.
        """
        return self.tokens * self.loss / math.log(2) / self.bytes if self.bytes else None


class Evaluation:
    """Measures a data set with a session's weights.

    Args:
        session: of `execution.inference.evaluation`, with the same configuration.
        dataset: its samples' new labels are counted, see `Dataset.counted`.
        batches: global batches to read, of samples spread over all of the data; None, and where
            they hold the whole: all.
        token_bytes: float64 [vocabulary], bytes of text that each token stands for; NaN where
            that is not known.
    """

    def __init__(
        self,
        session: addons.TaskSession,
        config: Config,
        dataset: Dataset,
        batches: int | None = None,
        token_bytes: np.ndarray | None = None,
    ) -> None:
        self.session = session
        self.config = config
        self._size = samples_per_run(config)
        self.dataset = dataset
        self.token_bytes = token_bytes
        most = len(dataset) if batches is None else batches * config.training.global_batch_size
        self.is_whole = len(dataset) <= most
        self.samples = (
            np.arange(len(dataset))
            if self.is_whole
            else permute(np.arange(most), len(dataset), ORDER)
        )
        """Numbers of the samples that are read."""

    def check_labels(self) -> None:
        """Read until a label counts.

        Raises:
            DataError: none does.
        """
        for numbers in self._batches():
            labels = labels_of(self.dataset.read(numbers)[:, 1:])
            if self._is_counted(numbers, labels).any():
                return
        raise _no_labels()

    def measure(
        self,
        is_to_stop: Callable[[DataError | None], bool] = lambda problem: False,
        on_batch: Callable[[int], None] = lambda samples: None,
    ) -> Measured | None:
        """Run the session over the samples; None where it is to stop, which is asked before each
        batch.

        Args:
            is_to_stop: gets why this process cannot read the batch, if so, and may raise it: other
                processes wait in the session for one that leaves it alone.
            on_batch: called with the number of samples done.
        """
        sums, counts, text_bytes = [], [], 0.0
        with self.session:
            for numbers in self._batches():
                read = self._read(numbers)
                problem = read if isinstance(read, DataError) else None
                if is_to_stop(problem):
                    return None
                if isinstance(read, DataError):
                    raise read
                losses, is_counted, found_bytes = self._run(numbers, read)
                sums += np.where(is_counted, losses, 0).sum(axis=1, dtype=np.float64).tolist()
                counts += is_counted.sum(axis=1).tolist()
                text_bytes += found_bytes
                on_batch(len(counts))
        tokens = sum(counts)
        if not tokens:
            raise _no_labels()
        return Measured(
            loss=math.fsum(sums) / tokens,
            standard_error=None if self.is_whole else self._standard_error(sums, counts),
            tokens=tokens,
            bytes=None if math.isnan(text_bytes) else int(text_bytes),
        )

    def _batches(self) -> Iterator[np.ndarray]:
        size = self._size
        for start in range(0, len(self.samples), size):
            yield self.samples[start : start + size]

    def _read(self, numbers: np.ndarray) -> np.ndarray | DataError:
        """Tokens of a run's samples, or why they cannot be read. One that is not full is filled
        with samples that do not count.
        """
        filled = np.concatenate([numbers, np.repeat(numbers[:1], self._size - len(numbers))])
        try:
            # every process needs to know which labels count: all of them
            return self.dataset.read(filled)
        except DataError as error:
            return error

    def _run(
        self, numbers: np.ndarray, tokens: np.ndarray
    ) -> "tuple[np.ndarray, np.ndarray, float]":
        """Losses of samples, [n, sequence], which of them count, and the bytes that these stand
        for, NaN where that is not known.
        """
        words, labels = ids_of(tokens[:, :-1]), labels_of(tokens[:, 1:])
        own = (self._own(array) for array in (words, labels))
        losses = token_losses(self.session, self.config, *own)[: len(numbers)]
        labels = labels[: len(numbers)]
        is_counted = self._is_counted(numbers, labels)
        found_bytes = math.nan
        if self.token_bytes is not None:
            found_bytes = float(self.token_bytes[labels[is_counted]].sum())
        return losses, is_counted, found_bytes

    def _own(self, samples: np.ndarray) -> np.ndarray:
        """This process's samples of a run."""
        config = self.config.in_inference
        batches = np.split(samples, config.execution.device_iterations)
        return np.concatenate([own_samples(batch, config) for batch in batches])

    def _is_counted(self, numbers: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Whether each label of samples counts, and is in no sample before, bool [n, sequence]."""
        begin, end = self.dataset.counted(numbers).T[..., None]
        places = np.arange(self.config.model.sequence_length)
        found: np.ndarray = (begin <= places) & (places < end) & (labels != IGNORED)
        return found

    def _standard_error(self, sums: "list[float]", counts: "list[int]") -> float:
        """The standard error of the loss, a ratio, of a part drawn without putting back. Source:
        Cochran 1977, Sampling Techniques, section 2.11.
        """
        number = len(sums)
        if number < 2:
            return math.inf
        left = np.array(sums) - math.fsum(sums) / sum(counts) * np.array(counts)
        variance = np.square(left).sum() / (number - 1)
        share = number / len(self.dataset)
        return float(math.sqrt((1 - share) * variance / number) / (sum(counts) / number))


def _no_labels() -> DataError:
    return DataError(
        "evaluation: got data in which no label counts; expected some that do. Give data "
        "with answers."
    )

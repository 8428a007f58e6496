"""Several data sets as one, mixed by weights."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.sampling import Mixture, shares_of


class MixedDataset(Dataset):
    """Several data sets as one, with the order of their samples.

    Args:
        sources: of the same sequence length.
        weights: one of each, above 0; their sum counts as 1.
    Raises:
        DataError: a weight is so small that a block has no place for its source.
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float]) -> None:
        self.sources = tuple(sources)
        self.sequence_length = sources[0].sequence_length
        self.vocabulary_size = sources[0].vocabulary_size
        self.info = sources[0].info
        self.tokenizers = tuple(path for source in sources for path in source.tokenizers)
        self.is_masked = any(source.is_masked for source in sources)
        self.mixture = Mixture(tuple(map(len, sources)), shares_of(weights))
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Names the data and their shares."""
        assert self.mixture is not None
        facts = [[source.fingerprint for source in self.sources], self.mixture.shares]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Samples, as of `Dataset`."""
        found = np.empty((len(samples), self.sequence_length + 1), np.int32)
        for source, here, own in self._parts(samples):
            found[here] = source.read(own)
        return found

    def counted(self, samples: np.ndarray) -> np.ndarray:
        """The labels that count, as of `Dataset`."""
        found = np.empty((len(samples), 2), np.int64)
        for source, here, own in self._parts(samples):
            found[here] = source.counted(own)
        return found

    def _parts(self, samples: np.ndarray) -> "list[tuple[Dataset, np.ndarray, np.ndarray]]":
        """Each source with its samples: where they are, and their numbers in it."""
        numbers = np.searchsorted(self._ends, samples, side="right")
        parts = []
        for number in np.unique(numbers):
            here, source = numbers == number, self.sources[number]
            parts.append((source, here, samples[here] - (self._ends[number] - len(source))))
        return parts

"""Samples without files of their own: of a text in memory, random numbers, the first of others."""

import hashlib
import json

import numpy as np

from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.sampling import derive_key, mix
from popxl_gpt.data.windows import Windows


class TokenArray(Dataset):
    """The samples of one text in memory, each `stride` tokens after the one before.

    Args:
        tokens: int [tokens], at least 2.
        sequence_length, stride: as of `TokenDataset`.
    """

    def __init__(
        self, tokens: np.ndarray, sequence_length: int, vocabulary_size: int, stride: int
    ) -> None:
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self._tokens = tokens
        self._windows = Windows(len(tokens) - 1, sequence_length, stride)

    def __len__(self) -> int:
        return self._windows.count

    @property
    def fingerprint(self) -> str:
        """Names the data."""
        content = np.ascontiguousarray(self._tokens, dtype=np.int64).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples, int [n] -> int32 [n, sequence_length + 1]; zeros after a
        text that is shorter.
        """
        batch = np.zeros((len(samples), self.sequence_length + 1), dtype=np.int32)
        for row, begin in zip(batch, self._windows.begin(np.asarray(samples))):
            found = self._tokens[begin : begin + row.size]
            row[: found.size] = found
        return batch

    def counted(self, samples: np.ndarray) -> np.ndarray:
        """The labels that count, as of `TokenDataset`."""
        return self._windows.counted(np.asarray(samples))


class SyntheticDataset(Dataset):
    """Samples of uniformly random tokens, made when they are read; each depends only on the seed
    and its number.
    """

    def __init__(
        self, sequence_length: int, vocabulary_size: int, seed: int = 0, samples: int = 2**32
    ) -> None:
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self._samples = samples
        self._seed = seed

    def __len__(self) -> int:
        return self._samples

    @property
    def fingerprint(self) -> str:
        """Names the data."""
        facts = [self.sequence_length, self.vocabulary_size, self._samples, self._seed]
        return hashlib.sha256(json.dumps(["synthetic", *facts]).encode()).hexdigest()[:16]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples, int [n] -> int32 [n, sequence_length + 1]."""
        tokens = self.sequence_length + 1
        numbers = np.asarray(samples, dtype=np.uint64)[:, None] * np.uint64(tokens) + np.arange(
            tokens, dtype=np.uint64
        )
        ids: np.ndarray = mix(numbers, derive_key(self._seed)) % np.uint64(self.vocabulary_size)
        return ids.astype(np.int32)

    def counted(self, samples: np.ndarray) -> np.ndarray:
        """All labels of every sample, int64 [n, 2]."""
        return np.tile(np.array([[0, self.sequence_length]], np.int64), (len(samples), 1))


class FirstSamples(Dataset):
    """The first samples of other data, at most as many as those have."""

    def __init__(self, data: Dataset, samples: int) -> None:
        self.sequence_length, self.vocabulary_size = data.sequence_length, data.vocabulary_size
        self.info, self.tokenizers, self.is_masked = data.info, data.tokenizers, data.is_masked
        self._data, self._samples = data, samples

    def __len__(self) -> int:
        return self._samples

    @property
    def fingerprint(self) -> str:
        """Names the data, and how many of their samples these are."""
        return f"{self._data.fingerprint}-{self._samples}"

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Samples, as of `Dataset`."""
        return self._data.read(samples)

    def counted(self, samples: np.ndarray) -> np.ndarray:
        """The labels that count, as of `Dataset`."""
        return self._data.counted(samples)

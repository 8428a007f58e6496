"""Where samples come from: token files, or numbers made on the spot."""

import functools
import glob
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from config.bounded import read_bounded
from config.texts import user_path
from data import example
from data.errors import DataError
from data.records import RecordFile, unreadable
from data.sampling import derive_key, mix

VERIFIED_BYTES = 32 * 2**20
"""Data sets of up to this size, in bytes, have every checksum checked when they are opened (a
fraction of a second).
"""

INFO_BYTES = 2**24
"""Of a dataset.json."""
_OPEN_FILES = 256
_LOG = logging.getLogger(__name__)


class Dataset(Protocol):
    """Samples by number, each of `sequence_length + 1` tokens."""

    sequence_length: int
    vocabulary_size: int
    info: dict[str, Any] | None
    """What preparation says about the data, if it left something."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Names the data, wherever it lies."""

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples, int [n] -> int32 [n, sequence_length + 1]."""


def find_files(patterns: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that paths, folders (their `*.tfrecord`) and globs stand for, each once,
    ordered by name.

    The indices beside the files, which a wide glob matches too, are left out.

    Raises:
        DataError: if a pattern matches nothing.
    """
    found: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, (str, Path)) else patterns:
        path = user_path("input files", pattern)
        if path.is_dir():
            matches = list(path.glob("*.tfrecord"))
        else:
            globbed = (Path(name) for name in glob.glob(str(path), recursive=True))
            matches = (
                [path] if path.exists() else [name for name in globbed if name.suffix != ".tfindex"]
            )
        if not matches:
            raise DataError(
                f"input files: got '{pattern}', which matches no file; expected TFRecord files. "
                "Check the path, or make them with data/prepare.py."
            )
        found.update(matches)
    return sorted(found, key=lambda path: (path.name, str(path)))


class TokenDataset:
    """The samples of TFRecord files: one per record, read in O(1), both checksums checked whenever
    it is read.

    Records must have at least `sequence_length + 1` tokens; of longer ones the first
    `sequence_length + 1` are used. Opening checks the first record of every file (and every
    checksum of small data sets), and the vocabulary size in `dataset.json` where preparation left
    one. An index that is missing is made, beside the file if the folder takes it.

    Several instances share that work: each opens and checks every `instances`-th file. It opens
    another when it first reads one of its samples, or at once where no `dataset.json` says how many
    there are.

    Args:
        files: paths, folders or globs, as `find_files` takes them.
        sequence_length: tokens per sample the model sees (a sample has one more, for the labels).
        vocabulary_size: the model's; ids must be smaller.
        instance, instances: which process of a run this is, and of how many.
    Raises:
        DataError: also while reading, for damage that opening did not look for.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        sequence_length: int,
        vocabulary_size: int,
        *,
        instance: int = 0,
        instances: int = 1,
    ) -> None:
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        paths = find_files(files)
        if not paths:
            raise DataError(
                "input files: got none; expected TFRecord files. Name some, or use synthetic data."
            )
        infos = _read_infos(paths, vocabulary_size)
        self.info = infos[paths[0].parent]
        own = range(instance, len(paths), instances)
        known = [_known_records(path, infos[path.parent]) for path in paths]
        self.files = [RecordFile(path, records) for path, records in zip(paths, known)]
        for number in own:
            self.files[number].check()
        self._ends = np.cumsum([len(file) for file in self.files])
        self._open = functools.lru_cache(maxsize=_OPEN_FILES)(
            lambda number: self.files[number].open()
        )
        longest = max((self._tokens(number, 0).size for number in own), default=0)
        if longest > sequence_length + 1:
            _LOG.warning(
                "%s: records have up to %d tokens, the model uses the first %d of each. Prepare "
                "the data with --sequence_length %d to use all.",
                paths[0].parent,
                longest,
                sequence_length + 1,
                sequence_length,
            )
        if sum(file.size for file in self.files) <= VERIFIED_BYTES:
            for number in own:
                self.files[number].verify()
        for number in own:
            self.files[number].save_index()

    info: dict[str, Any] | None
    """Content of the `dataset.json` beside the first file (see `preparation.py`), if it is
    there.
    """

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Names the data, wherever it lies: hash of the files' names, sizes and record counts."""
        facts = [(file.path.name, file.size, len(file)) for file in self.files]
        return hashlib.sha256(json.dumps([facts, self.sequence_length]).encode()).hexdigest()[:16]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples, int [n] -> int32 [n, sequence_length + 1]."""
        batch = np.empty((len(samples), self.sequence_length + 1), dtype=np.int32)
        numbers = np.searchsorted(self._ends, samples, side="right")
        for row, sample, number in zip(batch, samples, numbers):
            first = self._ends[number] - len(self.files[number])
            row[:] = self._tokens(int(number), int(sample - first))[: row.size]
        return batch

    def close(self) -> None:
        """Close the files."""
        self._open.cache_clear()

    def _tokens(self, number: int, record: int) -> np.ndarray:
        """Return all tokens of a record of file `number`, int64 [tokens], after checking them."""
        file = self.files[number]
        where = f"{file.path}, record {record}"
        tokens = example.decode(file.payload(self._open(number), record), where)
        if tokens.size <= self.sequence_length:
            raise DataError(
                f"{where}: got {tokens.size} tokens; expected at least {self.sequence_length + 1} "
                f"(sequence length {self.sequence_length} and one more for the labels). Prepare "
                f"the data with --sequence_length {self.sequence_length}, or give the model a "
                "shorter sequence_length."
            )
        if tokens.min() < 0 or tokens.max() >= self.vocabulary_size:
            outside = tokens[(tokens < 0) | (tokens >= self.vocabulary_size)][0]
            raise DataError(
                f"{where}: got token id {outside}; expected 0 to {self.vocabulary_size - 1} "
                f"(vocabulary_size {self.vocabulary_size}). Use the vocabulary size of the "
                "tokenizer that made the data."
            )
        return tokens


class SyntheticDataset:
    """Samples of uniformly random tokens, made when they are read; each depends only on the seed
    and its number.
    """

    def __init__(
        self, sequence_length: int, vocabulary_size: int, seed: int = 0, samples: int = 2**32
    ) -> None:
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self.info: dict[str, Any] | None = None
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

    def close(self) -> None:
        """Nothing to release."""


def read_info(folder: Path) -> dict[str, Any] | None:
    """Return what `dataset.json` in `folder` says, None if there is none."""
    path = folder / "dataset.json"
    try:
        info: dict[str, Any] = json.loads(read_bounded(path, INFO_BYTES))
        _check_info(info)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: got no valid description; expected the JSON of data/prepare.py. Prepare "
            "again with --overwrite."
        ) from error
    return info


def _check_info(info: Any) -> None:
    """Raise TypeError, KeyError or ValueError where a description has another structure or
    impossible numbers.
    """
    splits = info.get("splits", {}) if isinstance(info, dict) else None
    if not isinstance(splits, dict) or not all(
        isinstance(split, dict) for split in splits.values()
    ):
        raise TypeError
    counts = [
        info["vocabulary_size"],
        *(info[name] for name in ("sequence_length",) if name in info),
    ]
    for split in splits.values():
        counts += [split[name] for name in ("documents", "tokens", "records") if name in split]
        if not isinstance(split["files"], list):
            raise TypeError
        for file in split["files"]:
            if not isinstance(file["name"], str) or not isinstance(file.get("sha256", ""), str):
                raise TypeError
            counts += [file["bytes"], file["records"]]
        if "records" in split and split["records"] != sum(
            file["records"] for file in split["files"]
        ):
            raise ValueError
    if not all(type(count) is int and 0 < count < 2**63 for count in counts):
        raise TypeError


def _read_infos(paths: list[Path], vocabulary_size: int) -> dict[Path, dict[str, Any] | None]:
    """What `dataset.json` says in each of the files' folders."""
    infos = {folder: read_info(folder) for folder in dict.fromkeys(path.parent for path in paths)}
    for folder, info in infos.items():
        if info is not None and info["vocabulary_size"] > vocabulary_size:
            raise DataError(
                f"{folder / 'dataset.json'}: got data with vocabulary_size "
                f"{info['vocabulary_size']}; expected at most the model's, {vocabulary_size}. Set "
                f"the model's to {info['vocabulary_size']} or more."
            )
    return infos


def _known_records(path: Path, info: dict[str, Any] | None) -> int | None:
    """How many records preparation wrote to a file; None where it does not say, or the file has
    another size.
    """
    for split in (info or {}).get("splits", {}).values():
        for file in split["files"]:
            if (
                file["name"] == path.name
                and path.is_file()
                and file["bytes"] == path.stat().st_size
            ):
                records: int = file["records"]
                return records
    return None

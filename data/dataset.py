"""Samples of token files. Those without files are in `in_memory`."""

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from popxl_gpt.data import example
from popxl_gpt.data.dataset_info import Described, check_size, describe, tokenizer_of
from popxl_gpt.data.errors import DamagedRecordError
from popxl_gpt.data.masking import ids_of, masked
from popxl_gpt.data.records import DAMAGED, RecordFile
from popxl_gpt.data.sampling import Mixture
from popxl_gpt.data.token_files import find_files, read_infos
from popxl_gpt.data.windows import Windows
from popxl_gpt.utils.errors import DataError

VERIFIED_BYTES = 32 * 2**20
"""Data sets of up to this size, in bytes, have every checksum checked when they are opened (a
fraction of a second).
"""

SAMPLED_BYTES = 32 * 2**20
"""Bytes of a data set that are looked at to name it; all of a smaller one."""
SAMPLED_PIECE = 2**16
"""Bytes of it that are looked at in one place."""

_OPEN_FILES = 256
_LOG = logging.getLogger(__name__)


class Dataset(Protocol):
    """Samples by number, each of `sequence_length + 1` tokens."""

    sequence_length: int
    vocabulary_size: int
    info: dict[str, Any] | None = None
    """What preparation says about the data, if it left something: `dataset.json`, of several the
    first.
    """
    tokenizers: tuple[Path, ...] = ()
    """The tokenizers that preparation says made the data, where their files are there."""
    is_masked: bool = False
    """Whether preparation says that not every token counts as a label."""
    mixture: Mixture | None = None
    """The mixture of the sources that the samples are of, if there are several."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Names the data, wherever it lies."""

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples, int [n] -> int32 [n, sequence_length + 1]; those that do
        not count as labels are marked (see `masking`).
        """

    def counted(self, samples: np.ndarray) -> np.ndarray:
        """Return from where to where the labels of samples are in no sample before, int [n] ->
        int64 [n, 2].
        """


@dataclass(frozen=True, slots=True)
class _Section:
    """Consecutive records that are cut into samples alike.

    What `prepare.py` wrote is one run of tokens: each record begins with the last token of the one
    before. In files that nothing describes each record is a run of its own.
    """

    samples: int
    """Samples of the sections before."""
    records: int
    """Records of the files before."""
    per_run: int
    """Records of a run."""
    per_record: int
    """Labels of a record; the last one of a run may have fewer."""
    windows: Windows
    """The windows of each run."""


class TokenDataset(Dataset):
    """The samples of TFRecord files, read in O(1), checksums checked whenever a record is read.

    Records may be longer or shorter than samples. Those of `prepare.py` are one text, cut into
    samples from its first token on. In files without its `dataset.json` every record is a text of
    its own, all records of a file have the same length, and it is at least that of a sample. The
    last sample of a text begins earlier, so that it is whole; no token is left out. Opening checks
    the first record of every file (and every checksum of small data sets), and the vocabulary size
    in `dataset.json`. An index that is missing is made, beside the file if the folder takes it.

    Several instances share that work: each opens and checks every `instances`-th file. It opens
    another when it first reads one of its samples, or at once where no `dataset.json` says how many
    there are.

    Args:
        files: paths, folders or globs, as `find_files` takes them.
        sequence_length: tokens per sample the model sees (a sample has one more, for the labels).
        vocabulary_size: the model's; ids must be smaller.
        instance, instances: which process of a run this is, and of how many.
        stride: tokens from a sample's beginning to the next one's, at most `sequence_length`; for
            evaluation, where a text may be shorter than a sample, too. None: as `dataset.json` says
            of training data, or else `sequence_length`.
        skip_damaged: leave out samples that need a record whose checksum is wrong, and tell of each
            such record. The next sample takes the place of such a one; with a stride, its labels do
            not count. Files need an index, or damaged lengths hide what follows them.
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
        stride: int | None = None,
        skip_damaged: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self.damaged: set[str] = set()
        """What was found damaged so far, in words."""
        self._skip_damaged, self._is_evaluated = skip_damaged, stride is not None
        paths = find_files(files)
        if not paths:
            raise DataError(
                "input files: got none; expected TFRecord files. Name some, or use synthetic data."
            )
        infos = read_infos(paths, vocabulary_size)
        self.info = infos[paths[0].parent]
        named = (tokenizer_of(folder, info) for folder, info in infos.items())
        self.tokenizers = tuple(path for path in named if path is not None)
        self.is_masked = any(info is not None and info.get("masked") for info in infos.values())
        own = range(instance, len(paths), instances)
        described = [describe(path, infos[path.parent]) for path in paths]
        self.files = [
            RecordFile(path, known.records if known else None)
            for path, known in zip(paths, described)
        ]
        for number in own:
            self.files[number].check()
        self._record_ends = np.cumsum([len(file) for file in self.files])
        self._open = functools.lru_cache(maxsize=_OPEN_FILES)(RecordFile.open)
        for number in own:
            with self._noting_damage():
                self._check_ends(number, described[number])
        self._make_sections(described, stride)
        if sum(file.size for file in self.files) <= VERIFIED_BYTES:
            for number in own:
                for error in self.files[number].damaged():
                    with self._noting_damage():
                        raise error
        for file in self.files:
            check_size(file.path, file.size, infos[file.path.parent])
        for number in own:
            self.files[number].save_index()

    def __len__(self) -> int:
        return self._sample_ends[-1]

    @property
    def fingerprint(self) -> str:
        """Names the data, wherever it lies: hash of the files' names, sizes and record counts, and
        of how many samples they are; behind a dash, hash of their contents, see `SAMPLED_BYTES`.
        """
        facts: list[Any] = [(file.path.name, file.size, len(file)) for file in self.files]
        if len(self) != self._record_ends[-1]:
            facts.append(len(self))
        named = hashlib.sha256(json.dumps([facts, self.sequence_length]).encode()).hexdigest()
        contents = hashlib.sha256()
        for number, start, size in _sampled([file.size for file in self.files]):
            contents.update(self.files[number].open().read(start, size))
        return f"{named[:16]}-{contents.hexdigest()[:16]}"

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Samples, as of `Dataset`; zeros follow a text that is shorter."""
        batch = np.zeros((len(samples), self.sequence_length + 1), dtype=np.int32)
        for row, sample in zip(batch, samples):
            tokens = self._whole_sample(int(sample), row.size)
            row[: tokens.size] = tokens
        return batch

    def _whole_sample(self, sample: int, count: int) -> np.ndarray:
        """The first so many tokens of a sample; where it is damaged and left out, of the next one
        that is not, or padding that does not count.
        """
        for number in range(sample, sample + len(self)):
            with self._noting_damage():
                return self._sample(number % len(self), count)
            if self._is_evaluated:
                return masked(np.zeros(count, np.int32), np.zeros(count, np.bool_))
        raise _all_damaged(self.files[0])

    def _sample(self, sample: int, count: int) -> np.ndarray:
        section = self._sections[np.searchsorted(self._sample_ends, sample, side="right")]
        run, window = divmod(sample - section.samples, section.windows.count)
        begin = int(section.windows.begin(np.array([window]))[0])
        return self._run_tokens(section, run, begin, count)

    @contextlib.contextmanager
    def _noting_damage(self) -> Iterator[None]:
        """Tell of a damaged record, once, instead of raising, where these are left out."""
        try:
            yield
        except DamagedRecordError as error:
            if not self._skip_damaged:
                raise DamagedRecordError(f"{error} Or leave it out: --skip_damaged.") from error
            if str(error) not in self.damaged:
                self.damaged.add(str(error))
                _LOG.warning("%s It is left out, record %d so far.", error, len(self.damaged))

    def counted(self, samples: np.ndarray) -> np.ndarray:
        """The labels that count, as of `Dataset`."""
        found = np.empty((len(samples), 2), np.int64)
        sections = np.searchsorted(self._sample_ends, samples, side="right")
        for number in np.unique(sections):
            section, here = self._sections[number], sections == number
            windows = (np.asarray(samples)[here] - section.samples) % section.windows.count
            found[here] = section.windows.counted(windows)
        return found

    def close(self) -> None:
        """Close the files."""
        self._open.cache_clear()

    def _check_ends(self, number: int, known: Described | None) -> None:
        """Check a file's first record, and the lengths of its first and last where they are
        described.
        """
        self._tokens(number, 0)
        for record in (0, known.records - 1) if known is not None else ():
            assert known is not None
            missing = known.missing if record == known.records - 1 else 0
            size = self._tokens(number, record).size
            self._check_length(self.files[number].name_of(record), size, known.per_record - missing)

    def _make_sections(self, described: "Sequence[Described | None]", stride: int | None) -> None:
        self._sections: list[_Section] = []
        self._sample_ends: list[int] = []
        number = 0
        while number < len(self.files):
            first, known = number, described[number]
            number += 1
            if known is None:
                self._add_undescribed(first, stride or self.sequence_length)
                continue
            while number < len(described) and known.is_followed_by(described[number]):
                known = described[number] or known
                number += 1
            records = sum(len(file) for file in self.files[first:number])
            labels = records * known.per_record - known.missing
            wanted = min(stride or known.stride or self.sequence_length, self.sequence_length)
            self._add_section(first, 0, 1, records, known.per_record, labels, wanted)

    @property
    def _fewest(self) -> int:
        """Labels that a text has at least."""
        return 1 if self._is_evaluated else self.sequence_length

    def _add_undescribed(self, number: int, stride: int) -> None:
        """Add the records of a file that nothing describes: all as long as the first, and the last
        may be shorter. Damaged ones are taken to be as the others.
        """
        records = len(self.files[number])
        first = self._labels(number, range(records))
        if first is None:
            raise _all_damaged(self.files[number])
        last = self._labels(number, [records - 1])
        last = first if last is None else last
        alike = records if last >= first else records - 1
        self._add_section(number, 0, alike, 1, first, first, stride)
        if alike == records:
            return
        if last >= self._fewest:
            self._add_section(number, alike, 1, 1, last, last, stride)
        else:
            _LOG.warning(
                "%s: got %d tokens; expected %d as in the records before. It is left out.",
                self.files[number].name_of(alike),
                last + 1,
                first + 1,
            )

    def _labels(self, number: int, records: Iterable[int]) -> int | None:
        """The labels of the first of some records of a file that is not damaged; None where all
        are, and those are left out.
        """
        for record in records:
            with self._noting_damage():
                return self._tokens(number, record).size - 1
        return None

    def _add_section(
        self,
        number: int,
        record: int,
        runs: int,
        per_run: int,
        per_record: int,
        labels: int,
        stride: int,
    ) -> None:
        """Add runs of so many labels that begin with a record of file `number`."""
        if labels < self._fewest:
            raise self._too_short(number, labels)
        before = self._sample_ends[-1] if self._sample_ends else 0
        records = int(self._record_ends[number]) - len(self.files[number]) + record
        windows = Windows(labels, self.sequence_length, stride)
        self._sections.append(_Section(before, records, per_run, per_record, windows))
        self._sample_ends.append(before + runs * windows.count)

    def _run_tokens(self, section: _Section, run: int, begin: int, count: int) -> np.ndarray:
        """Return up to so many tokens of a run, int64, from its token `begin` on."""
        parts: list[np.ndarray] = []
        record, offset = divmod(begin, section.per_record)
        while count > 0 and record < section.per_run:
            number, tokens = self._record(section.records + run * section.per_run + record)
            is_last = record == section.per_run - 1
            expected = section.windows.labels - record * section.per_record
            self._check_length(number, tokens.size, expected if is_last else section.per_record)
            if parts and ids_of(tokens[0]) != ids_of(parts[-1][-1]):
                raise DataError(
                    f"{number}: got first token {tokens[0]}; expected {parts[-1][-1]}, with which "
                    f"the record before ends. {DAMAGED}"
                )
            parts.append(tokens[offset + (1 if parts else 0) :][:count])
            count -= parts[-1].size
            record, offset = record + 1, 0
        return np.concatenate(parts)

    def _record(self, record: int) -> tuple[str, np.ndarray]:
        """Return what a record, counted over all files, is called, and its tokens."""
        number = int(np.searchsorted(self._record_ends, record, side="right"))
        own = record - int(self._record_ends[number]) + len(self.files[number])
        return self.files[number].name_of(own), self._tokens(number, own)

    def _check_length(self, where: str, tokens: int, labels: int) -> None:
        if tokens != labels + 1:
            raise DataError(
                f"{where}: got {tokens} tokens; expected {labels + 1}, as dataset.json or the "
                "file's first record says. Prepare the text with data/prepare.py."
            )

    def _too_short(self, number: int, labels: int) -> DataError:
        return DataError(
            f"{self.files[number].name_of(0)}: got {labels + 1} tokens; expected at least "
            f"{self.sequence_length + 1} (sequence length {self.sequence_length} and one more for "
            f"the labels). Use --sequence_length {labels}, or prepare the data again with a longer "
            "one, or more text."
        )

    def _tokens(self, number: int, record: int) -> np.ndarray:
        """Return all tokens of a record of file `number`, integers [tokens], after checking them;
        those that do not count are marked (see `masking`).
        """
        file = self.files[number]
        where = file.name_of(record)
        tokens, counts = example.decode(file.payload(self._open(file), record), where)
        if not tokens.size:
            raise self._too_short(number, -1)
        if tokens.min() < 0 or tokens.max() >= self.vocabulary_size:
            outside = tokens[(tokens < 0) | (tokens >= self.vocabulary_size)][0]
            raise DataError(
                f"{where}: got token id {outside}; expected 0 to {self.vocabulary_size - 1} "
                f"(vocabulary_size {self.vocabulary_size}). Use the vocabulary size of the "
                "tokenizer that made the data."
            )
        return tokens if counts is None else masked(tokens, counts)


def _all_damaged(file: RecordFile) -> DataError:
    return DataError(
        f"{file.path}: got records that are all damaged; expected whole ones. {DAMAGED}"
    )


def _sampled(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Which bytes name files of these sizes: file, start, size. All of them, or pieces that lie
    evenly over all files.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    if total <= SAMPLED_BYTES:
        yield from ((number, 0, size) for number, size in enumerate(sizes))
        return
    places = np.linspace(0, total - SAMPLED_PIECE, SAMPLED_BYTES // SAMPLED_PIECE).astype(np.int64)
    for place in places.tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        start = place - int(ends[number]) + sizes[number]
        yield number, start, min(SAMPLED_PIECE, sizes[number] - start)

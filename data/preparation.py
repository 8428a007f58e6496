"""Documents in, a folder of TFRecords out: whole, or not there at all.

The folder holds `train-*.tfrecord` and `validation-*.tfrecord` with their `.tfindex`,
`tokenizer.json`, `dataset.json`. Documents are shuffled, each ends with the end-of-text token, and
a split is their concatenation, cut into records of `sequence_length + 1` tokens: each begins with
the last token of the one before, so that every token is once a label. The last record is shorter
where tokens are left.
"""

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from popxl_gpt.config.bounded import read_bounded
from popxl_gpt.data import example
from popxl_gpt.data.conversations import RecordPacker, text_of
from popxl_gpt.data.description import read_info
from popxl_gpt.data.errors import DataError
from popxl_gpt.data.folders import publish, resumable_folder
from popxl_gpt.data.records import RecordWriter, flush
from popxl_gpt.data.shuffle import DocumentShuffle
from popxl_gpt.data.sources import Source
from popxl_gpt.data.tokenisation import (
    END_OF_TEXT,
    SMALLEST_VOCABULARY,
    TOKENIZER_BYTES,
    Document,
    character_tokenizer,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)

FORMAT = 2
"""Of the folder; a change makes earlier folders count as prepared from something else."""

MOST_WORKERS = 1024
"""Processes that may be asked for; each takes a hundred megabytes."""
LARGEST = {"sequence_length": 2**24, "vocabulary_size": 2**22}
"""Tokens in a sample, and in a tokenizer: far more than any has, and far less than memory."""
BUCKETS = "buckets"
_BLOCK_RECORDS = 512
_REPORT_SECONDS = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What shapes the prepared files."""

    sequence_length: int = 1024
    """Tokens per sample; a record has one more."""
    vocabulary_size: int | None = None
    """Of the tokenizer to train, tokens; None where `tokenizer` is given."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; None trains one."""
    characters: bool = False
    """Make a token of each character."""
    tokenizer_bytes: int = 64 * 2**20
    """Text that the tokenizer is trained on, from the first document on, bytes."""
    validation: float = 0.05
    """Share of the tokens that is held out, to 1 % of it: a document that is longer is cut."""
    seed: int = 0
    """Chooses the order of documents and which are held out."""
    max_bytes: int | None = None
    """Stop reading after this many bytes of text; None reads all."""
    shard_bytes: int = 256 * 2**20
    """A file takes no more records when it has reached this many bytes."""

    def __post_init__(self) -> None:
        limits = {
            "sequence_length": 1,
            "tokenizer_bytes": 1,
            "max_bytes": 1,
            "shard_bytes": 1,
            "seed": 0,
        }
        limits["vocabulary_size"] = SMALLEST_VOCABULARY
        problems = []
        for name, least in limits.items():
            value = getattr(self, name)
            most = LARGEST.get(name, 2**63 - 1)
            if value is not None and value < least:
                problems.append(f"{name}: got {value}; expected at least {least}. Raise it.")
            if value is not None and value > most:
                problems.append(f"{name}: got {value}; expected at most {most}. Lower it.")
        if not 0 <= self.validation < 1:
            problems.append(
                f"validation: got {self.validation}; expected a share from 0 to below 1, such "
                "as 0.05."
            )
        chosen = (self.vocabulary_size is not None, self.tokenizer is not None, self.characters)
        if sum(chosen) != 1:
            problems.append(
                f"tokenizer: got {'characters' if self.characters else self.tokenizer} and "
                f"vocabulary_size {self.vocabulary_size}; expected one of the two. "
                "Give --tokenizer to use one that exists, --vocabulary_size to train one."
            )
        if problems:
            raise DataError("\n".join(problems))


def prepare(
    source: Source,
    output: Path,
    settings: Settings,
    *,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = print,
) -> dict[str, Any]:
    """Prepare `source` into the folder `output` and return the content of its `dataset.json`.

    A folder that an earlier call made from the same source and settings is left as it is. Work
    happens in a hidden folder beside `output`, renamed when it is complete. A call that was stopped
    or killed leaves that folder, and the next one for the same goes on in it, to the same bytes.

    Args:
        workers: processes that tokenise; the result does not depend on it.
        overwrite: replace a folder that was prepared from something else.
        report: takes lines that say how far it is.
    Raises:
        DataError: for input that gives no data, and for a folder that must not be replaced.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise DataError(
            f"workers: got {workers}; expected 1 to {MOST_WORKERS}. Use as many as there are cores."
        )
    request = _request(source, settings)
    existing = _existing(output, request, overwrite)
    if existing is not None:
        report(f"{output} is there already, made from the same input with the same settings.")
        return existing
    work = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    with resumable_folder(output, work) as folder:
        report(f"Preparing {source.name} into {output}.")
        made = folder / "tokenizer.json"
        if not made.exists():
            tokenizer = _tokenizer(source, settings, report)
            write_text(folder / "tokenizer.new", tokenizer.to_str(pretty=True))
            os.replace(folder / "tokenizer.new", made)
        tokenizer = load_tokenizer(made)
        shuffle = _shuffled(source, settings, tokenizer, folder, workers, report)
        documents = iter(shuffle)
        end, splits = tokenizer.get_vocab()[END_OF_TEXT], {}
        padding = end if source.is_masked else None
        if settings.validation:
            wanted = round(shuffle.tokens * settings.validation)
            held_out = HeldOut(documents, wanted, None if source.is_masked else end)
            splits["validation"] = write_split("validation", held_out, folder, settings, padding)
            documents = itertools.chain(held_out.rest, documents)
        splits["train"] = write_split("train", documents, folder, settings, padding)
        info = {
            "format": FORMAT,
            "sequence_length": settings.sequence_length,
            "vocabulary_size": max(tokenizer.get_vocab().values()) + 1,
            "end_of_text": tokenizer.token_to_id(END_OF_TEXT),
            "tokenizer": "tokenizer.json",
            **({"masked": True} if source.is_masked else {}),
            "splits": splits,
            "hash": _hash(tokenizer, splits),
            "request": request,
        }
        if source.damaged:
            (path, byte), problem = next(iter(source.damaged.items()))
            info["damaged"] = len(source.damaged)
            report(
                f"{len(source.damaged)} damaged records are left out, the first at byte {byte} of "
                f"{path}: {problem}."
            )
        shutil.rmtree(folder / BUCKETS)
        write_text(folder / "dataset.json", json.dumps(info, indent=2))
        try:
            publish(folder, output, overwrite=overwrite)
        except OSError:
            # Else another call was faster with the same.
            if _existing(output, request, overwrite) is None:
                raise
    return info


def _request(source: Source, settings: Settings) -> dict[str, Any]:
    """Return what decides the result, as JSON gives it back."""
    chosen = asdict(settings)
    if settings.tokenizer is not None:
        load_tokenizer(settings.tokenizer)
        chosen["tokenizer"] = hashlib.sha256(
            read_bounded(settings.tokenizer, TOKENIZER_BYTES)
        ).hexdigest()
    request: dict[str, Any] = json.loads(
        json.dumps({"format": FORMAT, "source": source.identity, "settings": chosen})
    )
    return request


def _existing(output: Path, request: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the description of `output` if it is what is asked for; refuse to touch what may not
    be replaced.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / "dataset.json").is_file():
        raise DataError(
            f"{output}: got something not made by data/prepare.py; expected a new folder. "
            "Change --output."
        )
    try:
        info = read_info(output) or {}
    except DataError:
        if overwrite:
            return None
        raise
    if info.get("request") == request and _is_complete(output, info):
        return info
    if not overwrite:
        raise DataError(
            f"{output}: got data prepared from other input, with other settings, or changed "
            "since; expected the same or a new folder. Pass --overwrite to replace it, or choose "
            "another --output."
        )
    return None


def _is_complete(output: Path, info: dict[str, Any]) -> bool:
    sizes = {
        file["name"]: file["bytes"] for split in info["splits"].values() for file in split["files"]
    }
    paths = [(output / name, size) for name, size in sizes.items()]
    whole = all(path.is_file() and path.stat().st_size == size for path, size in paths)
    return whole and (output / "tokenizer.json").is_file()


def _tokenizer(source: Source, settings: Settings, report: Report) -> Tokenizer:
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    if settings.characters:
        tokenizer = character_tokenizer(_texts(source, settings.max_bytes))
        report(f"Made a tokenizer of {tokenizer.get_vocab_size()} characters.")
        return tokenizer
    if settings.vocabulary_size is None:
        raise AssertionError("Settings has checked that there is one of the two")
    limit = min(settings.tokenizer_bytes, settings.max_bytes or settings.tokenizer_bytes)
    tokenizer = train_tokenizer(_texts(source, limit), settings.vocabulary_size)
    report(f"Trained a tokenizer of {tokenizer.get_vocab_size()} tokens.")
    return tokenizer


def _shuffled(
    source: Source,
    settings: Settings,
    tokenizer: Tokenizer,
    folder: Path,
    workers: int,
    report: Report,
) -> DocumentShuffle:
    text_bytes = min(source.bytes, settings.max_bytes or source.bytes)
    shuffle = DocumentShuffle(folder / BUCKETS, settings.seed, text_bytes)
    if shuffle.added:
        report(f"Going on after {shuffle.added} documents of a call that was stopped.")
    every = _limited(source.documents(), settings.max_bytes)
    documents = itertools.islice(every, shuffle.added, None)
    start = reported = time.monotonic()
    for tokens in tokenise(documents, tokenizer, source.clean, workers):
        shuffle.add(tokens)
        now = time.monotonic()
        if now - reported >= _REPORT_SECONDS:
            reported = now
            report(
                f"{shuffle.documents} documents, {shuffle.tokens} tokens, "
                f"{shuffle.tokens / (now - start):.0f} a second"
            )
    return shuffle


def _limited(documents: Iterable[Document], limit: int | None) -> Iterator[Any]:
    """Yield documents until they have `limit` bytes; the last one may go beyond."""
    read = 0
    for document in documents:
        if limit is not None and read >= limit:
            return
        read += len((document if isinstance(document, str) else text_of(document)).encode())
        yield document


def _texts(source: Source, limit: int | None) -> Iterator[str]:
    """Texts to train a tokenizer on, of so many bytes."""
    for document in _limited(source.documents(), limit):
        text = document if isinstance(document, str) else text_of(document)
        yield source.clean(text) if source.clean else text


class HeldOut:
    """The first of some documents, so many tokens together, to 1 %.

    The last one is cut where it has more: its end is held out, its beginning becomes a document of
    its own in `rest`.

    Args:
        documents: uint32 [tokens] each.
        tokens: how many to hold out.
        end: the token that ends a document; None: none is cut, and a little more may be held out.
    """

    def __init__(self, documents: Iterator[np.ndarray], tokens: int, end: int | None) -> None:
        self.rest: list[np.ndarray] = []
        self._documents = documents
        self._tokens = tokens
        self._end = None if end is None else np.array([end], dtype=np.uint32)

    def __iter__(self) -> Iterator[np.ndarray]:
        wanted, slack = self._tokens, self._tokens // 100
        while wanted > slack and (document := next(self._documents, None)) is not None:
            if self._end is not None and document.size > wanted + slack:
                self.rest.append(np.concatenate([document[:-wanted], self._end]))
                document = document[-wanted:]
            wanted -= document.size
            yield document


def write_split(
    name: str,
    documents: Iterable[np.ndarray],
    folder: Path,
    settings: Settings,
    padding: int | None = None,
) -> dict[str, Any]:
    """Write one split's files, of which `settings` decide, and return its part of `dataset.json`.

    Args:
        documents: uint32 [tokens] each.
        padding: a token that fills records of conversations; None: documents are texts.
    Raises:
        DataError: texts have fewer tokens than a record, or there is no conversation.
    """
    length = settings.sequence_length
    packer: _Packer | RecordPacker = _Packer(documents, length)
    encode = example.encode
    if padding is not None:
        packer, encode = RecordPacker(documents, length, padding), example.encode_masked
    files: list[dict[str, Any]] = []
    payloads = itertools.chain.from_iterable(map(encode, packer))
    for payload in payloads:
        with RecordWriter(folder / f"{name}-{len(files):05d}.tfrecord") as writer:
            writer.write(payload)
            while (
                writer.bytes < settings.shard_bytes
                and (following := next(payloads, None)) is not None
            ):
                writer.write(following)
        facts = {"name": writer.path.name, "bytes": writer.bytes, "records": writer.records}
        files.append({**facts, "sha256": writer.sha256})
    if packer.tokens <= length and (padding is None or not files):
        raise DataError(
            f"{name}: got {packer.documents} document(s) of {packer.tokens} tokens together; "
            f"expected at least {length + 1}, one record. Give more text, a "
            "smaller --sequence_length"
            + (", or another --validation." if settings.validation else ".")
        )
    records = sum(file["records"] for file in files)
    return {
        "documents": packer.documents,
        "tokens": packer.tokens,
        "records": records,
        **({"cut": packer.cut} if isinstance(packer, RecordPacker) and packer.cut else {}),
        "files": files,
    }


class _Packer:
    """Cuts the concatenation of documents into records; iterating yields uint32 [records,
    sequence_length + 1] blocks, and one shorter record of what is left.
    """

    def __init__(self, documents: Iterable[np.ndarray], sequence_length: int) -> None:
        self.documents = 0
        self.tokens = 0
        self._source = documents
        self._sequence_length = sequence_length

    def __iter__(self) -> Iterator[np.ndarray]:
        parts: list[np.ndarray] = []
        waiting = 0
        for tokens in self._source:
            self.documents += 1
            self.tokens += tokens.size
            waiting += tokens.size
            parts.append(tokens)
            if waiting > _BLOCK_RECORDS * self._sequence_length:
                stream = np.concatenate(parts)
                yield from self._blocks(stream)
                parts = [stream[self._whole(stream) * self._sequence_length :]]
                waiting = parts[0].size
        if parts:
            stream = np.concatenate(parts)
            yield from self._blocks(stream)
            left = stream[self._whole(stream) * self._sequence_length :]
            if left.size > 1:
                yield left[None]

    def _whole(self, stream: np.ndarray) -> int:
        return max(0, (stream.size - 1) // self._sequence_length)

    def _blocks(self, stream: np.ndarray) -> Iterator[np.ndarray]:
        records = self._whole(stream)
        if not records:
            return
        windows = np.lib.stride_tricks.sliding_window_view(stream, self._sequence_length + 1)
        every = windows[:: self._sequence_length]
        for start in range(0, records, _BLOCK_RECORDS):
            yield every[start : start + _BLOCK_RECORDS]


def write_text(path: Path, text: str) -> None:
    """Write a file of text, and bring it onto the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        flush(file)


def _hash(tokenizer: Tokenizer, splits: dict[str, Any]) -> str:
    """Return one hash of the tokenizer and of every file's content, names and order."""
    facts = [hashlib.sha256(tokenizer.to_str().encode()).hexdigest()]
    facts += [
        f"{file['name']} {file['sha256']}"
        for name in sorted(splits)
        for file in splits[name]["files"]
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()

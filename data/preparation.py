"""Documents in, a folder of TFRecords out: whole, or not there at all.

The folder holds `train-*.tfrecord` and `validation-*.tfrecord` with their `.tfindex`,
`tokenizer.json`, `dataset.json`, and what stood beside the tokenizer that was given:
`tokenizer_config.json` where another token than `<|endoftext|>` ends documents or there is a
template, `chat_template.jinja`, and `generation_config.json` where several tokens end a text.
Documents are shuffled, each ends with that token, and a split is their concatenation, cut into
records of `sequence_length + 1` tokens: each begins with the last token of the one before, so that
every token is once a label. The last record is shorter where tokens are left. A `stride` is noted
in `dataset.json`: whoever reads samples to train on begins one so many tokens after the other.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.config.preparing import Preparation
from popxl_gpt.data.conversations import text_of
from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.data.shuffle import DocumentShuffle
from popxl_gpt.data.sources import Source
from popxl_gpt.data.splits import HeldOut, write_split
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.throughput import Throughput, size_of
from popxl_gpt.data.tokenisation import (
    SMALLEST_VOCABULARY,
    TOKENIZER_BYTES,
    character_tokenizer,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)
from popxl_gpt.utils.errors import DataError, io_failure
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.folders import check_replaceable, publish, resumable_folder
from popxl_gpt.utils.files.hub import tokenizer_file
from popxl_gpt.utils.files.plain import write_plain
from popxl_gpt.utils.files.whole import remove_partial
from popxl_gpt.utils.units import counted

FORMAT = 2
"""Version of the folder; a change makes earlier folders count as prepared from something else."""

MOST_WORKERS = 1024
"""Processes that may be asked for; each takes a hundred megabytes."""
LARGEST = {"sequence_length": 2**24, "vocabulary_size": 2**22}
"""Tokens in a sample, and in a tokenizer: far more than any has, and far less than memory."""
OWN = (
    r"dataset\.json|tokenizer(_config)?\.json|chat_template\.jinja|generation_config\.json|"
    r"(train|validation)-\d+\.(tfrecord|tfindex)"
)
"""Pattern of the files of a prepared folder."""
BUCKETS = "buckets"
GIVEN_BUCKETS = "given-buckets"
"""Folder of the buckets of validation documents that are given."""

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What shapes the prepared files."""

    sequence_length: int = Preparation.sequence_length
    """Tokens per sample; a record has one more."""
    vocabulary_size: int | None = None
    """Size of the tokenizer to train, tokens; None where `tokenizer` is given."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; None trains one."""
    characters: bool = False
    """Make a token of each character."""
    eos_token: str | None = None
    """The token of `tokenizer` that ends documents; None: as of `TextTokenizer`."""
    min_tokens: int | None = None
    """Documents of fewer tokens are left out; None: none is."""
    stride: int | None = None
    """Tokens from a sample to train on to the next one; None: no samples overlap."""
    tokenizer_bytes: int = Preparation.tokenizer_bytes
    """Text that the tokenizer is trained on, from the first document on, bytes."""
    validation: float = 0.05
    """Share of the tokens that is held out, to 1 % of it: a document that is longer is cut."""
    seed: int = Preparation.seed
    """Chooses the order of documents and which are held out."""
    max_bytes: int | None = None
    """Read so many bytes of text and no more; None reads all."""
    shard_bytes: int = Preparation.shard_bytes
    """A file takes no more records when it has reached this many bytes."""

    @property
    def records(self) -> dict[str, int]:
        """What `write_split` asks for."""
        return {"sequence_length": self.sequence_length, "shard_bytes": self.shard_bytes}

    def __post_init__(self) -> None:
        limits = {
            "sequence_length": 1,
            "tokenizer_bytes": 1,
            "max_bytes": 1,
            "shard_bytes": 1,
            "seed": 0,
        }
        limits |= {"vocabulary_size": SMALLEST_VOCABULARY, "min_tokens": 1, "stride": 1}
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
        if self.eos_token is not None and self.tokenizer is None:
            problems.append(
                f"eos_token: got '{self.eos_token}' without a tokenizer; expected it with one that "
                "exists, for one that is made has its own. Leave it out, or give --tokenizer."
            )
        if problems:
            raise DataError(*problems)


def prepare(
    source: Source,
    output: Path,
    settings: Settings,
    *,
    validation: Source | None = None,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = print,
) -> dict[str, Any]:
    """Prepare `source` into the folder `output` and return the content of its `dataset.json`.

    A folder that an earlier call made from the same source and settings is left as it is. Work
    happens in a hidden folder beside `output`, renamed when it is complete. A call that was stopped
    or killed, itself or a process of it, leaves that folder, and the next one for the same goes on
    in it, to the same bytes.

    Args:
        validation: what is held out, all of it; None: the share that `settings` say, of `source`.
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
    if source.is_masked and settings.stride is not None:
        raise DataError(
            f"stride: got {settings.stride} for conversations; expected text, whose samples may "
            "overlap. Leave it out."
        )
    if validation is not None and settings.validation:
        raise AssertionError("a share is held out, or what is given")
    request = _request(source, settings)
    if validation is not None:
        request["validation"] = validation.identity
    existing = _existing(output, request, overwrite)
    if existing is not None:
        report(f"{output} is there already, made from the same input with the same settings.")
        return existing
    work = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    with resumable_folder(output, work) as folder:
        report(f"Preparing {source.name} into {output}.")
        sources = [source, *([validation] if validation is not None else [])]
        tokenizer = _tokenizer_in(folder, sources, settings, report)
        job = _Job(
            settings=settings, tokenizer=tokenizer, folder=folder, workers=workers, report=report
        )
        try:
            splits = job.splits(source, validation)
        finally:  # too little text may be what is left
            left_out = source.left_out
            if validation is not None:
                left_out = left_out | validation.left_out
            for line in left_out.lines():
                report(line)
        info = {
            "format": FORMAT,
            "sequence_length": settings.sequence_length,
            "vocabulary_size": tokenizer.classes,
            "end_of_text": tokenizer.end,
            "tokenizer": "tokenizer.json",
            **({"masked": True} if source.is_masked else {}),
            **({} if settings.stride is None else {"stride": settings.stride}),
            "splits": splits,
            "hash": _hash(tokenizer, splits),
            "request": request,
        }
        info |= left_out.counts()
        for name in (BUCKETS, GIVEN_BUCKETS):
            shutil.rmtree(folder / name, ignore_errors=True)
        write_plain(folder / "dataset.json", json.dumps(info, indent=2) + "\n")
        try:
            publish(folder, output, overwrite=overwrite)
        except OSError:
            # Else another call was faster with the same.
            if _existing(output, request, overwrite) is None:
                raise
    return info


def _tokenizer_in(
    folder: Path, sources: list[Source], settings: Settings, report: Report
) -> TextTokenizer:
    """The tokenizer of a folder, which is made where it has none yet."""
    made = folder / "tokenizer.json"
    if not made.exists():
        tokenizer = _tokenizer(sources, settings, report)
        remove_partial(made)  # of a call that was killed
        tokenizer.save(folder)
    tokenizer = load_tokenizer(made)
    tokenizer.name = str(settings.tokenizer or made)
    return tokenizer


def _request(source: Source, settings: Settings) -> dict[str, Any]:
    """Return what decides the result, as JSON gives it back."""
    chosen = asdict(settings)
    del chosen["eos_token"]
    for name in ("min_tokens", "stride"):
        if chosen[name] is None:  # folders from before these settings are as asked for
            del chosen[name]
    if settings.tokenizer is not None:
        found = load_tokenizer(settings.tokenizer, settings.eos_token)
        if found.config is not None:
            chosen["end"] = found.end
        if found.first.size or found.last.size:
            chosen["around"] = [found.first.tolist(), found.last.tolist()]
        chosen["tokenizer"] = hashlib.sha256(
            read_bounded(tokenizer_file(settings.tokenizer), TOKENIZER_BYTES)
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
    except DataError as error:
        if not overwrite or io_failure(error) is not None:  # it may be whole
            raise
        info = {}
    if info.get("request") == request and _is_complete(output, info):
        return info
    if not overwrite:
        raise DataError(
            f"{output}: got data prepared from other input, with other settings, or changed "
            "since; expected the same or a new folder. Pass --overwrite to replace it, or choose "
            "another --output."
        )
    check_replaceable(output, OWN, "data/prepare.py")
    return None


def _is_complete(output: Path, info: dict[str, Any]) -> bool:
    sizes = {
        file["name"]: file["bytes"] for split in info["splits"].values() for file in split["files"]
    }
    paths = [(output / name, size) for name, size in sizes.items()]
    whole = all(path.is_file() and path.stat().st_size == size for path, size in paths)
    return whole and (output / "tokenizer.json").is_file()


def _tokenizer(sources: list[Source], settings: Settings, report: Report) -> TextTokenizer:
    """The tokenizer that is asked for. One of characters knows those that are held out, too."""
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer, settings.eos_token)
    if settings.characters:
        limits = (settings.max_bytes, None)
        texts = (_texts(source, limit) for source, limit in zip(sources, limits))
        tokenizer = character_tokenizer(itertools.chain.from_iterable(texts))
        report(f"Made a tokenizer of {tokenizer.get_vocab_size()} characters.")
        return TextTokenizer(tokenizer)
    if settings.vocabulary_size is None:
        raise AssertionError("Settings has checked that there is one of the two")
    limit = min(settings.tokenizer_bytes, settings.max_bytes or settings.tokenizer_bytes)
    tokenizer = train_tokenizer(_texts(sources[0], limit), settings.vocabulary_size)
    report(f"Trained a tokenizer of {tokenizer.get_vocab_size()} tokens.")
    return TextTokenizer(tokenizer)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is done in a folder, beside the tokenizer."""

    settings: Settings
    tokenizer: TextTokenizer
    folder: Path
    workers: int
    report: Report

    def splits(self, source: Source, validation: Source | None) -> dict[str, Any]:
        """Write all files. Returns what `dataset.json` says of each split."""
        end = self.tokenizer.end
        padding = end if source.is_masked else None
        shuffle = self._shuffled(source, self.settings.max_bytes, BUCKETS)
        documents = iter(shuffle)
        held_out: Iterable[np.ndarray] | None = None
        if validation is not None:
            held_out = iter(self._shuffled(validation, None, GIVEN_BUCKETS))
        elif self.settings.validation:
            wanted = round(shuffle.tokens * self.settings.validation)
            held_out = HeldOut(documents, wanted, None if source.is_masked else end)
        splits = {}
        if held_out is not None:
            splits["validation"] = self._write("validation", held_out, padding)
        if isinstance(held_out, HeldOut):
            documents = itertools.chain(held_out.rest, documents)
        splits["train"] = self._write("train", documents, padding)
        return splits

    def _write(
        self, name: str, documents: Iterable[np.ndarray], padding: int | None
    ) -> dict[str, Any]:
        return write_split(name, documents, self.folder, padding=padding, **self.settings.records)

    def _shuffled(self, source: Source, limit: int | None, name: str) -> DocumentShuffle:
        """A source's documents as tokens, in their order; `limit` as of `_limited`."""
        size = min(source.bytes, limit or source.bytes)
        shuffle = DocumentShuffle(self.folder / name, self.settings.seed, size)
        if shuffle.added:
            self.report(
                f"Going on after {counted(shuffle.added, 'document')} of a call that was stopped."
            )
        with Throughput(self.report, size, shuffle.tokens) as throughput:
            every = throughput.counted(_limited(source, limit))
            documents = itertools.islice(every, shuffle.added, None)
            least = self.settings.min_tokens or 0
            for tokens in tokenise(documents, self.tokenizer, source.clean, self.workers):
                shuffle.add(tokens if tokens.size >= least else tokens[:0])
                throughput.show(shuffle.documents, shuffle.tokens)
        if least and shuffle.added > shuffle.documents:
            few = counted(shuffle.added - shuffle.documents, "document")
            self.report(f"{few} left out, of fewer than {counted(least, 'token')}.")
        return shuffle


def _limited(source: Source, limit: int | None) -> Iterator[Any]:
    """Yield a source's documents until they have `limit` bytes, and no more: a text is cut there,
    at a character. A conversation, or what is still to be cleaned, is left out in place of that.
    """
    left = limit
    for document in source.documents():
        if left is not None:
            size = size_of(document)
            if size >= left:
                if isinstance(document, str) and (source.clean is None or size == left):
                    yield document.encode()[:left].decode(errors="ignore")
                return
            left -= size
        yield document


def _texts(source: Source, limit: int | None) -> Iterator[str]:
    """Texts to train a tokenizer on, of so many bytes."""
    for document in _limited(source, limit):
        text = text_of(document)
        yield source.clean(text) if source.clean else text


def _hash(tokenizer: TextTokenizer, splits: dict[str, Any]) -> str:
    """Return one hash of the tokenizer and of every file's content, names and order."""
    facts = [hashlib.sha256(tokenizer.library.to_str().encode()).hexdigest()]
    facts += [
        f"{file['name']} {file['sha256']}"
        for name in sorted(splits)
        for file in splits[name]["files"]
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()

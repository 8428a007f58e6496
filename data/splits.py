"""Splits of a prepared folder: documents, held out or not, as records of files."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data import example
from popxl_gpt.data.conversations import packed
from popxl_gpt.data.masking import ids_of
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.units import counted

_BLOCK_TOKENS = 2**19
"""Tokens that become records at once, about: each takes some fifty bytes meanwhile."""


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
    *,
    sequence_length: int,
    shard_bytes: int,
    padding: int | None = None,
) -> dict[str, Any]:
    """Write one split's files and return its part of `dataset.json`.

    Args:
        documents: uint32 [tokens] each.
        sequence_length: labels of a record.
        shard_bytes: a file takes no more records when it has reached this many bytes.
        padding: the token that ends conversations, and fills records of them; None: documents are
            texts.
    Raises:
        DataError: texts have fewer tokens than a record, or there is no conversation.
    """
    given = _Counted(documents, sequence_length + 1, padding)
    if padding is None:
        blocks = map(example.encode, _cut(given, sequence_length))
    else:
        blocks = map(example.encode_masked, packed(given, sequence_length, padding))
    files: list[dict[str, Any]] = []
    payloads = itertools.chain.from_iterable(blocks)
    for payload in payloads:
        with RecordWriter(folder / f"{name}-{len(files):05d}.tfrecord") as writer:
            writer.write(payload)
            while writer.bytes < shard_bytes and (following := next(payloads, None)) is not None:
                writer.write(following)
        facts = {"name": writer.path.name, "bytes": writer.bytes, "records": writer.records}
        files.append({**facts, "sha256": writer.sha256})
    if given.tokens <= sequence_length and (padding is None or not files):
        raise DataError(
            f"{name}: got {counted(given.documents, 'document')} of "
            f"{counted(given.tokens, 'token')} together; "
            f"expected at least {sequence_length + 1}, one record. Give more text, a "
            "smaller --sequence_length, or another --validation."
        )
    records = sum(file["records"] for file in files)
    return {
        "documents": given.documents,
        "tokens": given.tokens,
        "records": records,
        **({"cut": given.longer} if given.longer and padding is not None else {}),
        **({"ended_inside": given.ended_inside} if given.ended_inside else {}),
        "files": files,
    }


class _Counted:
    """Documents that are handed on, and what they were; `end` ends them, where they are
    conversations.
    """

    def __init__(self, documents: Iterable[np.ndarray], longest: int, end: int | None) -> None:
        self.documents = self.tokens = 0
        self.longer = 0
        """Documents of more tokens than the longest one."""
        self.ended_inside = 0
        """Conversations with the token that ends them before their last one, too."""
        self._source, self._longest, self._end = documents, longest, end

    def __iter__(self) -> Iterator[np.ndarray]:
        for tokens in self._source:
            self.documents += 1
            self.tokens += tokens.size
            self.longer += int(tokens.size > self._longest)
            if self._end is not None:
                ids = ids_of(tokens[:-1].view(np.int32))
                self.ended_inside += int((ids == self._end).any())
            yield tokens


def _cut(documents: Iterable[np.ndarray], sequence_length: int) -> Iterator[np.ndarray]:
    """Cut the concatenation of documents into records. Yields uint32 [records, sequence_length + 1]
    blocks, and one shorter record of what is left.
    """
    stream, block = np.zeros(0, np.uint32), max(1, _BLOCK_TOKENS // sequence_length)
    for part in _joined(documents, block * sequence_length):
        stream = np.concatenate([stream, part])
        end = max(0, (stream.size - 1) // sequence_length) * sequence_length
        if end:
            windows = np.lib.stride_tricks.sliding_window_view(stream, sequence_length + 1)
            records = windows[:end:sequence_length]
            for start in range(0, len(records), block):
                yield records[start : start + block]
        stream = stream[end:]
    if stream.size > 1:
        yield stream[None]


def _joined(documents: Iterable[np.ndarray], tokens: int) -> Iterator[np.ndarray]:
    """Documents as few arrays, each of so many tokens or a little more, but the last."""
    parts: list[np.ndarray] = []
    waiting = 0
    for document in documents:
        parts.append(document)
        waiting += document.size
        if waiting >= tokens:
            yield np.concatenate(parts)
            parts, waiting = [], 0
    if parts:
        yield np.concatenate(parts)

"""Splits of a prepared folder: documents, held out or not, as records of files."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data import example
from popxl_gpt.data.conversations import RecordPacker
from popxl_gpt.data.records import RecordWriter
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.units import counted

_BLOCK_RECORDS = 512


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
        padding: a token that fills records of conversations; None: documents are texts.
    Raises:
        DataError: texts have fewer tokens than a record, or there is no conversation.
    """
    packer: _Packer | RecordPacker = _Packer(documents, sequence_length)
    encode = example.encode
    if padding is not None:
        packer, encode = RecordPacker(documents, sequence_length, padding), example.encode_masked
    files: list[dict[str, Any]] = []
    payloads = itertools.chain.from_iterable(map(encode, packer))
    for payload in payloads:
        with RecordWriter(folder / f"{name}-{len(files):05d}.tfrecord") as writer:
            writer.write(payload)
            while writer.bytes < shard_bytes and (following := next(payloads, None)) is not None:
                writer.write(following)
        facts = {"name": writer.path.name, "bytes": writer.bytes, "records": writer.records}
        files.append({**facts, "sha256": writer.sha256})
    if packer.tokens <= sequence_length and (padding is None or not files):
        raise DataError(
            f"{name}: got {counted(packer.documents, 'document')} of "
            f"{counted(packer.tokens, 'token')} together; "
            f"expected at least {sequence_length + 1}, one record. Give more text, a "
            "smaller --sequence_length, or another --validation."
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

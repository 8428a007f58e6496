"""Shuffles documents that do not fit into memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.sampling import derive_key, mix

BUCKET_BYTES = 64 * 2**20
"""Aim for the size of one bucket, which is the memory the second pass takes."""

_BUFFER_BYTES = 32 * 2**20
_HEADER_WORDS = 3


class DocumentShuffle:
    """Orders documents by a seeded hash of their number: a random order that depends on nothing
    else.

    An external bucket sort: `add` scatters documents over files by their leading bits, iteration
        sorts file by file.

    Args:
        folder: where the buckets go; made here, empty again when iteration ends.
        seed: chooses the order.
        size: estimate of the bytes of all documents' tokens, four bytes each.
    """

    def __init__(self, folder: Path, seed: int, size: int) -> None:
        self.documents = 0
        self.tokens = 0
        self._key = derive_key(seed)
        self._folder = folder
        self._buckets: list[list[np.ndarray]] = [
            [] for _ in range(max(1, -(-size // BUCKET_BYTES)))
        ]
        self._buffered = 0
        self._added = 0
        folder.mkdir()

    def add(self, tokens: np.ndarray) -> None:
        """Take the next document, uint32 [tokens]; an empty one only counts for the numbering."""
        rank = int(mix(np.array(self._added), self._key))
        self._added += 1
        if not tokens.size:
            return
        self.documents += 1
        self.tokens += tokens.size
        header = np.array([rank & 0xFFFFFFFF, rank >> 32, tokens.size], dtype=np.uint32)
        self._buckets[rank * len(self._buckets) >> 64] += [header, tokens]
        self._buffered += header.nbytes + tokens.nbytes
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield all documents in the shuffled order, once."""
        self._flush()
        for number in range(len(self._buckets)):
            path = self._path(number)
            if path.exists():
                yield from _sorted_documents(np.fromfile(path, dtype=np.uint32))
                path.unlink()
        self._folder.rmdir()

    def _flush(self) -> None:
        for number, parts in enumerate(self._buckets):
            if parts:
                with open(self._path(number), "ab") as file:
                    file.write(np.concatenate(parts).tobytes())
                parts.clear()
        self._buffered = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.bucket"


def _sorted_documents(words: np.ndarray) -> list[np.ndarray]:
    documents, position = [], 0
    while position < words.size:
        low, high, length = (int(word) for word in words[position : position + _HEADER_WORDS])
        position += _HEADER_WORDS + length
        documents.append((high << 32 | low, words[position - length : position]))
    return [tokens for _, tokens in sorted(documents, key=lambda document: document[0])]

"""Shuffles documents that do not fit into memory."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data.sampling import derive_key, mix

BUCKET_BYTES = 64 * 2**20
"""Aim for the size of one bucket, which is the memory the second pass takes."""

PROGRESS = "progress.json"
_BUFFER_BYTES = 32 * 2**20
_HEADER_WORDS = 3


class DocumentShuffle:
    """Orders documents by a seeded hash of their number: a random order that depends on nothing
    else.

    An external bucket sort: `add` scatters documents over files by their leading bits, iteration
    sorts file by file. Files that an earlier object left are gone on with: `added` says after how
    many documents. The same documents, seed and size must be given then.

    Args:
        folder: where the buckets go; it stays, for whoever made its parent to remove.
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
        self.added = 0
        """Documents that were given, and are on the disk or in memory."""
        folder.mkdir(exist_ok=True)
        self._go_on()

    def add(self, tokens: np.ndarray) -> None:
        """Take the next document, uint32 [tokens]; an empty one only counts for the numbering."""
        rank = int(mix(np.array(self.added), self._key))
        self.added += 1
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
        """Yield all documents in the shuffled order."""
        self._flush()
        for number in range(len(self._buckets)):
            path = self._path(number)
            if path.exists():
                yield from _sorted_documents(np.fromfile(path, dtype=np.uint32))

    def _flush(self) -> None:
        for number, parts in enumerate(self._buckets):
            if parts:
                with open(self._path(number), "ab") as file:
                    file.write(np.concatenate(parts).tobytes())
                parts.clear()
        self._buffered = 0
        progress = {
            "added": self.added,
            "documents": self.documents,
            "tokens": self.tokens,
            "sizes": {path.name: path.stat().st_size for path in self._paths() if path.exists()},
        }
        written = self._folder / f"{PROGRESS}.new"
        written.write_text(json.dumps(progress), encoding="ascii")
        os.replace(written, self._folder / PROGRESS)

    def _go_on(self) -> None:
        """Take up what an earlier object has flushed, and forget what it wrote after that; all of
        it, where a file has less than was flushed.
        """
        progress: dict[str, Any] = {"added": 0, "documents": 0, "tokens": 0, "sizes": {}}
        path = self._folder / PROGRESS
        found = json.loads(path.read_text(encoding="ascii")) if path.exists() else progress
        sizes = {left.name: left.stat().st_size for left in self._paths() if left.exists()}
        if all(sizes.get(name, -1) >= size for name, size in found["sizes"].items()):
            progress = found
        for left in self._paths():
            if left.exists():
                os.truncate(left, progress["sizes"].get(left.name, 0))
        self.added, self.documents = progress["added"], progress["documents"]
        self.tokens = progress["tokens"]

    def _paths(self) -> list[Path]:
        return [self._path(number) for number in range(len(self._buckets))]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.bucket"


def _sorted_documents(words: np.ndarray) -> list[np.ndarray]:
    documents, position = [], 0
    while position < words.size:
        low, high, length = (int(word) for word in words[position : position + _HEADER_WORDS])
        position += _HEADER_WORDS + length
        documents.append((high << 32 | low, words[position - length : position]))
    return [tokens for _, tokens in sorted(documents, key=lambda document: document[0])]

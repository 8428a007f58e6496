"""Shuffles documents that do not fit into memory."""

import json
import shutil
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data.sampling import derive_key, mix
from popxl_gpt.utils.files.plain import append_plain
from popxl_gpt.utils.files.whole import sync, write_whole

BUCKET_BYTES = 64 * 2**20
"""Aim for the size of the last buckets. Up to twice as large, they are sorted in memory."""
MAX_BUCKETS = 256
"""Files that documents are scattered over at a time. Where buckets are larger than is aimed for,
iteration scatters each again.
"""

PROGRESS = "progress.json"
SHARE = 0.02
"""Share of the time that bringing the buckets onto the disk may take: some disks need a second for
it.
"""
_BUFFER_BYTES = 32 * 2**20
_HEADER_WORDS = 3


class DocumentShuffle:
    """Orders documents by a seeded hash of their number: a random order that depends on nothing
    else.

    An external bucket sort: `add` scatters documents over files by their leading bits, iteration
    sorts file by file, or scatters a large one again. So memory is bounded, whatever the number of
    documents: a buffer and a bucket, or one document that is larger. Files that an earlier object
    left are gone on with: `added` says after how many documents, all of which the disk has. The
    same documents, seed and size must be given then.

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
        count = min(MAX_BUCKETS, max(1, -(-size // BUCKET_BYTES)))
        self._buckets = _Buckets(folder, count)
        self._due = 0.0
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
        document = header.tobytes() + tokens.tobytes()
        number = rank * len(self._buckets.paths) >> 64
        if self._buckets.add(number, document) and time.monotonic() >= self._due:
            self._keep_progress()

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield all documents in the shuffled order."""
        self._buckets.flush()
        self._keep_progress()
        for path, ranks in self._buckets.ranked(0, 2**64):
            yield from _sorted_documents(path, *ranks)

    def _keep_progress(self) -> None:
        """Note what a later object can go on from, once the disk has the buckets: after a power
        failure a file may have its size, and zeros for what was not brought onto the disk.
        """
        began, paths = time.monotonic(), self._buckets.written()
        for path in (*paths, self._folder):
            sync(path)
        progress = {
            "added": self.added,
            "documents": self.documents,
            "tokens": self.tokens,
            "sizes": {path.name: path.stat().st_size for path in paths},
        }
        write_whole(self._folder / PROGRESS, json.dumps(progress))
        ended = time.monotonic()
        self._due = ended + (ended - began) / SHARE

    def _go_on(self) -> None:
        """Take up what an earlier object has flushed, and forget what it wrote after that; all of
        it, where a file has less than was flushed.
        """
        progress: dict[str, Any] = {"added": 0, "documents": 0, "tokens": 0, "sizes": {}}
        path = self._folder / PROGRESS
        found = json.loads(path.read_text(encoding="ascii")) if path.exists() else progress
        buckets = self._buckets.written()
        sizes = {left.name: left.stat().st_size for left in buckets}
        if all(sizes.get(name, -1) >= size for name, size in found["sizes"].items()):
            progress = found
        for left in buckets:
            with open(append_plain(left), "ab") as file:
                file.truncate(progress["sizes"].get(left.name, 0))
        self.added, self.documents = progress["added"], progress["documents"]
        self.tokens = progress["tokens"]


class _Buckets:
    """Files of a folder that documents are scattered over, through a buffer."""

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / f"{number}.bucket" for number in range(count)]
        self._waiting = [bytearray() for _ in range(count)]
        self._bytes = 0

    def add(self, number: int, document: bytes) -> bool:
        """Append a document to a file. Returns whether all that waited was written."""
        self._waiting[number] += document
        self._bytes += len(document)
        is_full = self._bytes >= _BUFFER_BYTES
        if is_full:
            self.flush()
        return is_full

    def flush(self) -> None:
        """Write what waits."""
        for documents, path in zip(self._waiting, self.paths):
            if documents:
                with open(append_plain(path), "ab") as file:
                    file.write(documents)
                documents.clear()
        self._bytes = 0

    def written(self) -> list[Path]:
        """The files that there are."""
        return [path for path in self.paths if path.exists()]

    def ranked(self, first: int, end: int) -> Iterator[tuple[Path, tuple[int, int]]]:
        """The files that there are, each with its first rank and the next one's, of all those from
        `first` to `end`.
        """
        count, span = len(self.paths), end - first
        for number, path in enumerate(self.paths):
            if path.exists():
                begin, after = (first - (-n * span // count) for n in (number, number + 1))
                yield path, (begin, after)


def _sorted_documents(path: Path, first: int, end: int) -> Iterator[np.ndarray]:
    """Yield a bucket's documents by their ranks, which are from `first` to `end`."""
    size = path.stat().st_size
    if size <= 2 * BUCKET_BYTES or end - first == 1 or _is_one_document(path, size):
        yield from _sorted_in_memory(np.fromfile(path, dtype=np.uint32))
        return
    count = min(MAX_BUCKETS, -(-size // BUCKET_BYTES), end - first)
    folder = path.with_suffix(".buckets")
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was stopped
    folder.mkdir()
    buckets = _Buckets(folder, count)
    with open(path, "rb") as file:
        while header := file.read(4 * _HEADER_WORDS):
            low, high, length = memoryview(header).cast("I")
            number = ((high << 32 | low) - first) * count // (end - first)
            buckets.add(number, header + file.read(4 * length))
    buckets.flush()
    for part, ranks in buckets.ranked(first, end):
        yield from _sorted_documents(part, *ranks)
        part.unlink()
    folder.rmdir()


def _is_one_document(path: Path, size: int) -> bool:
    header = np.fromfile(path, dtype=np.uint32, count=_HEADER_WORDS)
    return size == 4 * (_HEADER_WORDS + int(header[-1]))


def _sorted_in_memory(words: np.ndarray) -> Iterator[np.ndarray]:
    ranks, ends, position = array("Q"), array("Q"), 0
    while position < words.size:
        low, high, length = words[position : position + _HEADER_WORDS].tolist()
        position += _HEADER_WORDS + length
        ranks.append(high << 32 | low)
        ends.append(position)
    for document in np.argsort(np.frombuffer(ranks, dtype=np.uint64), kind="stable"):
        end = ends[document]
        begin = ends[document - 1] if document else 0
        yield words[begin + _HEADER_WORDS : end]

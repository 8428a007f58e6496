"""TFRecord files and their indices.

A file is a sequence of frames: the payload's length (uint64, little endian), the masked crc32c of
these eight bytes,
the payload, its masked crc32c. An index is a text file beside it, `name.tfindex`, with one line per
frame: its offset and its length, in bytes. Both are the formats of TensorFlow and of the `tfrecord`
package.
"""

import errno
import functools
import hashlib
import importlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from popxl_gpt.data.errors import DamagedRecordError
from popxl_gpt.utils.errors import DataError, unreadable
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.plain import check_plain, create_plain, open_plain, write_plain
from popxl_gpt.utils.files.whole import write_whole

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
OVERHEAD = HEADER.size + FOOTER.size
"""Bytes of a frame beyond its payload."""
SMALL_INDEX = 2**20
"""Bytes of an index that is read whatever its file can have, to say what is wrong."""
BLOCK = 64
"""Records that are read at once when all are checked."""

DAMAGED = "The file is damaged: restore it from a copy or prepare it again."


@cache
def checksum() -> Callable[..., int]:
    """crc32c of bytes, from that of those before on; loaded with the first record, for synthetic
    data needs none.
    """
    loaded: Callable[..., int] = importlib.import_module("crc32c").crc32c
    return loaded


def masked_crc(content: bytes | memoryview) -> int:
    """Return crc32c of `content`, rotated by 15 bits plus a constant, as TFRecord stores it."""
    crc = checksum()(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def index_path(path: Path) -> Path:
    """Return where the index of the TFRecord file `path` lies."""
    return path.with_suffix(".tfindex")


class RecordWriter:
    """Writes one TFRecord file and its index. Whoever gives their folder its name brings them onto
    the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = 0
        self.bytes = 0
        self._lines: list[str] = []
        self._digest = hashlib.sha256()
        self._file = open(create_plain(path), "wb")

    def write(self, payload: bytes) -> None:
        """Append one record."""
        length = struct.pack("<Q", len(payload))
        frame = b"".join(
            (length, FOOTER.pack(masked_crc(length)), payload, FOOTER.pack(masked_crc(payload)))
        )
        self._file.write(frame)
        self._digest.update(frame)
        self._lines.append(f"{self.bytes} {len(frame)}\n")
        self.records += 1
        self.bytes += len(frame)

    @property
    def sha256(self) -> str:
        """Hash of what was written so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file, and write the index."""
        self._file.close()
        write_plain(index_path(self.path), "".join(self._lines))

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


class OpenFile:
    """A file that is open for reading at any place, closed when nobody holds it any more.

    It is read, never mapped into memory: a file that shrinks meanwhile ends a program's reading
    with an error, where a mapping would end the program by a signal.

    Args:
        size: in bytes, and `written`, when it was last written to, in nanoseconds: as they were
            when the program looked first.
    Raises:
        DataError: the file cannot be read, or was written to since then.
    """

    def __init__(self, path: Path, size: int, written: int) -> None:
        self.path = path
        self.size = size
        self.written = written
        try:
            self._number = open_plain(path)
        except OSError as error:
            raise unreadable(path, error) from error
        self.check()

    def check(self) -> None:
        """DataError where the file was written to."""
        found = self._status()
        if found.st_size != self.size:
            raise self._changed(found.st_size)
        if found.st_mtime_ns != self.written:
            raise DataError(
                f"{self.path}: got a file that was written to after it was opened; expected it to "
                "stay as it was. If its contents are what they were, start again; else restore it "
                "first."
            )

    def read(self, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` on."""
        try:
            content = os.pread(self._number, size, start)
            while len(content) < size and (
                more := os.pread(self._number, size - len(content), start + len(content))
            ):
                content += more
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(content) < size:
            raise self._changed(self._status().st_size)
        return content

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._number)
        except OSError as error:  # of a file system over a network
            raise unreadable(self.path, error) from error

    def _changed(self, size: int) -> DataError:
        return DataError(
            f"{self.path}: got {size} bytes; expected the {self.size} it had when it was opened. "
            "Another program changed the file: restore it and start again when that has finished."
        )

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._number)


class RecordFile:
    """One TFRecord file: where its records lie, and access to each in O(1).

    Opening reads the index, or the frames' headers where there is none.

    Args:
        records: how many the file has, where that is known: then it is opened when one of them is
            first needed.
    Raises:
        DataError: if the file is missing, empty or unreadable, ends within a record, or its index
            does not fit it.
    """

    def __init__(self, path: Path, records: int | None = None) -> None:
        self.path = path
        try:
            found = check_plain(path)
            self.size, self._written = found.st_size, found.st_mtime_ns
            self.has_index = index_path(path).exists()
            if self.has_index:
                check_plain(index_path(path))
        except OSError as error:
            raise unreadable(Path(error.filename or path), error) from error
        if self.size == 0:
            raise DataError(
                f"{path}: got an empty file; expected TFRecords. Remove it or prepare it again."
            )
        self._records = records
        if records is None:
            self._records = len(self.offsets) - 1

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [records + 1]: where each record starts, and the file's size, in bytes."""
        offsets = self._read_index() if self.has_index else None
        found = _scan(self.path, self.open()) if offsets is None else offsets
        if self.has_index and offsets is None:
            raise DataError(
                f"{index_path(self.path)}: got an index that does not fit; expected "
                f"{len(found) - 1} records in {self.size} bytes. Restore {self.path.name} if "
                "records are missing; if it is whole, delete the index."
            )
        if self._records is not None and len(found) - 1 != self._records:
            raise DataError(
                f"{self.path}: got {len(found) - 1} records; expected the {self._records} that "
                "dataset.json beside it says. Restore the file from a copy or prepare it again."
            )
        return found

    def _read_index(self) -> np.ndarray | None:
        """Return int64 [records + 1] offsets in bytes, or None if the index does not fit."""
        path, records = index_path(self.path), self._records or self.size // OVERHEAD
        limit = max(SMALL_INDEX, records * (2 * len(str(self.size)) + len(" \r\n")))
        try:
            content = read_bounded(path, limit)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise unreadable(path, error) from error
            raise DataError(
                f"{path}: got an index of more than {limit} bytes; expected no more, for "
                f"{self.path.name} has {self.size} bytes, and so at most {records} records. "
                f"Restore {self.path.name} if records are missing; if it is whole, delete the "
                "index."
            ) from error
        return _offsets(content, self.size)

    def __len__(self) -> int:
        assert self._records is not None
        return self._records

    def check(self) -> None:
        """Open the index, or find the records; raises as the constructor does."""
        len(self.offsets)

    def open(self) -> OpenFile:
        """Open the file; DataError if it was written to."""
        return OpenFile(self.path, self.size, self._written)

    def name_of(self, record: int) -> str:
        """What errors call a record."""
        return f"{self.path}, record {record}"

    def payload(self, file: OpenFile, record: int) -> memoryview:
        """Return record `record` of this file, open as `file`, after checking both its
        checksums, and that the file is as it was.
        """
        file.check()
        start, end = int(self.offsets[record]), int(self.offsets[record + 1])
        return _checked_payload(self.name_of(record), file.read(start, end - start), start)

    def damaged(self) -> Iterator[DamagedRecordError]:
        """Check both checksums of every record, and yield the error of each that is wrong."""
        file, offsets = self.open(), self.offsets.tolist()
        for first in range(0, len(self), BLOCK):
            begin, *ends = offsets[first : first + BLOCK + 1]
            block, start = memoryview(file.read(begin, ends[-1] - begin)), begin
            for record, end in enumerate(ends, first):
                try:
                    _checked_payload(
                        self.name_of(record), block[start - begin : end - begin], start
                    )
                except DamagedRecordError as error:
                    yield error
                start = end
        file.check()

    def save_index(self) -> None:
        """Write the index beside the file, unless it is there or the folder does not take it."""
        if self.has_index:
            return
        starts, lengths = self.offsets[:-1], np.diff(self.offsets)
        text = "".join(f"{start} {length}\n" for start, length in zip(starts, lengths))
        # An index only saves time at the next start: a read-only folder or a full disk can do
        # without.
        with suppress(OSError):
            write_whole(index_path(self.path), text, is_lasting=False)


def _checked_payload(where: str, frame: bytes | memoryview, start: int) -> memoryview:
    """Return the payload of a frame that begins at byte `start` of its file."""
    length = _checked_length(where, frame, start)
    if length != len(frame) - OVERHEAD:
        raise DataError(
            f"{where}: got a record of {length} bytes; expected the {len(frame) - OVERHEAD} that "
            "its index says. The index is of another file: delete the .tfindex file, it is made "
            "again."
        )
    payload = memoryview(frame)[HEADER.size : -FOOTER.size]
    (expected,) = FOOTER.unpack_from(frame, len(frame) - FOOTER.size)
    got = masked_crc(payload)
    if got != expected:
        raise DamagedRecordError(
            f"{where}: got data with checksum {got:#010x} at byte {start}; expected "
            f"{expected:#010x}. {DAMAGED}"
        )
    return payload


def _checked_length(where: str, frame: bytes | memoryview, start: int) -> int:
    """Return the length in bytes of the payload whose frame begins with these bytes."""
    length: int
    length, expected = HEADER.unpack_from(frame)
    got = masked_crc(frame[:8])
    if got != expected:
        raise DamagedRecordError(
            f"{where}: got a length with checksum {got:#010x} at byte {start}; expected "
            f"{expected:#010x}. The file is damaged or no TFRecord file: "
            "restore it from a copy or prepare it again; data/prepare.py makes one of text."
        )
    return length


def _scan(path: Path, file: OpenFile) -> np.ndarray:
    """Find the records from their headers. Returns int64 [records + 1] in bytes."""
    offsets, start, size = [0], 0, file.size
    while start < size:
        where = f"{path}, record {len(offsets) - 1}"
        end = start + HEADER.size
        if end <= size:
            end = start + OVERHEAD + _checked_length(where, file.read(start, HEADER.size), start)
        if end > size:
            raise DataError(
                f"{where}: got {size - start} bytes before the file ends; expected {end - start} "
                "or more. The file was cut off: restore it from a copy or prepare it again."
            )
        offsets.append(end)
        start = end
    return np.array(offsets, dtype=np.int64)


def _offsets(index: bytes, size: int) -> np.ndarray | None:
    """Return int64 [records + 1] offsets in bytes, or None if an index does not fit a file of
    `size` bytes.
    """
    try:
        spans = np.array(index.split(), dtype="S20").astype(np.int64).reshape(-1, 2)
    except (ValueError, OverflowError):
        return None
    offsets = np.append(spans[:, 0], size)
    if len(spans) and not 0 <= spans.min() <= spans.max() <= size:
        return None
    fits = len(spans) > 0 and offsets[0] == 0 and np.array_equal(np.diff(offsets), spans[:, 1])
    return offsets if fits and spans[:, 1].min() >= OVERHEAD else None

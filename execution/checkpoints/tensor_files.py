"""Files of tensors (safetensors), piece by piece: never mapped, so that one that shrinks is an
error in words; written with their checksums at one go, while other threads run.

A file is the length of its header (uint64, little endian), the header (JSON: each tensor's type,
shape and place), and the tensors' bytes. Source: github.com/huggingface/safetensors, section
"Format".
"""

import hashlib
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data.records import checksum
from popxl_gpt.utils.files.bounded import parse_json, shown
from popxl_gpt.utils.files.plain import create_plain, open_plain
from popxl_gpt.utils.files.whole import sync

HEADER_BYTES = 100_000_000
"""The most that a header may have, as for the format's own readers."""
TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
"""Types that numpy has; others are only named in errors."""
BFLOAT16 = "BF16"
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
SIZES = {**{name: np.dtype(kind).itemsize for name, kind in TYPES.items()}, BFLOAT16: 2}
"""Bytes of an element of the types that are read."""
AXES = 64
"""The most that a tensor may have, as numpy's."""
_PIECE = 2**22
_BLOCK = 2**26
"""Bytes of the rows that are copied at a time."""
_ALIGNMENT = 8
"""Bytes, of the widest type."""


class TensorFileError(ValueError):
    """A file that is not as it was written. The message begins with the tensor that it is about, if
    there is one.
    """


@dataclass(frozen=True)
class Entry:
    """A tensor's place in its file."""

    type: str
    shape: "tuple[int, ...]"
    begin: int
    """Bytes from the file's beginning."""
    end: int


def read_tensors(path: Path) -> "dict[str, np.ndarray]":
    """Every tensor of a file, by name.

    Raises:
        OSError: the file cannot be read.
        TensorFileError: it is no whole safetensors file, or has a tensor of a type that numpy has
            not.
    """
    with open(open_plain(path), "rb", buffering=0) as file:
        return {
            name: _array(file.fileno(), name, entry)
            for name, entry in _entries(file.fileno()).items()
        }


def write_tensors(
    tensors: "dict[str, np.ndarray]",
    path: Path,
    metadata: "dict[str, str] | None" = None,
    is_bfloat16: bool = False,
) -> "dict[str, Any]":
    """Write a file of tensors, to the disk. OSError where it cannot be written.

    Returns what a checkpoint's description has of it: its bytes, their SHA-256, and crc32c of each
    tensor's.

    Each tensor's bytes begin where its type wants them to: the widest types come first, and the
    header is padded with blanks.

    Args:
        is_bfloat16: they are the bits of such, as uint16.
    """
    kinds = {
        name: (BFLOAT16 if is_bfloat16 else NAMES[array.dtype], array.shape)
        for name, array in tensors.items()
    }
    head, entries = _laid_out(kinds, metadata)
    digest, checksums = hashlib.sha256(head), {}
    with open(create_plain(path), "wb", buffering=_PIECE) as file:
        file.write(head)
        for name in entries:
            crc = 0
            for piece in _pieces(tensors[name]):
                digest.update(piece)
                crc = checksum()(piece, crc)
                file.write(piece)
            checksums[name] = crc
        sync(file)
    size = max((entry.end for entry in entries.values()), default=len(head))
    return {"bytes": size, "sha256": digest.hexdigest(), "tensors": checksums}


class TensorWriter:
    """A new file of tensors that are written one by one, in any order; as `write_tensors` makes it.
    After the block it is on the disk.

    Args:
        kinds: type and shape of each tensor that it is to have.
    """

    def __init__(
        self,
        path: Path,
        kinds: "Mapping[str, tuple[str, tuple[int, ...]]]",
        metadata: "dict[str, str] | None" = None,
    ):
        head, self._entries = _laid_out(kinds, metadata)
        self._file = open(create_plain(path), "wb", buffering=0)
        self._file.write(head)

    def write(
        self, name: str, array: np.ndarray, converted: "Callable[[np.ndarray], np.ndarray] | None"
    ) -> None:
        """Put a tensor's bytes into their place.

        Args:
            converted: gives some rows as they are in the file, bfloat16 as its bits, uint16; none:
                as they are.
        """
        entry = self._entries[name]
        assert array.shape == entry.shape, name
        self._file.seek(entry.begin)
        for piece in _pieces(array, converted):
            while piece:
                piece = piece[self._file.write(piece) or 0 :]
        assert self._file.tell() == entry.end, name

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._file:
            if kind is None:
                sync(self._file)


def _laid_out(
    kinds: "Mapping[str, tuple[str, tuple[int, ...]]]", metadata: "dict[str, str] | None"
) -> "tuple[bytes, dict[str, Entry]]":
    """What a file begins with, and the place of each tensor, in order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    entries, end = {}, 0
    for name in sorted(kinds, key=lambda name: (-SIZES[kinds[name][0]], name)):
        (kind, shape), begin = kinds[name], end
        end += SIZES[kind] * math.prod(shape)
        entries[name] = Entry(kind, tuple(shape), begin, end)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    return head, {
        name: replace(entry, begin=len(head) + entry.begin, end=len(head) + entry.end)
        for name, entry in entries.items()
    }


def _pieces(
    array: np.ndarray, converted: "Callable[[np.ndarray], np.ndarray] | None" = None
) -> "Iterator[memoryview]":
    """The bytes of a tensor in order. Of one that lies otherwise, or is converted, a few rows at a
    time are copied.
    """
    blocks = [array]
    if array.ndim and (converted is not None or not array.flags.c_contiguous):
        rows = max(1, _BLOCK * len(array) // max(1, array.nbytes))
        blocks = [array[i : i + rows] for i in range(0, len(array), rows)]
    for block in blocks:
        found = block if converted is None else converted(block)
        content = memoryview(np.ascontiguousarray(found).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        for place in range(0, len(content), _PIECE):
            yield content[place : place + _PIECE]


def tensor_entries(path: Path) -> "dict[str, Entry]":
    """Every tensor's place in a file, by name; raises as `read_tensors`."""
    with open(open_plain(path), "rb", buffering=0) as file:
        return _entries(file.fileno())


def read_tensor(path: Path, name: str, entry: Entry) -> np.ndarray:
    """One tensor of a file, bfloat16 as float32; raises as `read_tensors`."""
    with open(open_plain(path), "rb", buffering=0) as file:
        if entry.type != BFLOAT16:
            return _array(file.fileno(), name, entry)
        wide = np.empty(entry.shape, np.uint32)
        flat, bits = wide.reshape(-1), np.empty(_PIECE // 2, np.uint16)
        for begin in range(0, flat.size, bits.size):
            place, part = entry.begin + 2 * begin, flat[begin : begin + bits.size]
            _fill(file.fileno(), name, bits[: part.size], place)
            np.left_shift(bits[: part.size], 16, out=part, dtype=np.uint32)
        return wide.view(np.float32)


def damaged_tensors(path: Path, checksums: "dict[str, int]", nbytes: int) -> "list[str]":
    """Names of the tensors whose bytes are not those that were saved; none where the damage is in
    the header.

    Args:
        nbytes: the file's size when it was saved; no more of it is read.
    """
    with open(open_plain(path), "rb", buffering=0) as file:
        number = file.fileno()
        try:
            entries = _entries(number, whole=False)
        except TensorFileError:
            return []
        size = min(nbytes, os.fstat(number).st_size)
        return [
            name
            for name, expected in checksums.items()
            if name in entries
            and (entries[name].end > size or _crc(number, entries[name]) != expected)
        ]


def _entries(number: int, whole: bool = True) -> "dict[str, Entry]":
    size = os.fstat(number).st_size
    begin = os.pread(number, 8, 0)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
    if not 2 <= length <= min(HEADER_BYTES, size - 8):
        raise TensorFileError(
            f"got a header of {length} bytes in {size}; expected a safetensors file"
        )
    try:
        header = parse_json(os.pread(number, length, 8), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        found = {name: _entry(name, value, 8 + length) for name, value in header.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        if isinstance(error, TensorFileError):
            raise
        raise TensorFileError(
            "got a header that is no description of tensors; expected a safetensors file"
        ) from error
    place = 8 + length
    for name, entry in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != place:
            raise TensorFileError(
                f"{shown(name)}: got bytes from {entry.begin} on; expected {place}"
            )
        place = entry.end
    if whole and place != size:
        raise TensorFileError(f"got {size} bytes; expected {place} for the tensors of its header")
    return found


def _unique(pairs: "list[tuple[str, Any]]") -> "dict[str, Any]":
    """An object of a header, whose names are each there once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise TensorFileError(f"{shown(twice)}: got the name twice; expected once")
    return found


def _entry(name: str, value: "dict[str, Any]", start: int) -> Entry:
    (begin, end), shape, kind = value["data_offsets"], value["shape"], value["dtype"]
    if not isinstance(shape, list):
        raise TypeError
    if len(shape) > AXES:
        raise TensorFileError(f"{shown(name)}: got {len(shape)} axes; expected at most {AXES}")
    shape = tuple(shape)
    numbers = (begin, end, *shape)
    if not isinstance(kind, str) or not all(
        type(number) is int and 0 <= number < 2**63 for number in numbers
    ):
        raise TensorFileError(
            f"{shown(name)}: got a place or a shape that is none; expected whole numbers"
        )
    if begin > end or (kind in SIZES and not _takes(shape, SIZES[kind], end - begin)):
        raise TensorFileError(
            f"{shown(name)}: got {end - begin} bytes for {shown(kind)} of shape {shown(shape)}; "
            "expected what it takes"
        )
    return Entry(kind, shape, start + begin, start + end)


def _takes(shape: "tuple[int, ...]", size: int, nbytes: int) -> bool:
    """Whether elements of so many bytes and of a shape take `nbytes`."""
    product = size * math.prod(max(axis, 1) for axis in shape)
    # numpy has no larger one, nor an empty
    return product < 2**63 and nbytes == (0 if 0 in shape else product)


def _array(number: int, name: str, entry: Entry) -> np.ndarray:
    if entry.type not in TYPES:
        raise TensorFileError(
            f"{shown(name)}: got {shown(entry.type)}; expected float32 or float16"
        )
    array: np.ndarray = np.empty(entry.shape, TYPES[entry.type])
    _fill(number, name, array.reshape(-1), entry.begin)
    return array


def _fill(number: int, name: str, flat: np.ndarray, place: int) -> None:
    """Read so many bytes as an array has, from a place on."""
    left, end = memoryview(flat.view(np.uint8)), place + flat.nbytes  # type: ignore[arg-type]
    while left:
        count = os.preadv(number, [left[:_PIECE]], place)
        if not count:
            raise TensorFileError(f"{shown(name)}: got an end at byte {place}; expected {end}")
        left, place = left[count:], place + count


def _crc(number: int, entry: Entry) -> int:
    crc, place = 0, entry.begin
    while place < entry.end:
        piece = os.pread(number, min(_PIECE, entry.end - place), place)
        if not piece:
            return -1
        crc, place = checksum()(piece, crc), place + len(piece)
    return crc

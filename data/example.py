"""The one kind of record that we write and read: a protobuf `Example` with a list of integers,
`input_ids`, and where not every token counts as a label, a list `loss_mask`, 1 for those that do.

    Example  { Features features = 1; }
    Features { map<string, Feature> feature = 1; }
    Feature  { oneof { BytesList bytes_list = 1; FloatList float_list = 2;
                       Int64List int64_list = 3; } }
    Int64List{ repeated int64 value = 1; }      packed, or one field per value

Source: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

import numpy as np

from popxl_gpt.data.masking import ids_of
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.files.bounded import shown

FEATURE = "input_ids"
MASK = "loss_mask"
MAXIMUM_ID = 2**31 - 1
LARGEST_RECORD = 2**27
"""Bytes of a record: the longest sequences that preparation makes have fewer."""
FEATURES, PARTS, UNPACKED = 1000, 10, 2**18
"""The most that is read: features of an Example, fields of one, values that are not packed. Each
takes a microsecond, of which a record of two bytes each would hold millions.
"""
_BLOCK = 2**20
"""Bytes whose values are found at once, which takes fifty times as much memory."""

SHOWN = 20
"""Features that a message names."""
_KINDS = {1: "bytes", 2: "float", 3: "int64"}
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_NEW_TEXT = (
    f"Expected an Example with an int64 feature '{FEATURE}'. Prepare the text with data/prepare.py."
)


def encode(tokens: np.ndarray) -> list[bytes]:
    """Return one serialised Example per row of `tokens`, [records, tokens], ids from 0 to
    `MAXIMUM_ID`.
    """
    return [_example({FEATURE: ids}) for ids in _packed(tokens)]


def encode_masked(tokens: np.ndarray) -> list[bytes]:
    """The same for tokens of which some are marked (see `masking`), int32: with a mask."""
    packed = zip(_packed(ids_of(tokens)), _packed(tokens >= 0))
    return [_example({FEATURE: ids, MASK: mask}) for ids, mask in packed]


def _packed(tokens: np.ndarray) -> list[bytes]:
    """Each row as packed varints."""
    values = tokens.astype(np.uint32)
    places = np.arange(5, dtype=np.uint32)
    # [records, tokens], bytes
    sizes = 1 + np.sum([values >= 1 << bits for bits in (7, 14, 21, 28)], axis=0)
    groups = (values[..., None] >> (7 * places)).astype(np.uint8) & np.uint8(0x7F)
    groups |= np.where(places + 1 < sizes[..., None], np.uint8(0x80), np.uint8(0))
    packed = groups[places < sizes[..., None]].tobytes()
    ends = np.cumsum(sizes.sum(axis=1))
    starts = ends - sizes.sum(axis=1)
    return [packed[start:end] for start, end in zip(starts, ends)]


def decode(payload: memoryview, where: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids of one serialised Example, int64 [tokens], and which count as labels, bool
    [tokens]; None where all do. `where` names the record in errors.
    """
    if len(payload) > LARGEST_RECORD:
        raise DataError(
            f"{where}: got a record of {len(payload)} bytes; expected at most {LARGEST_RECORD}. "
            "Write the text in several."
        )
    try:
        features = dict(_features(payload))
        if FEATURE in features:
            ids = _integers(features[FEATURE], FEATURE, where)
            if MASK not in features:
                return ids, None
            mask = _integers(features[MASK], MASK, where)
            if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
                raise DataError(
                    f"{where}: got a feature '{MASK}' that is not 0 or 1 for each of {ids.size} "
                    f"tokens. {_NEW_TEXT}"
                )
            return ids, mask == 1
    except (IndexError, UnicodeDecodeError, _MalformedError) as error:
        raise DataError(f"{where}: got bytes that are no protobuf Example. {_NEW_TEXT}") from error
    names = ", ".join(f"'{shown(name)}'" for name in sorted(features)[:SHOWN]) or "none"
    names += f" and {len(features) - SHOWN} more" if len(features) > SHOWN else ""
    raise DataError(f"{where}: got no feature '{FEATURE}' (features found: {names}). {_NEW_TEXT}")


def _integers(feature: memoryview, name: str, where: str) -> np.ndarray:
    """The integers of a feature, int64."""
    for kind, content in _fields(feature, PARTS):
        if kind != 3:
            raise DataError(
                f"{where}: got feature '{name}' of type {_KINDS.get(kind, kind)}. {_NEW_TEXT}"
            )
        return _int64_list(content)
    return np.zeros(0, dtype=np.int64)


class _MalformedError(Exception):
    """Bytes that are no protobuf message."""


def _example(features: dict[str, bytes]) -> bytes:
    entries = b"".join(
        _message(1, _message(1, name.encode()) + _message(2, _message(3, _message(1, packed))))
        for name, packed in features.items()
    )
    return _message(1, entries)


def _message(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _features(payload: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yield name and Feature message of every feature of an Example."""
    for number, features in _fields(payload, PARTS):
        for map_number, entry in _fields(features if number == 1 else memoryview(b""), FEATURES):
            parts = dict(_fields(entry, PARTS)) if map_number == 1 else {}
            if 1 in parts:
                yield bytes(parts[1]).decode(), parts.get(2, memoryview(b""))


def _fields(message: memoryview, most: int) -> Iterator[tuple[int, memoryview]]:
    """Yield number and raw content of each field of a message (a varint's own bytes for a varint
    field), of which there may be so many.
    """
    position = count = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        wire = tag & 7
        if wire == _LENGTH:
            length, position = _read_varint(message, position)
            end = position + length
        elif wire == _VARINT:
            _, end = _read_varint(message, position)
        elif wire in (_FIXED32, _FIXED64):
            end = position + (4 if wire == _FIXED32 else 8)
        else:
            raise _MalformedError
        count += 1
        if end > len(message) or count > most:
            raise _MalformedError
        yield tag >> 3, message[position:end]
        position = end


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = message[position + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, position + place + 1
    raise _MalformedError


def _int64_list(message: memoryview) -> np.ndarray:
    # One packed field, or one varint field per value: both are varints after the tags.
    parts = [content for number, content in _fields(message, UNPACKED) if number == 1]
    raw = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype=np.uint8)
    if raw.size == 0:
        return np.zeros(0, dtype=np.int64)
    if raw[-1] >= 0x80:
        raise _MalformedError
    found = np.zeros(np.count_nonzero(raw < 0x80), dtype=np.uint64)
    begin = done = 0
    while begin < raw.size:
        block = raw[begin : begin + _BLOCK]
        ends = np.flatnonzero(block < 0x80)
        starts = np.append(0, ends[:-1] + 1)
        sizes = ends - starts + 1
        if not ends.size or sizes.max() > 10:
            raise _MalformedError
        values = found[done : done + ends.size]
        for place in range(sizes.max()):
            longer = np.flatnonzero(sizes > place)
            values[longer] |= (block[starts[longer] + place] & np.uint8(0x7F)).astype(
                np.uint64
            ) << np.uint64(7 * place)
        begin, done = begin + int(ends[-1]) + 1, done + ends.size
    return found.view(np.int64)

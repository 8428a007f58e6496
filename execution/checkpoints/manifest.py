"""`checkpoint.json`: what a checkpoint says about itself, under a checksum of its own, believed
only when all is right.

The file is JSON whose first entry is the SHA-256 of everything after that entry's line: `tail -n +3
checkpoint.json | sha256sum` gives it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from popxl_gpt.utils.errors import first_line
from popxl_gpt.utils.files.bounded import parse_json, read_bounded, shown

FORMAT = 2
FORMATS = (1, 2)
"""Formats that are read. The first has no checksum of the description, no checksums of tensors, no
metric lines.
"""
LARGEST_FILE = 2**26
"""Bytes of a description; one of a thousand layers has less than two million."""
LARGEST_STEP = 2**63 - 1
_BEGIN = re.compile(rb'\{\n "sha256": "([0-9a-f]{64})",\n')
_HASH = re.compile(r"[0-9a-f]{64}")
_SIZES = ("layers", "hidden_size", "heads", "vocabulary_size", "sequence_length")

Check = Callable[[str, Any], object]
"""Raises ManifestError where the value of a name is another than it may be."""


class ManifestError(ValueError):
    """A description that is not as it was written. The message says what was found and what was
    expected.
    """


def manifest_text(values: Mapping[str, Any]) -> str:
    """The text of a description with its checksum."""
    rest = json.dumps(values, indent=1).removeprefix("{\n")
    return f'{{\n "sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}'


def read_manifest(path: Path) -> "dict[str, Any]":
    """A description whose checksum is right and whose values have their types and ranges.

    Raises:
        OSError: it cannot be read.
        ManifestError: it is damaged, or was changed.
    """
    content = read_bounded(path, LARGEST_FILE)
    begin = _BEGIN.match(content)
    if begin is not None:
        digest = hashlib.sha256(content[begin.end() :]).hexdigest()
        if digest != begin[1].decode():
            raise ManifestError(
                f"got a description with SHA-256 {digest[:12]}; expected {begin[1].decode()[:12]}"
            )
    try:
        values = parse_json(content, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ManifestError(
            f"got no JSON ({first_line(error)}); expected the JSON that saving wrote"
        ) from error
    values = _object("", values)
    version = values.get("format")
    if type(version) is int and version not in FORMATS and begin is not None:
        return values  # of another version, which says what is in it
    _whole(1, FORMATS[-1])("format", version)
    if version != 1 and begin is None:
        raise ManifestError("got a description without its checksum; expected one at its beginning")
    _CHECK("", values)
    if "schedule" in values:
        _schedule(values["step"])("schedule", values["schedule"])
    return values


def is_loss(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that float32 holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e39


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _object(name: str, value: Any) -> "dict[str, Any]":
    if not isinstance(value, dict):
        raise _odd(name, value, "values by name")
    return value


def _that(is_right: "Callable[[Any], bool]", expected: str) -> Check:
    """A value of a kind."""

    def check(name: str, value: Any) -> None:
        if not is_right(value):
            raise _odd(name, value, expected)

    return check


def _whole(low: int, high: int) -> Check:
    """A whole number in a range."""
    expected = f"a whole number from {low} to {high}"
    return _that(lambda value: type(value) is int and low <= value <= high, expected)


def _fields(
    required: "Mapping[str, Check]", optional: "Mapping[str, Check] | None" = None
) -> Check:
    """Values by name, of which some must be there."""
    checks = {**required, **(optional or {})}

    def check(name: str, value: Any) -> None:
        found = _object(name, value)
        for field, is_right in checks.items():
            if field in required or field in found:
                is_right(f"{name}.{field}" if name else field, found.get(field))

    return check


def _each(is_right: Check) -> Check:
    """Values of a kind, whatever their names."""

    def check(name: str, value: Any) -> None:
        for field, each in _object(name, value).items():
            is_right(f"{name}.{shown(field)}", each)

    return check


def _seeds(name: str, value: Any) -> None:
    """Seeds of replicas: rows of two numbers of 32 bits."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise _odd(name, value, "pairs of whole numbers")
        for number in row:
            _whole(0, 2**32 - 1)(name, number)


def _tokens(name: str, value: Any) -> None:
    for token in value if isinstance(value, list) else [value]:
        _SIZE_OR_ZERO(name, token)


def _schedule(step: int) -> Check:
    """What a run that ends by the clock, and is in its decay, has of it."""
    ends = {"begin": _whole(0, step), "end": _whole(step, LARGEST_STEP)}
    return _fields({**ends, "seconds": _NUMBER, "rate": _NUMBER})


_SIZE, _SIZE_OR_ZERO, _STEP = _whole(1, 2**63 - 1), _whole(0, 2**63 - 1), _whole(0, LARGEST_STEP)
_COUNT = _whole(0, 2**127)
_NUMBER = _that(lambda n: type(n) is float and 0 <= n < 1e39, "a number of 0 or more")
_TEXT = _that(lambda value: isinstance(value, str), "a text")
_DIGEST = _that(
    lambda value: isinstance(value, str) and _HASH.fullmatch(value) is not None,
    "64 hexadecimal digits",
)
_IF_ANY = {
    name: lambda where, value: value is None or _SIZE(where, value)
    for name in ("max_positions", "feed_forward_size")
}
_CHECK = _fields(
    {
        "step": _STEP,
        "data": _fields({"fingerprint": _TEXT}, {"samples": _COUNT, "tokens": _COUNT}),
        "seed": _seeds,
        "files": _each(
            _fields(
                {"bytes": _SIZE_OR_ZERO, "sha256": _DIGEST},
                {"tensors": _each(_whole(0, 2**32 - 1))},
            )
        ),
        "config": _fields(
            {
                "model": _fields(dict.fromkeys(_SIZES, _SIZE), _IF_ANY),
                "training": _fields({"global_batch_size": _SIZE}),
                "execution": _object,
            }
        ),
    },
    {
        "rounding_seed": _seeds,
        "weights_only": _that(lambda value: isinstance(value, bool), "true or false"),
        "special_tokens": _each(_tokens),
        "bfloat16": _that(
            lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
            "names of weights",
        ),
        "metrics": _STEP,
        "validation_loss": _that(is_loss, "a number"),
        "validation_fingerprint": _TEXT,
        "elapsed": _NUMBER,
    },
)


def _odd(name: str, value: Any, expected: str) -> ManifestError:
    shown = "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
    return ManifestError(f"got {shown}{f' for {name}' if name else ''}; expected {expected}")

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
    if (
        isinstance(version, int)
        and not isinstance(version, bool)
        and version not in FORMATS
        and begin is not None
    ):
        return values  # of another version, which says what is in it
    _whole("format", version, 1, FORMATS[-1])
    if version != 1 and begin is None:
        raise ManifestError("got a description without its checksum; expected one at its beginning")
    for name, check in _CHECKS.items():
        check(name, values.get(name))
    _check_sections(values)
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _object(name: str, value: Any) -> "dict[str, Any]":
    if not isinstance(value, dict):
        raise _odd(name, value, "values by name")
    return value


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _odd(name, value, f"a whole number from {low} to {high}")
    return value


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _odd(name, value, "a text")


def _data(name: str, value: Any) -> None:
    entries = _object(name, value)
    _text(f"{name}.fingerprint", entries.get("fingerprint"))
    for count in ("samples", "tokens"):
        if count in entries:
            _whole(f"{name}.{count}", entries[count], 0, 2**127)


def _seeds(name: str, value: Any) -> None:
    """Seeds of replicas: rows of two numbers of 32 bits."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise _odd(name, value, "pairs of whole numbers")
        for number in row:
            _whole(name, number, 0, 2**32 - 1)


def _files(name: str, value: Any) -> None:
    for file, entry in _object(name, value).items():
        where = f"{name}.{shown(file)}"
        _whole(f"{where}.bytes", _object(where, entry).get("bytes"), 0, 2**63 - 1)
        digest = entry.get("sha256")
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            raise _odd(f"{where}.sha256", digest, "64 hexadecimal digits")
        for tensor, checksum in _object(f"{where}.tensors", entry.get("tensors", {})).items():
            _whole(f"{where}.tensors.{shown(tensor)}", checksum, 0, 2**32 - 1)


def _special_tokens(name: str, value: Any) -> None:
    for kind, tokens in _object(name, value).items():
        for token in tokens if isinstance(tokens, list) else [tokens]:
            _whole(f"{name}.{shown(kind)}", token, 0, 2**63 - 1)


def _schedule(values: "dict[str, Any]", step: int) -> None:
    """Of a run that ends by the clock, and is in its decay."""
    _whole("schedule.begin", values.get("begin"), 0, step)
    _whole("schedule.end", values.get("end"), step, LARGEST_STEP)
    for name in ("seconds", "rate"):
        number = values.get(name)
        if type(number) is not float or not 0 <= number < 1e39:
            raise _odd(f"schedule.{name}", number, "a number of 0 or more")


def is_loss(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that float32 holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e39


def _check_sections(values: "dict[str, Any]") -> None:
    config = _object("config", values.get("config"))
    for section in ("model", "training", "execution"):
        _object(f"config.{section}", config.get(section))
    for name in _SIZES:
        _whole(f"config.model.{name}", config["model"].get(name), 1, 2**63 - 1)
    for name in ("max_positions", "feed_forward_size"):
        if config["model"].get(name) is not None:
            _whole(f"config.model.{name}", config["model"][name], 1, 2**63 - 1)
    _whole(
        "config.training.global_batch_size",
        config["training"].get("global_batch_size"),
        1,
        2**63 - 1,
    )
    if "rounding_seed" in values:
        _seeds("rounding_seed", values["rounding_seed"])
    if not isinstance(values.get("weights_only", False), bool):
        raise _odd("weights_only", values["weights_only"], "true or false")
    _special_tokens("special_tokens", values.get("special_tokens", {}))
    if "metrics" in values:
        _whole("metrics", values["metrics"], 0, LARGEST_STEP)
    if "schedule" in values:
        _schedule(_object("schedule", values["schedule"]), values["step"])
    loss = values.get("validation_loss", 0.0)
    if not is_loss(loss):
        raise _odd("validation_loss", loss, "a number")
    if "validation_fingerprint" in values:
        _text("validation_fingerprint", values["validation_fingerprint"])


_CHECKS: "dict[str, Callable[[str, Any], object]]" = {
    "step": lambda name, value: _whole(name, value, 0, LARGEST_STEP),
    "data": _data,
    "seed": _seeds,
    "files": _files,
}


def _odd(name: str, value: Any, expected: str) -> ManifestError:
    shown = "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
    return ManifestError(f"got {shown}{f' for {name}' if name else ''}; expected {expected}")

"""`dataset.json`: what preparation says about the files beside it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.config.bounded import read_bounded
from popxl_gpt.data.errors import DataError
from popxl_gpt.data.records import unreadable

INFO_BYTES = 2**24
"""Of a dataset.json."""


def read_info(folder: Path) -> dict[str, Any] | None:
    """Return what `dataset.json` in `folder` says, None if there is none."""
    path = folder / "dataset.json"
    try:
        info: dict[str, Any] = json.loads(read_bounded(path, INFO_BYTES))
        _check_info(info)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}: got no valid description; expected the JSON of data/prepare.py. Prepare "
            "again with --overwrite."
        ) from error
    return info


def tokenizer_of(folder: Path, info: dict[str, Any] | None) -> Path | None:
    """The tokenizer that `dataset.json` in `folder` names, where its file is there."""
    name = (info or {}).get("tokenizer")
    path = folder / name if isinstance(name, str) else None
    return path if path is not None and path.is_file() else None


def _check_info(info: Any) -> None:
    """Raise TypeError, KeyError or ValueError where a description has another structure or
    impossible numbers.
    """
    splits = info.get("splits", {}) if isinstance(info, dict) else None
    if not isinstance(splits, dict) or not all(
        isinstance(split, dict) for split in splits.values()
    ):
        raise TypeError
    counts = [
        info["vocabulary_size"],
        *(info[name] for name in ("sequence_length",) if name in info),
    ]
    for split in splits.values():
        counts += [split[name] for name in ("documents", "tokens", "records") if name in split]
        if not isinstance(split["files"], list):
            raise TypeError
        for file in split["files"]:
            if not isinstance(file["name"], str) or not isinstance(file.get("sha256", ""), str):
                raise TypeError
            counts += [file["bytes"], file["records"]]
        if "records" in split and split["records"] != sum(
            file["records"] for file in split["files"]
        ):
            raise ValueError
    if not all(type(count) is int and 0 < count < 2**63 for count in counts):
        raise TypeError


@dataclass(frozen=True, slots=True)
class Described:
    """What `dataset.json` says of a file that it lists."""

    folder: Path
    split: str
    number: int
    """Of the file in its split."""
    records: int
    per_record: int
    """Labels of a record."""
    missing: int
    """Labels that the file's last record has fewer."""

    def is_followed_by(self, other: "Described | None") -> bool:
        """Whether the text of this file goes on in another."""
        return other is not None and (other.folder, other.split, other.number) == (
            self.folder,
            self.split,
            self.number + 1,
        )


def describe(path: Path, info: dict[str, Any] | None) -> Described | None:
    """What preparation says of a file; None where it says nothing, or of another size, see
    `check_size`.
    """
    for split, facts in (info or {}).get("splits", {}).items():
        files = facts["files"]
        for number, file in enumerate(files):
            if file["name"] != path.name or "sequence_length" not in (info or {}):
                continue
            if not path.is_file() or file["bytes"] != path.stat().st_size:
                return None
            if (info or {}).get("masked"):
                return None  # no record goes on where the one before ends
            per_record: int = (info or {})["sequence_length"]
            missing = 0
            if number == len(files) - 1 and {"records", "tokens"} <= facts.keys():
                # before format 2 what did not fill a record was left out
                missing = max(0, facts["records"] * per_record - (facts["tokens"] - 1))
            return Described(path.parent, split, number, file["records"], per_record, missing)
    return None


def check_size(path: Path, size: int, info: dict[str, Any] | None) -> None:
    """Raise DataError where a file that is whole has another size than preparation says."""
    for facts in (info or {}).get("splits", {}).values():
        for file in facts["files"]:
            if file["name"] == path.name and file["bytes"] != size:
                raise DataError(
                    f"{path}: got {size} bytes; expected the {file['bytes']} that dataset.json "
                    "beside it says. The file was replaced or cut off: restore it from a copy or "
                    "prepare it again. If it is right, take it out of dataset.json."
                )

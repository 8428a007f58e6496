"""What the `dataset.json` of preparation says of a file beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.data.errors import DataError


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

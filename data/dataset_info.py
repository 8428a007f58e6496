"""`dataset.json`: what preparation says about a folder of token files, and the settings that follow
from it.
"""

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.files.bounded import read_object
from popxl_gpt.utils.files.plain import is_folder
from popxl_gpt.utils.texts import path_text, text_of_path, user_path

INFO_BYTES = 2**24
"""Largest size of a dataset.json."""
NO_DESCRIPTION = (
    "got no valid description; expected the JSON of data/prepare.py. Prepare again with "
    "--overwrite."
)


def read_info(folder: Path) -> dict[str, Any] | None:
    """What `dataset.json` in a folder says, None if there is none.

    Raises:
        DataError: it cannot be read, or is no such description.
    """
    path = folder / "dataset.json"
    info = read_object(path, INFO_BYTES, NO_DESCRIPTION)
    try:
        if info is not None:
            _check_info(info)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {NO_DESCRIPTION}") from error
    return info


def tokenizer_of(folder: Path, info: dict[str, Any] | None) -> Path | None:
    """The tokenizer that `dataset.json` in `folder` names, where its file is there."""
    name = (info or {}).get("tokenizer")
    path = folder / name if isinstance(name, str) else None
    return path if path is not None and path.is_file() else None


def _check_info(info: dict[str, Any]) -> None:
    """Raise TypeError, KeyError or ValueError where a description has another structure or
    impossible numbers.
    """
    splits = info.get("splits", {})
    if not isinstance(splits, dict) or not all(
        isinstance(split, dict) for split in splits.values()
    ):
        raise TypeError
    counts = [
        info["vocabulary_size"],
        *(info[name] for name in ("sequence_length", "stride") if name in info),
    ]
    names = [info["tokenizer"]] if isinstance(info.get("tokenizer"), str) else []
    for split in splits.values():
        counts += [split[name] for name in ("documents", "tokens", "records") if name in split]
        if not isinstance(split["files"], list):
            raise TypeError
        for file in split["files"]:
            if not isinstance(file["name"], str) or not isinstance(file.get("sha256", ""), str):
                raise TypeError
            names.append(file["name"])
            counts += [file["bytes"], file["records"]]
        if "records" in split and split["records"] != sum(
            file["records"] for file in split["files"]
        ):
            raise ValueError
    if not all(type(count) is int and 0 < count < 2**63 for count in counts):
        raise TypeError
    for name in names:
        path_text(f"./{name}")  # ValueError where no file can have the name


@dataclass(frozen=True, slots=True)
class Described:
    """What `dataset.json` says of a file that it lists."""

    folder: Path
    split: str
    number: int
    """Number of the file in its split."""
    records: int
    per_record: int
    """Labels of a record."""
    missing: int
    """Labels that the file's last record has fewer."""
    stride: int | None
    """Tokens from one sample to the next, where samples are to overlap."""

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
    info = info or {}
    # of conversations no record goes on where the one before ends
    is_one_text = "sequence_length" in info and not info.get("masked")
    for split, facts in info.get("splits", {}).items() if is_one_text else ():
        files = facts["files"]
        for number, file in enumerate(files):
            if file["name"] != path.name:
                continue
            if not path.is_file() or file["bytes"] != path.stat().st_size:
                return None
            per_record, missing = info["sequence_length"], 0
            if number == len(files) - 1 and {"records", "tokens"} <= facts.keys():
                # before format 2 what did not fill a record was left out
                missing = max(0, facts["records"] * per_record - (facts["tokens"] - 1))
            stride = info.get("stride") if split == "train" else None
            records = file["records"]
            return Described(path.parent, split, number, records, per_record, missing, stride)
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


def split_files(folder: Path, split: str) -> str:
    """Pattern of the token files of a prepared folder: training or validation."""
    return f"{glob.escape(text_of_path(folder))}/{split}-*.tfrecord"


def training_files(name: str) -> str:
    """Pattern of the token files to train on of an entry of a mixture, which is a folder or such a
    pattern.
    """
    path = user_path("--mix", name)
    return split_files(path, "train") if path.is_dir() else name


def implied_settings(flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """What a run takes from prepared folders that are given as its data: their files for training
    and, unless others are given, those for validation, the tokenizer and its vocabulary, and where
    documents are kept apart, the token that ends one. A run that begins with the weights of a model
    keeps that model's tokenizer and vocabulary. Data of a flag take the place of those of the file.

    Args:
        flags: values by the names of settings.
        file: the same, of the file that they change; a preset is none.
    Raises:
        DataError: a folder's description cannot be read.
    """
    replaced = _replaced(flags, file)
    given = {**file, **replaced, **flags}
    inputs, mixed = _texts(given.get("input_files")), _texts(given.get("mix"))
    names = (*inputs, *(entry.rpartition("=")[0] for entry in mixed))
    found = {name: _prepared(user_path("input files", name)) for name in names}
    prepared = {name: pair for name, pair in found.items() if pair is not None}
    if not prepared:
        return replaced
    implied: dict[str, Any] = {}
    held_out = [folder for folder, info in prepared.values() if "validation" in info["splits"]]
    if held_out:
        implied["validation_files"] = tuple(split_files(path, "validation") for path in held_out)
    folder, info = next(iter(prepared.values()))
    if not given.get("init_from"):
        implied["vocabulary_size"] = info["vocabulary_size"]
        tokenizer = tokenizer_of(folder, info)
        if tokenizer is not None and not info.get("masked"):
            implied["tokenizer"] = text_of_path(tokenizer)
    if given.get("document_attention") is True and "end_of_text" in info:
        implied["end_of_text"] = info["end_of_text"]
    kept = {name for name, value in file.items() if value}
    if flags.keys() & {"input_files", "mix"}:
        kept.discard("validation_files")  # of other data
    implied = {name: value for name, value in implied.items() if name not in flags.keys() | kept}
    if inputs:
        implied["input_files"] = tuple(
            split_files(prepared[name][0], "train") if name in prepared else name for name in inputs
        )
    return {**replaced, **implied}


def _replaced(flags: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """What of a file gives way to a flag that says the same in another way: empty."""
    other = {"input_files": "mix", "mix": "input_files"}
    gone = {other[name] for name in other.keys() & flags.keys() if flags[name]}
    return {name: () for name in gone - flags.keys() if file.get(name)}


def _texts(value: Any) -> tuple[str, ...]:
    """A setting that is a list of texts; of any other value nothing, which is refused later."""
    is_list = isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    return tuple(value) if is_list else ()


def _prepared(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """A folder that has files to train on, and its description; None for any other path."""
    info = read_info(folder) if is_folder(folder) else None
    return (folder, info) if info is not None and "train" in info.get("splits", {}) else None

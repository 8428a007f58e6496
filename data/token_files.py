"""Which token files a user means, and what the `dataset.json` beside them says."""

import glob
import logging
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from popxl_gpt.data.dataset_info import read_info, split_files
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.files.plain import names_in
from popxl_gpt.utils.texts import user_path

_LOG = logging.getLogger(__name__)


def find_files(
    patterns: str | Path | Sequence[str | Path], *, of_all_splits: bool = False
) -> list[Path]:
    """Return the files that paths, folders (their `*.tfrecord`) and globs stand for, each once,
    ordered by name.

    The indices beside the files, which a wide glob matches too (here or in a shell), are left out.

    Args:
        of_all_splits: a folder may have files to train on and files that are held out.
    Raises:
        DataError: if a pattern matches nothing, or a folder has files of both kinds.
    """
    found: set[Path] = set()
    several = [patterns] if isinstance(patterns, (str, Path)) else patterns
    for pattern in several:
        path = user_path("input files", pattern)
        if path.suffix == ".tfindex" and path.with_suffix(".tfrecord") in map(Path, several):
            continue
        if path.is_dir():
            matches = [path / name for name in names_in(path) if name.endswith(".tfrecord")]
            if not of_all_splits:
                _check_one_split(path, matches)
        else:
            globbed = (Path(name) for name in glob.glob(str(path), recursive=True))
            named = [path] if path.exists() else globbed
            matches = [name for name in named if name.suffix != ".tfindex"]
        if not matches:
            raise DataError(
                f"input files: got '{pattern}', which matches no file; expected TFRecord files. "
                "Check the path, or make them with data/prepare.py."
            )
        found.update(matches)
    return sorted(found, key=lambda path: (path.name, str(path)))


def _check_one_split(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder whose held-out files would be taken together with the others."""
    splits = {name for name in ("train", "validation") for f in files if f.match(f"{name}-*")}
    if len(splits) > 1:
        raise DataError(
            f"input files: got '{folder}', which has files to train on and files to validate on; "
            f"expected one of them. Give {quote(split_files(folder, 'train'))} or "
            f"{quote(split_files(folder, 'validation'))}."
        )


def read_infos(paths: list[Path], vocabulary_size: int) -> dict[Path, dict[str, Any] | None]:
    """What `dataset.json` says in each of the files' folders."""
    infos = {folder: read_info(folder) for folder in dict.fromkeys(path.parent for path in paths)}
    for folder, info in infos.items():
        if info is not None and info["vocabulary_size"] > vocabulary_size:
            raise DataError(
                f"{folder / 'dataset.json'}: got data with vocabulary_size "
                f"{info['vocabulary_size']}; expected at most the model's, {vocabulary_size}. "
                f"Give --vocabulary_size {info['vocabulary_size']}."
            )
        if info is not None:
            _tell_of_lost_files(folder, info, paths)
    return infos


def _tell_of_lost_files(folder: Path, info: dict[str, Any], paths: Sequence[Path]) -> None:
    """Say so where files are gone that `dataset.json` lists together with some of these."""
    here = {path.name for path in paths if path.parent == folder}
    for split in info.get("splits", {}).values():
        listed = [file["name"] for file in split["files"]]
        lost = [name for name in listed if name not in here and not (folder / name).exists()]
        if lost and here.intersection(listed):
            _LOG.warning(
                "%s: got a description of %d files, of which %d are not there, the first %s; "
                "expected all. Going on without their text: restore them, or prepare again.",
                folder / "dataset.json", len(listed), len(lost), lost[0],
            )  # fmt: skip

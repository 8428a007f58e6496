"""What is known of training data before they are read, by the descriptions beside their files."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset_info import read_info, tokenizer_of, training_files
from popxl_gpt.data.records import RecordFile
from popxl_gpt.data.token_files import find_files
from popxl_gpt.utils.files.plain import real_path

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """The data, as `dataset.json` beside them has it."""

    tokens: int
    vocabulary_size: int
    tokenizer: str | None = None
    validation_files: tuple[str, ...] = ()


def text_of(config: Config) -> Text | None:
    """What is known of the training data beside their files; None for random tokens, or where
    nothing is. A mixture has as many tokens as are read until a source of it was seen once. What is
    trained on is not held out, which is told.

    Raises:
        UserError: a file is not there, or damaged; a description is damaged.
    """
    mixed = config.data.mixed()
    parts: list[tuple[tuple[str, ...], float]]
    parts = [((training_files(name),), weight) for name, weight in mixed.items()]
    if config.data.input_files:
        parts = [(config.data.input_files, 1.0)]
    whole, tokens = math.fsum(weight for _, weight in parts), math.inf
    found: dict[Path, dict[str, Any]] = {}
    seen: set[Path] = set()
    for patterns, weight in parts:
        paths = find_files(patterns)
        own = _descriptions(paths)
        trained = [_tokens(info, _names(paths, folder)) for folder, info in own.items()]
        if None in trained:
            return None
        tokens = min(tokens, math.fsum(filter(None, trained)) * whole / weight)
        found |= own
        seen |= {real_path(path) for path in paths}
    if not found:
        return None
    if config.data.input_files and config.data.train_samples is not None:
        tokens = min(tokens, config.data.train_samples * config.model.sequence_length)
    held_out = [path for each in found for path in sorted(each.glob("validation-*.tfrecord"))]
    unseen = [path for path in held_out if real_path(path) not in seen]
    if len(unseen) < len(held_out):
        _LOG.warning(
            "input files: got files that data/prepare.py has held out in %s; expected "
            "train-*.tfrecord. They are trained on, and not validated on: give the folder.",
            next(path for path in held_out if real_path(path) in seen).parent,
        )
    folder, info = next(iter(found.items()))
    tokenizer = tokenizer_of(folder, info)
    return Text(
        tokens=int(tokens),
        vocabulary_size=max(info["vocabulary_size"] for info in found.values()),
        tokenizer=None if tokenizer is None else str(tokenizer),
        validation_files=tuple(map(str, unseen)),
    )


def _names(paths: Sequence[Path], folder: Path) -> set[str]:
    return {path.name for path in paths if path.parent == folder}


def _tokens(info: Mapping[str, Any], names: set[str]) -> float | None:
    """Tokens of files, by their records' share of those of their split; None where that is not
    told of all splits.
    """
    tokens = 0.0
    for split in info.get("splits", {}).values():
        records = {file["name"]: file["records"] for file in split["files"]}
        own = sum(records[name] for name in names & records.keys())
        if own and "tokens" not in split:
            return None
        tokens += split.get("tokens", 0) * own / sum(records.values()) if own else 0
    return tokens or None


def _descriptions(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """What is said of the folders of files, nothing of one without a description. The files are
    refused now, not after the trials.
    """
    for path in paths:
        RecordFile(path).check()
    return {folder: read_info(folder) or {} for folder in dict.fromkeys(p.parent for p in paths)}

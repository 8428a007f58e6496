"""What is known of training data before they are read, by the descriptions beside their files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset_info import read_info, tokenizer_of, training_files
from popxl_gpt.data.records import RecordFile
from popxl_gpt.data.token_files import find_files


@dataclass(frozen=True)
class Text:
    """The data, as `dataset.json` beside them has it."""

    tokens: int
    vocabulary_size: int
    tokenizer: str | None = None
    validation_files: tuple[str, ...] = ()


def text_of(config: Config) -> Text | None:
    """What is known of the training data beside their files; None for random tokens, or where
    nothing is. A mixture has as many tokens as are read until a source of it was seen once.
    """
    mixed = config.data.mixed()
    parts: list[tuple[tuple[str, ...], float]]
    parts = [((training_files(name),), weight) for name, weight in mixed.items()]
    if config.data.input_files:
        parts = [(config.data.input_files, 1.0)]
    whole, tokens = math.fsum(weight for _, weight in parts), math.inf
    found: dict[Path, dict[str, Any]] = {}
    for patterns, weight in parts:
        own = _descriptions(find_files(patterns))
        trained = [info.get("splits", {}).get("train", {}).get("tokens") for info in own.values()]
        if None in trained:
            return None
        tokens = min(tokens, sum(trained) * whole / weight)
        found |= own
    if not found:
        return None
    folder, info = next(iter(found.items()))
    tokenizer = tokenizer_of(folder, info)
    return Text(
        tokens=int(tokens),
        vocabulary_size=max(info["vocabulary_size"] for info in found.values()),
        tokenizer=None if tokenizer is None else str(tokenizer),
        validation_files=tuple(
            str(path) for folder in found for path in sorted(folder.glob("validation-*.tfrecord"))
        ),
    )


def _descriptions(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """What is said of the folders of files, nothing of one without a description. The files are
    refused now, not after the trials.
    """
    for path in paths:
        RecordFile(path).check()
    return {folder: read_info(folder) or {} for folder in dict.fromkeys(p.parent for p in paths)}

"""Settings: where the tokens come from."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from popxl_gpt.config.bounds import Count, PathText
from popxl_gpt.config.held_out import VALIDATION
from popxl_gpt.config.rules import rule
from popxl_gpt.utils.texts import shown_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The origin of the tokens."""

    input_files: tuple[PathText, ...] = ()
    """TFRecord files to train on, as paths or glob patterns; none: synthetic data. A folder that
    data/prepare.py made gives its tokenizer, vocabulary_size and validation_files, too, and with
    document_attention end_of_text.
    """
    mix: tuple[str, ...] = ()
    """Data to train on in place of input_files, as FOLDER=WEIGHT: a folder that data/prepare.py
    made, or a glob pattern of TFRecord files, and how much of the samples is of it.
    """
    validation_files: Annotated[
        tuple[PathText, ...], replace(VALIDATION, effect="validates nothing")
    ] = ()
    """TFRecord files to validate on, as paths or glob patterns."""
    train_samples: Count | None = None
    """Samples of input_files that are trained on, the first ones, over and over, to overfit on
    purpose; none: all.
    """
    skip_damaged: bool = False
    """Leave out what is in records of TFRecord files whose checksum is wrong, and name each in the
    log.
    """
    tokenizer: PathText | None = None
    """Tokenizer file (JSON of the tokenizers package) that made the tokens; used to show text that
    the model writes.
    """

    @property
    def is_synthetic(self) -> bool:
        """Whether tokens are random."""
        return not self.input_files and not self.mix

    def mixed(self) -> dict[str, float]:
        """Weights of what is mixed, by folder or pattern; ValueError names a wrong entry."""
        found: dict[str, float] = {}
        for entry in self.mix:
            name, _, text = entry.rpartition("=")
            try:
                weight = float(text)
            except ValueError:
                weight = math.nan
            if not (name and 0 < weight < math.inf) or name in found:
                raise ValueError(entry)
            found[name] = weight
        return found


@rule
def _weights(mix: tuple[str, ...]) -> str | None:
    try:
        Data(mix=mix).mixed()
    except ValueError as error:
        return (
            f"mix: got {shown_text(str(error))}; expected FOLDER=WEIGHT, a number above 0, each "
            "folder once, such as data/files/code=0.7. Correct it."
        )
    return None


RULES = (
    rule(
        lambda mix, input_files: (
            mix
            and input_files
            and "mix: got some while there are input_files; expected one of the two. Leave one out."
        )
    ),
    _weights,
    rule(
        lambda train_samples, input_files: (
            train_samples is not None
            and not input_files
            and f"train_samples: got {train_samples} while input_files is empty; expected files. "
            "Give --input_files, or leave it out."
        )
    ),
)

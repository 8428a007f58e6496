"""Settings: validation on data that are held out."""

from dataclasses import dataclass
from typing import Annotated, Literal

from popxl_gpt.config.bounds import Count, CountOrZero, Needs, SameNumbers
from popxl_gpt.config.rules import rule

VALIDATION = Needs("validate_every", "--validate_every", lambda value: value > 0)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What is validated, and when."""

    validate_every: SameNumbers[CountOrZero] = 0
    """Steps between validations; 0: never."""
    validation_batches: SameNumbers[Annotated[Count | Literal["all"], VALIDATION]] = 8
    """Global batches per validation, always the same ones, of samples spread over all of the
    validation data; all: every token once. Data that fit into them are read whole.
    """
    validate_first: SameNumbers[bool] = False
    """Validate before the first step, too."""
    validate_training: SameNumbers[bool] = False
    """Measure as many samples of the training data with each validation, in the same way."""


RULES = (
    rule(
        lambda validation_files, input_files, mix: (
            validation_files
            and not (input_files or mix)
            and "validation_files: got files while input_files is empty; expected both or none, "
            "for synthetic data is validated on synthetic data. Give --input_files."
        )
    ),
    rule(
        lambda validation_batches, validate_every, input_files, mix: (
            validation_batches == "all"
            and validate_every
            and not (input_files or mix)
            and "validation_batches: got all while input_files is empty; expected a number, for "
            "synthetic data has no end. Use 8."
        )
    ),
    rule(
        lambda validate_first, validate_every: (
            validate_first
            and not validate_every
            and "validate_first: got true while validate_every is 0; expected steps between "
            "validations. Give --validate_every."
        )
    ),
    rule(
        lambda validate_training, validate_every: (
            validate_training
            and not validate_every
            and "validate_training: got true while validate_every is 0; expected steps between "
            "validations. Give --validate_every."
        )
    ),
    rule(
        lambda validate_every, input_files, mix, validation_files: (
            validate_every
            and (input_files or mix)
            and not validation_files
            and "validation_files: got none; expected files, for validate_every is "
            f"{validate_every}. Give --validation_files or use --validate_every 0."
        )
    ),
)

"""`config.json` of Hugging Face's models: ours from theirs, and theirs from ours."""

import json
from pathlib import Path
from typing import Any

from popxl_gpt.config.presets import from_mapping
from popxl_gpt.config.schema import Model
from popxl_gpt.data.special_tokens import BEGIN, END, as_list
from popxl_gpt.execution.exchange.families.family import Family, TheirConfig, Values
from popxl_gpt.execution.exchange.families.known import FAMILIES
from popxl_gpt.execution.exchange.families.unknown import refuse_unknown
from popxl_gpt.utils.errors import UserError

QUANTIZED = "quantization_config"
"""Says how transformers quantizes the weights when it loads them, be they floats in their files."""


def family_in(file: Path, values: Values) -> Family:
    """The family that a configuration names. UserError for one that is not known, and where another
    setting says that the model is none of it.
    """
    refuse_unknown(TheirConfig(file, values))
    found = values.get("model_type")
    family = FAMILIES.get(found) if isinstance(found, str) else None
    if family is None:
        raise UserError(
            f"{file}: got model_type {json.dumps(found)}; expected one of {', '.join(FAMILIES)}, "
            "the architectures that are known here. Convert one of these."
        )
    return family


def model_in(file: Path, values: Values) -> Model:
    """Our configuration of a model; `sequence_length` is the number of its positions. UserError
    where it is another architecture.
    """
    family = family_in(file, values)
    if values.get(QUANTIZED) is not None:
        raise UserError(
            f"{file}: got {QUANTIZED}; expected a model whose weights are floats. Load it with "
            "transformers, call its dequantize() and save it with save_pretrained; or take the "
            "entry out if the weights were never quantized."
        )
    theirs = TheirConfig(file, values)
    for name, expected in family.fixed.items():
        theirs.expect(name, theirs.get(name, expected[0]), expected)
    settings = {n: v for n, v in family.settings.items() if n in Model.__dataclass_fields__}
    sizes = {ours: theirs.get(*place) for ours, place in family.sizes.items()}
    rest = {"end_of_text": _end_of_text(values, sizes["vocabulary_size"]), **family.read(theirs)}
    try:
        return from_mapping({"model": {**settings, **sizes, **rest}}).model
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def special_tokens_in(values: Values, vocabulary: Any) -> "dict[str, int | list[int]]":
    """The tokens that texts begin and end with, by their names: one, or a list of several. What is
    no token is left out.
    """

    def is_token(value: Any) -> bool:
        return type(value) is int and type(vocabulary) is int and 0 <= value < vocabulary

    found: dict[str, int | list[int]] = {}
    for name in (BEGIN, END):
        value: Any = values.get(name)
        if is_token(value) or (isinstance(value, list) and value and all(map(is_token, value))):
            found[name] = value
    return found


def _end_of_text(values: Values, vocabulary: Any) -> int:
    """The token that ends documents, the first of several; 0 where none does."""
    ends = special_tokens_in(values, vocabulary).get(END)
    return next(iter(as_list(ends)), 0)


def config_of(
    model: Model,
    family: Family,
    kind: str,
    begin: "int | list[int] | None",
    end: "int | list[int] | None",
) -> Values:
    """Their configuration of a model of ours.

    Args:
        kind: type of the weights.
        begin, end: the tokens that texts begin and end with, one or several, which transformers has
            defaults for.
    """
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{name: expected[0] for name, expected in family.fixed.items()},
        **{theirs: getattr(model, ours) for ours, (theirs, _) in family.sizes.items()},
        BEGIN: begin,
        END: end,
        "pad_token_id": None,  # a default may be beyond the vocabulary, or a word
        "torch_dtype": kind,
        family.sizes["sequence_length"][0]: model.positions,
        **family.write(model),
    }

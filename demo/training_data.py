"""The data that a run trains on, and validates with, as its configuration names them."""

from typing import Any

import popdist
from tokenizers import Tokenizer

from popxl_gpt.config import Config, UserError
from popxl_gpt.config.dataset_info import split_files
from popxl_gpt.config.texts import user_path
from popxl_gpt.data import Dataset, MixedDataset, SyntheticDataset, TokenDataset
from popxl_gpt.demo.text import check_made_by, read_tokenizer
from popxl_gpt.execution.checkpoint import SavedRun
from popxl_gpt.execution.checkpoint_folder import TOKENIZER


def open_data(config: Config) -> "tuple[Dataset, Dataset | None]":
    """Training and validation data; without files, random tokens."""
    sequence, vocabulary = config.model.sequence_length, config.model.vocabulary_size
    if config.data.is_synthetic:
        seed = config.training.seed
        return SyntheticDataset(sequence, vocabulary, seed), SyntheticDataset(
            sequence, vocabulary, seed + 1
        )
    validation = config.data.validation_files
    options: dict[str, Any] = {
        "instance": popdist.getInstanceIndex(),
        "instances": popdist.getNumInstances(),
        "skip_damaged": config.data.skip_damaged,
    }
    data = _training_data(config, options)
    return (
        data,
        TokenDataset(validation, sequence, vocabulary, stride=sequence, **options)
        if validation
        else None,
    )


def _training_data(config: Config, options: "dict[str, Any]") -> Dataset:
    """The files to train on, or a mixture of some; those that the settings fit."""
    sequence, vocabulary = config.model.sequence_length, config.model.vocabulary_size
    mixed = config.data.mixed()
    parts = (
        [(config.data.input_files, 1.0)]
        if not mixed
        else [
            ((split_files(path, "train") if path.is_dir() else name,), weight)
            for name, weight in mixed.items()
            for path in [user_path("--mix", name)]
        ]
    )
    sources: list[Dataset] = []
    for files, _ in parts:
        data = TokenDataset(files, sequence, vocabulary, **options)
        _check_fits(config, data, files[0], "--mix" if mixed else "--input_files")
        sources.append(data)
    return sources[0] if not mixed else MixedDataset(sources, [weight for _, weight in parts])


def _check_fits(config: Config, data: Dataset, name: str, flag: str) -> None:
    """Refuse data that mark what the program would not see."""
    if data.is_masked and not config.training.masked_labels:
        raise UserError(
            f"{flag}: got {name} with prompts, whose tokens do not count as labels; "
            "expected masked_labels. Give --masked_labels."
        )
    end = (data.info or {}).get("end_of_text", config.model.end_of_text)
    if config.model.document_attention and end != config.model.end_of_text:
        raise UserError(
            f"--end_of_text: got {config.model.end_of_text}; expected {end}, with which documents "
            f"of {name} end. Give --end_of_text {end}."
        )


def check_tokenizer(
    config: Config, tokenizer: Tokenizer | None, data: Dataset, validation_data: Dataset | None
) -> None:
    """Refuse a tokenizer that cannot have made the data, or has tokens that the model does not
    have.
    """
    if tokenizer is None:
        return
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > config.model.vocabulary_size:
        raise UserError(
            f"--tokenizer: got {config.data.tokenizer} with {tokens} tokens; expected at most "
            f"vocabulary_size = {config.model.vocabulary_size}. Use the tokenizer that made the "
            "data."
        )
    if data.info is not None and tokens != data.info["vocabulary_size"]:
        raise UserError(
            f"--tokenizer: got {config.data.tokenizer} with {tokens} tokens; expected the data's "
            f"{data.info['vocabulary_size']}. Use the tokenizer.json beside the data."
        )
    for read in (data, validation_data):
        if read is not None:
            check_made_by(tokenizer, config.data.tokenizer or "", read)


def check_same_tokenizer(config: Config, tokenizer: Tokenizer | None, saved: SavedRun) -> None:
    """Refuse to go on with a run by another tokenizer than the one beside its checkpoints."""
    path = saved.folder.parent / TOKENIZER
    try:
        kept = read_tokenizer(path).get_vocab() if path.is_file() else None
    except UserError:
        return  # damaged: written again
    if tokenizer is not None and kept is not None and kept != tokenizer.get_vocab():
        raise UserError(
            f"--tokenizer: got {config.data.tokenizer}; expected that of the run, {path}. Go on "
            "with the data that it was trained on, or with others that its tokenizer made."
        )

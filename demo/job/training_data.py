"""The data that a run trains on, and validates with, as its configuration names them."""

import contextlib
import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import popdist

from popxl_gpt.config.presets import override
from popxl_gpt.config.schedules import tokens_ahead
from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset, TokenDataset
from popxl_gpt.data.dataset_info import training_files
from popxl_gpt.data.in_memory import FirstSamples, SyntheticDataset
from popxl_gpt.data.mixture import MixedDataset
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.token_files import find_files
from popxl_gpt.demo.job.text import check_made_by, read_tokenizer
from popxl_gpt.execution.checkpoints.checkpoint import SavedRun
from popxl_gpt.execution.checkpoints.checkpoint_folder import MANIFEST, TOKENIZER
from popxl_gpt.execution.exchange.hub import model_folder
from popxl_gpt.execution.exchange.trained import INIT_FROM
from popxl_gpt.execution.instances import check_same_data
from popxl_gpt.utils.errors import UserError, io_failure
from popxl_gpt.utils.files.plain import real_path

_LOG = logging.getLogger(__name__)


def open_data(config: Config) -> "tuple[Dataset, Dataset | None]":
    """Training and validation data; without files, random tokens."""
    sequence, vocabulary = config.model.sequence_length, config.model.vocabulary_size
    if config.data.is_synthetic:
        seed = config.training.seed
        return SyntheticDataset(sequence, vocabulary, seed), SyntheticDataset(
            sequence, vocabulary, seed + 1
        )
    validation = config.data.validation_files
    data = _training_data(config)
    if popdist.getInstanceIndex() == 0:
        _tell_of_seen_files(config)
    return data, _token_data(config, validation, stride=sequence) if validation else None


def check_same_in_all(data: Dataset, validation_data: Dataset | None) -> None:
    """UserError where processes read different data, of which each takes its share."""
    if popdist.getNumInstances() > 1:
        read = {"--input_files": data, "--validation_files": validation_data}
        check_same_data({n: found.fingerprint for n, found in read.items() if found is not None})


def _tell_of_seen_files(config: Config) -> None:
    """Warn of files to validate on that are trained on, too."""
    patterns = config.data.input_files or [training_files(name) for name in config.data.mixed()]
    held_out = find_files(config.data.validation_files)
    seen = {real_path(path) for path in find_files(patterns)} & {*map(real_path, held_out)}
    if seen:
        _LOG.warning(
            "--validation_files: got files that are trained on, too, %d of them, such as %s; "
            "expected others. The loss says little of new text: give others.",
            len(seen), min(seen),
        )  # fmt: skip


def in_steps(config: Config) -> Config:
    """The configuration with the steps that its epochs take, where it has epochs: whole batches
    that together have every sample so often.

    Raises:
        UserError: there are no data that end.
    """
    epochs = config.training.epochs
    if epochs is None:
        return config
    if config.data.is_synthetic or config.data.mix:
        got = "--mix, whose sources end one before the other" if config.data.mix else "random data"
        raise UserError(
            f"--epochs: got {epochs:g} passes over {got}; expected --input_files. Give those, or "
            "--steps."
        )
    with contextlib.closing(_token_data(config, config.data.input_files)) as data:
        samples = len(_first_samples(config, data))
        wanted = math.ceil(round(epochs * samples, 6)) * config.model.sequence_length
    iterations = config.execution.device_iterations
    calls = bisect_left(
        range(wanted), wanted, key=lambda calls: tokens_ahead(config, 0, calls * iterations)
    )
    return override(config, steps=calls * iterations)


def _training_data(config: Config) -> Dataset:
    """The files to train on, or a mixture of some; those that the settings fit."""
    mixed = config.data.mixed()
    parts: list[tuple[tuple[str, ...], float]]
    parts = [((training_files(name),), weight) for name, weight in mixed.items()]
    sources: list[Dataset] = []
    for files, _ in parts or [(config.data.input_files, 1.0)]:
        data = _token_data(config, files)
        _check_fits(config, data, files[0], "--mix" if mixed else "--input_files")
        sources.append(data)
    if not mixed:
        return _first_samples(config, sources[0])
    return MixedDataset(sources, [weight for _, weight in parts])


def _first_samples(config: Config, data: Dataset) -> Dataset:
    """The samples that are trained on: all, or the first ones.

    Raises:
        UserError: there are fewer.
    """
    wanted = config.data.train_samples
    if wanted is None:
        return data
    if wanted > len(data):
        raise UserError(
            f"--train_samples: got {wanted}; expected at most the {len(data)} of the data. Lower "
            "it, or leave it out."
        )
    return FirstSamples(data, wanted)


def _token_data(config: Config, files: Sequence[str], *, stride: int | None = None) -> TokenDataset:
    """Token files, of which this process opens its share."""
    return TokenDataset(
        files,
        config.model.sequence_length,
        config.model.vocabulary_size,
        instance=popdist.getInstanceIndex(),
        instances=popdist.getNumInstances(),
        stride=stride,
        skip_damaged=config.data.skip_damaged,
    )


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


def given_tokenizer(
    config: Config, data: Dataset, validation_data: Dataset | None
) -> TextTokenizer | None:
    """The tokenizer that was given, if one was.

    Raises:
        UserError: it cannot have made the data, or has tokens that the model does not have.
    """
    if not config.data.tokenizer:
        return None
    tokenizer = read_tokenizer(Path(config.data.tokenizer))
    tokens = _check_size(tokenizer, f"--tokenizer: got {config.data.tokenizer}", config)
    if data.info is not None and tokens != data.info["vocabulary_size"]:
        raise UserError(
            f"--tokenizer: got {config.data.tokenizer} with {tokens} tokens; expected the data's "
            f"{data.info['vocabulary_size']}. Use the tokenizer.json beside the data."
        )
    check_made_by(tokenizer, config.data.tokenizer, data, validation_data)
    return tokenizer


def _check_size(tokenizer: TextTokenizer, got: str, config: Config) -> int:
    """The number of a tokenizer's tokens; UserError, which begins with `got`, where the model has
    fewer.
    """
    tokens = tokenizer.classes
    if tokens > config.model.vocabulary_size:
        raise UserError(
            f"{got} with {tokens} tokens; expected at most vocabulary_size = "
            f"{config.model.vocabulary_size}. Use the tokenizer that made the data."
        )
    return tokens


def run_tokenizer(
    config: Config,
    given: TextTokenizer | None,
    saved: SavedRun | None,
    data: Dataset,
    validation_data: Dataset | None,
) -> TextTokenizer | None:
    """The tokenizer of a run: the one given, or else that of the model that it goes on with.

    Raises:
        UserError: they differ, or another made the data.
    """
    if saved is not None:
        return _resumed_tokenizer(config, given, saved, data, validation_data)
    return begun_tokenizer(config, given, data, validation_data)


def _resumed_tokenizer(
    config: Config,
    tokenizer: TextTokenizer | None,
    saved: SavedRun,
    data: Dataset,
    validation_data: Dataset | None,
) -> TextTokenizer | None:
    """The tokenizer of a run that goes on: the one given, or else the one beside its checkpoints.

    Raises:
        UserError: they are not the same, or another made the data.
    """
    path = saved.beside[0] / TOKENIZER
    try:
        kept = read_tokenizer(path) if path.is_file() else None
    except UserError as error:
        if io_failure(error) is not None:  # others may have read it
            raise
        return tokenizer  # damaged for all
    if kept is None:
        return tokenizer
    if tokenizer is None:
        check_made_by(kept, path, data, validation_data)
        return kept
    if kept.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"--tokenizer: got {config.data.tokenizer}; expected that of the run, {path}. Go on "
            "with the data that it was trained on, or with others that its tokenizer made."
        )
    return tokenizer


def begun_tokenizer(
    config: Config, tokenizer: TextTokenizer | None, data: Dataset, validation_data: Dataset | None
) -> TextTokenizer | None:
    """The tokenizer of a run that begins: the one given, or else that of the model whose weights it
    begins with.

    Raises:
        UserError: to the model, a token stands for something else than to the tokenizer that was
            given, or that made the data.
    """
    source = config.checkpoint.init_from
    path = None if source is None else _tokenizer_of_model(model_folder(Path(source), INIT_FROM))
    if path is None:
        return tokenizer
    theirs = read_tokenizer(path)
    words = theirs.get_vocab().items()
    if tokenizer is not None:
        if not words <= tokenizer.get_vocab().items():
            raise UserError(
                f"--tokenizer: got {config.data.tokenizer}, and --init_from {source}, which has "
                f"{path}; expected both to have the same tokens. Use the model's tokenizer, and "
                "data that it made."
            )
        return tokenizer
    _check_size(theirs, f"--init_from: got {source}, which has {path}", config)
    for read in (data, validation_data):
        for made in read.tokenizers if read is not None else ():
            if not read_tokenizer(made).get_vocab().items() <= words:
                raise UserError(
                    f"--init_from: got {source}, which has {path}, and data that {made} made; "
                    "expected both to have the same tokens. Use data that the model's tokenizer "
                    "made: data/prepare.py with --tokenizer."
                )
    return theirs


def _tokenizer_of_model(path: Path) -> Path | None:
    """The tokenizer of a run, of a checkpoint, or of a folder of Hugging Face's, where it has one:
    beside the checkpoints, or in the run's folder.
    """
    real = real_path(path)
    is_checkpoint = (real / MANIFEST).exists()
    folders = real.parents[:2] if is_checkpoint else (real / "checkpoints", real)
    found = (folder / TOKENIZER for folder in folders)
    return next((file for file in found if file.is_file()), None)

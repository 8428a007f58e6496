"""Text that a trained model writes."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import popxl_addons as addons
from tokenizers import Tokenizer

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import TOKENIZER_BYTES
from popxl_gpt.demo.job.options import unreadable_tokenizer
from popxl_gpt.demo.job.writing import write
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.exchange.trained import TrainedModel
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.sampling import Sampling
from popxl_gpt.execution.variables import copy_weights
from popxl_gpt.utils.errors import DataError, UserError
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.files.hub import foreign_tokenizer, tokenizer_file

MARK = "»"
"""Stands where the given text ends."""


def read_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a file, or of a folder with one, with what stands beside it.

    Raises:
        UserError: there is none, or it has no tokens.
    """
    path, content = tokenizer_file(path), b""
    try:
        content = read_bounded(path, TOKENIZER_BYTES)
        library = Tokenizer.from_str(content.decode("utf-8"))
        found = TextTokenizer.beside(library, path)
    except OSError as error:
        raise unreadable_tokenizer(path, error) from error
    except (KeyboardInterrupt, SystemExit, DataError):
        raise
    # the tokenizers package raises nothing narrower, and panics are no Exception
    except BaseException as error:
        told = foreign_tokenizer(content) or f"{error}; expected a tokenizer.json. Check the file."
        raise UserError(f"--tokenizer: got {path}: {told}") from error
    if not found.get_vocab():
        raise UserError(
            f"--tokenizer: got {path} without a token; expected the tokenizer.json that made the "
            "training data. Check the file."
        )
    return found


def tokenizer_path(
    saved: TrainedModel, config: Config, folders: "Iterable[Path]" = ()
) -> Path | None:
    """The tokenizer's file that is named, or else the first that there is beside a model, in some
    more folders, or where its run had it; None where there is none.
    """
    own = config.data.tokenizer
    named = [] if own is None else [Path(own)]
    if own != saved.config.data.tokenizer:
        return next(iter(named), None)
    choices = [*(folder / TOKENIZER for folder in (*saved.beside, *folders)), *named]
    return next((choice for choice in choices if choice.is_file()), None)


def check_made_by(tokenizer: TextTokenizer, name: "str | Path", *data: Dataset | None) -> None:
    """Refuse a tokenizer to which a token of some data stands for something else than to the one
    that made them.

    Raises:
        UserError: names both.
    """
    vocabulary = tokenizer.get_vocab()
    for path in (path for each in data if each is not None for path in each.tokenizers):
        made = read_tokenizer(path).get_vocab()
        if not made.items() <= vocabulary.items():
            raise UserError(
                f"--tokenizer: got {name}, and data that {path} made; expected both to have the "
                "same tokens. Use the tokenizer that made the data, or prepare them again with "
                "--tokenizer."
            )


def check_vocabulary(tokenizer: TextTokenizer, path: Path, vocabulary: int) -> None:
    """Refuse a tokenizer, that of a path, which has more tokens than a model.

    Raises:
        UserError: says how many each has.
    """
    if tokenizer.classes > vocabulary:
        raise UserError(
            f"--tokenizer: got {path} with {tokenizer.classes} tokens; expected at most the "
            f"model's {vocabulary}. Use the tokenizer that made the training data."
        )


class SampleWriter:
    """Writes on after prompts, each up to so many tokens more. The same weights write the same
    texts.
    """

    def __init__(
        self,
        training: addons.TaskSession,
        config: Config,
        tokenizer: TextTokenizer,
        prompts: Sequence[Sequence[int]],
        tokens: int,
    ):
        self.training, self.tokenizer, self.prompts, self.tokens = (
            training,
            tokenizer,
            prompts,
            tokens,
        )
        self.sampling = Sampling(seed=config.training.seed)
        longest = max(len(prompt) for prompt in prompts)
        self.model = CachedModel(config, len(prompts), longest, tokens)

    def write(self) -> "list[tuple[str, str]]":
        """Prompts, and what the model makes of each. All processes of a run must call it.

        Raises:
            NotFiniteError: the model's logits are not finite.
        """
        copy_weights(self.training, self.model.session)
        with self.model.session:
            texts = write(self.model, self.tokenizer, self.prompts, self.tokens, self.sampling)
        return [
            (self.tokenizer.decode(list(prompt)), text.rstrip())
            for prompt, text in zip(self.prompts, texts)
        ]


def whole_lines(tokens: Sequence[int], tokenizer: TextTokenizer) -> "list[int]":
    """The part of some tokens that begins and ends where a line does; all of them where they hold
    no whole line.
    """
    breaks = [index for index, token in enumerate(tokens) if "\n" in tokenizer.decode([token])]
    if len(breaks) < 2:
        return list(tokens)
    return list(tokens[breaks[0] + 1 : breaks[-1] + 1])

"""What an evaluation reads: token files or text, and the tokenizer of the model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import popdist

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset, TokenDataset
from popxl_gpt.data.in_memory import TokenArray
from popxl_gpt.data.masking import masked
from popxl_gpt.data.sources import text_source
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import leaves_out, tokenise, unknown_token
from popxl_gpt.demo.commands import EvaluateOptions as Options
from popxl_gpt.demo.job.text import check_vocabulary, read_tokenizer, tokenizer_path
from popxl_gpt.demo.job.writing import end_of_documents
from popxl_gpt.execution.exchange.trained import TrainedModel
from popxl_gpt.utils.errors import UserError


def open_evaluated(
    config: Config, options: Options, tokenizer: TextTokenizer | None, stride: int
) -> "tuple[Dataset, int | None]":
    """The data, and the bytes of text in them where these are text: none where the tokenizer lacks
    a character, of which a token says less than the text, or may leave some out.
    """
    sequence, vocabulary = config.model.sequence_length, config.model.vocabulary_size
    if options.text:
        assert tokenizer is not None
        texts = _texts(config, options)
        tokens = _joined(texts, tokenizer)
        library = tokenizer.library
        is_whole = not (leaves_out(library) or (tokens == unknown_token(library)).any())
        text_bytes = sum(len(text.encode()) for text in texts if text.strip())
        return TokenArray(tokens, sequence, vocabulary, stride), text_bytes if is_whole else None
    if not config.data.input_files:
        raise UserError(
            "--input_files: got none, and the run has no validation files; expected token files. "
            "Give some, or text with --text."
        )
    place: dict[str, Any] = {
        "instance": popdist.getInstanceIndex(),
        "instances": popdist.getNumInstances(),
        "skip_damaged": config.data.skip_damaged,
    }
    return TokenDataset(config.data.input_files, sequence, vocabulary, stride=stride, **place), None


def _texts(config: Config, options: Options) -> "list[str]":
    """The documents of files of text; says what is left out of them."""
    source = text_source(
        options.text,
        document_bytes=2**31 - 1,
        text_field=options.text_field,
        plain_text=options.plain_text,
        skip_damaged=config.data.skip_damaged,
    )
    texts = list(source.documents())
    for line in source.left_out.lines() if popdist.getInstanceIndex() == 0 else ():
        print(line, file=sys.stderr)
    return texts


def _joined(texts: "Sequence[str]", tokenizer: TextTokenizer) -> np.ndarray:
    """The tokens of documents, each ended as in training. What stands before the first is such an
    end, too, unless the tokenizer begins texts itself: what it begins them with does not count.
    """
    first = len(tokenizer.first)
    found = [np.array([] if first else [tokenizer.end])]
    for tokens in tokenise(texts, tokenizer):
        found.append(masked(tokens, np.arange(len(tokens)) >= first))
    joined = np.concatenate(found).astype(np.int32)
    if len(joined) < 2:
        raise UserError("--text: got files without text; expected some. Check the files.")
    return joined


def tokenizer_of(saved: TrainedModel, config: Config, needed: bool) -> TextTokenizer | None:
    """The tokenizer that is named, or else one beside the checkpoint, the run's, or beside the
    data; None where there is none and none is needed.
    """
    files = map(Path, config.data.input_files)
    path = tokenizer_path(saved, config, (f if f.is_dir() else f.parent for f in files))
    if path is None:
        if needed:
            raise UserError(
                "--tokenizer: got none; expected the tokenizer.json that made the training data. "
                "Give its path."
            )
        return None
    tokenizer = read_tokenizer(path)
    tokenizer.end = end_of_documents(tokenizer, config.model, saved.ends)
    if tokenizer.end is None and needed:
        raise UserError(
            f"--tokenizer: got {path} without a token that ends documents; expected one. Name "
            "it, as eos_token, in a tokenizer_config.json beside the file."
        )
    check_vocabulary(tokenizer, path, config.model.vocabulary_size)
    return tokenizer

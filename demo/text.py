"""Text that a trained model writes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import popxl_addons as addons
from tokenizers import Tokenizer

from config import Config, UserError, override
from config.bounded import read_bounded
from data.tokenisation import TOKENIZER_BYTES
from execution.inference import generation, logits
from execution.variables import copy_weights

END_OF_TEXT = "<|endoftext|>"
TEMPERATURE = 0.8
"""Below one makes likely tokens likelier still."""
TOP = 40
"""Tokens that are chosen from: the likeliest ones."""
MARK = "»"
"""Stands where the given text ends."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file.

    Raises:
        UserError: there is none.
    """
    try:
        return Tokenizer.from_str(read_bounded(path, TOKENIZER_BYTES).decode("utf-8"))
    except OSError as error:
        raise UserError(
            f"--tokenizer: got {path}: {error.strerror}; expected a readable tokenizer.json. "
            "Check the path."
        ) from error
    except (KeyboardInterrupt, SystemExit):
        raise
    # the tokenizers package raises nothing narrower, and panics are no Exception
    except BaseException as error:
        raise UserError(
            f"--tokenizer: got {path}: {error}; expected a tokenizer.json. Check the file."
        ) from error


def write_samples(
    training: addons.TaskSession,
    config: Config,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> "list[str]":
    """Each prompt and what the model makes of it, up to so many tokens more, with a mark between
    the two.

    The end of a text ends it, and so does the model's sequence length. The same weights write the
    same texts.

    Raises:
        FloatingPointError: the model's logits are not finite.
    """
    execution = config.execution
    batch = len(prompts) * execution.data_parallel
    alone = override(
        config, micro_batch_size=1, widening=1, global_batch_size=batch, device_iterations=1
    )
    session = generation(alone, rows=1)
    copy_weights(training, session)
    sequence = config.model.sequence_length
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = [list(prompt)[:sequence] for prompt in prompts]
    random, open_texts = np.random.default_rng(config.training.seed), set(range(len(texts)))
    with session:
        for _ in range(tokens):
            open_texts = {i for i in open_texts if len(texts[i]) < sequence}
            if not open_texts:
                break
            scores = _next_scores(session, alone, texts)
            for i in sorted(open_texts):
                if not np.isfinite(scores[i]).all():
                    raise FloatingPointError("the trained weights give logits that are not finite")
                token = choose(scores[i], random)
                if token == end:
                    open_texts.discard(i)
                else:
                    texts[i].append(token)
    return [_marked(tokenizer, prompt, text) for prompt, text in zip(prompts, texts)]


def whole_lines(tokens: Sequence[int], tokenizer: Tokenizer) -> "list[int]":
    """The part of some tokens that begins and ends where a line does; all of them where they hold
    no whole line.
    """
    breaks = [index for index, token in enumerate(tokens) if "\n" in tokenizer.decode([token])]
    if len(breaks) < 2:
        return list(tokens)
    return list(tokens[breaks[0] + 1 : breaks[-1] + 1])


def _marked(tokenizer: Tokenizer, prompt: Sequence[int], text: Sequence[int]) -> str:
    """Decode all at once, for a character may span the two parts."""
    whole = tokenizer.decode(list(text))
    given = os.path.commonprefix([tokenizer.decode(list(prompt)), whole])
    return given + MARK + whole[len(given) :].rstrip()


def _next_scores(
    session: addons.TaskSession, config: Config, texts: "list[list[int]]"
) -> np.ndarray:
    """Logits of the token after each text, float32 [texts, vocabulary]."""
    words = np.zeros((len(texts), config.model.sequence_length), np.int32)
    for row, text in zip(words, texts):
        row[: len(text)] = text
    last = np.array([[len(text) - 1] for text in texts], np.int32)
    copies = config.execution.data_parallel
    words, last = np.repeat(words, copies, axis=0), np.repeat(last, copies, axis=0)
    return logits(session, config, words, last)[::copies, 0]


def choose(scores: np.ndarray, random: np.random.Generator) -> int:
    """Draw one of the likeliest tokens. scores: logits [vocabulary]."""
    likeliest = np.argsort(scores)[::-1][:TOP]
    weights = np.exp((scores[likeliest] - scores[likeliest[0]]).astype(np.float64) / TEMPERATURE)
    return int(random.choice(likeliest, p=weights / weights.sum()))

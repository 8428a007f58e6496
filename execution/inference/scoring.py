"""How likely continuations of texts are: many texts of different lengths, by a program for each
of a few lengths.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, isfinite

import numpy as np

from popxl_gpt.config.presets import override
from popxl_gpt.config.rules import largest_divisor
from popxl_gpt.config.schema import Config
from popxl_gpt.execution.host import own_samples
from popxl_gpt.execution.inference.inference import scoring, token_scores
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import NotFiniteError

ROWS = 1024
"""Tokens that run as one, about: enough for matrix products to be fast."""
SHORTEST = 32
"""Tokens that the program for the shortest texts takes."""
Weights = Iterable["tuple[str, np.ndarray]"]


@dataclass(frozen=True)
class Continuation:
    """A text whose end is scored."""

    tokens: "list[int]"
    """Two at least. Of more than max_positions + 1 only the last ones are seen."""
    count: int
    """Tokens at its end that are scored: fewer than it has, at most max_positions."""


@dataclass(frozen=True)
class Score:
    """How likely a continuation is."""

    log_likelihood: float
    """Sum over its tokens, in nats."""
    is_likeliest: bool
    """Whether each token is the likeliest one after those before it."""


def score(
    config: Config,
    weights: "Callable[[], Weights]",
    texts: Sequence[Continuation],
    on_scored: Callable[[int], None] = lambda texts: None,
) -> "list[Score]":
    """Score each continuation. All processes of a program must call it, and get the same.

    Args:
        config: of the model, the layout, and about as many tokens at a time as its batch has,
            with `ROWS` in place of a longer sequence; pieces of the head have as many rows.
        weights: the model's whole weights; asked for once for each program.
        on_scored: is told how many more are done.
    Raises:
        NotFiniteError: a likelihood is not finite.
    """
    at_a_time = config.execution.widening * config.execution.micro_batch_size
    sequence = config.model.sequence_length
    rows = at_a_time * min(sequence, ROWS)
    piece = at_a_time * sequence // config.execution.head_serialisation
    result: list[Score] = [Score(0.0, True)] * len(texts)
    for length, numbers in _by_length(texts, config.model.positions):
        each = config.execution.data_parallel
        width = max(1, min(rows // length, -(-len(numbers) // each)))
        batch = override(
            config,
            sequence_length=length,
            max_positions=config.model.positions,
            attention_serialisation=gcd(length, config.model.attention_serialisation),
            document_attention=False,  # a text is one document
            micro_batch_size=1,
            widening=width,
            head_serialisation=largest_divisor(width * length, max(1, width * length // piece)),
            global_batch_size=width * each,
        )
        session = scoring(batch)
        write_whole_weights(session, batch, weights())
        with session:
            for start in range(0, len(numbers), width * each):
                chosen = numbers[start : start + width * each]
                words, labels = _padded([texts[number] for number in chosen], length, width * each)
                own = (own_samples(array, batch) for array in (words, labels))
                losses, is_likeliest = token_scores(session, batch, *own)
                for number, text_losses, found in zip(chosen, losses, is_likeliest):
                    result[number] = _score(texts[number], text_losses, found)
                on_scored(len(chosen))
    return result


def _seen(text: Continuation, most: int) -> "list[int]":
    return text.tokens[-(most + 1) :]


def _by_length(texts: Sequence[Continuation], positions: int) -> "Iterator[tuple[int, list[int]]]":
    """Numbers of texts by the length of the program that takes them, the longest first."""
    found: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        words = len(_seen(text, positions)) - 1
        length = min(positions, max(SHORTEST, 1 << (words - 1).bit_length()))
        found.setdefault(length, []).append(number)
    yield from sorted(found.items(), reverse=True)


def _padded(
    texts: Sequence[Continuation], length: int, rows: int
) -> "tuple[np.ndarray, np.ndarray]":
    """Words and labels, int32 [rows, length]. What comes after a text changes nothing before it."""
    words, labels = np.zeros((2, rows, length), np.int32)
    for row, text in enumerate(texts):
        tokens = _seen(text, length)
        words[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, : len(tokens) - 1] = tokens[1:]
    return words, labels


def _score(text: Continuation, losses: np.ndarray, is_likeliest: np.ndarray) -> Score:
    end = min(len(text.tokens) - 1, len(losses))
    part = slice(end - text.count, end)
    found = -float(losses[part].sum(dtype=np.float64))
    if not isfinite(found):
        raise NotFiniteError(
            f"log-likelihood: got {found} for a text of {len(text.tokens)} tokens; expected a "
            "finite one. Use another precision, or an older checkpoint."
        )
    return Score(found, bool(is_likeliest[part].all()))

"""Choosing the next token by a model's logits."""

from dataclasses import dataclass

import numpy as np

from popxl_gpt.config.bounds import Count, PositiveOrZero, Seed, TopP
from popxl_gpt.config.validation import checked


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    Raises:
        ConfigError: a value is of another type or out of range; lists every problem.
    """

    temperature: PositiveOrZero = 0.8
    """The number that logits are divided by; 0: the likeliest token is taken, the first of equal
    ones.
    """
    top_k: Count | None = 40
    """The number of likeliest tokens to choose from, and those as likely as the last of them; none:
    all.
    """
    top_p: TopP = 1.0
    """The probability that tokens to choose from have together: the fewest of the likeliest of
    these.
    """
    seed: Seed = 42
    """The seed, which decides what is drawn."""

    def __post_init__(self) -> None:
        for name, value in checked(Sampling, vars(self), "sampling").items():
            object.__setattr__(self, name, value)

    def random(self, text: int) -> np.random.Generator:
        """What a text draws from: one number for each token. Texts do not depend on each other."""
        return np.random.Generator(np.random.Philox(key=[self.seed, text]))


def probabilities(logits: np.ndarray, sampling: Sampling) -> "tuple[np.ndarray, np.ndarray]":
    """Tokens that may be chosen, in ascending order, and their probabilities, float64.

    Args:
        logits: finite, [vocabulary].
    Source: Holtzman et al. 2020, arXiv:1904.09751, section 3.1 (top_p) and 4 (top_k, temperature).
    """
    if sampling.temperature == 0:
        return np.array([logits.argmax()]), np.ones(1)
    tokens = np.arange(logits.size)
    if sampling.top_k is not None and sampling.top_k < logits.size:
        least = np.partition(logits, -sampling.top_k)[-sampling.top_k]
        tokens = np.flatnonzero(logits >= least)
    scores = logits[tokens].astype(np.float64)
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        kept = np.sort(order[before < sampling.top_p])
        tokens, weights = tokens[kept], weights[kept] / weights[kept].sum()
    return tokens, weights


def choose(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """Draw a token. logits: finite, [vocabulary]."""
    tokens, weights = probabilities(logits, sampling)
    ends = np.cumsum(weights)
    return int(
        tokens[min(np.searchsorted(ends, random.random() * ends[-1], "right"), ends.size - 1)]
    )

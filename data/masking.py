"""Tokens that do not count as labels: those of prompts, and padding.

Beside other tokens such a token is its complement, ~token, which is below zero. A token counts as a
label, never as an input, so the first of a sample may be either.
"""

import numpy as np

IGNORED = -100
"""A label that counts for nothing, as in PyTorch and Hugging Face."""


def masked(tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mark the tokens that do not count as labels, int32."""
    return np.where(counts, tokens, ~tokens.astype(np.int32)).astype(np.int32)


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """The tokens' ids, marked or not."""
    return np.where(tokens < 0, ~tokens, tokens)


def labels_of(tokens: np.ndarray) -> np.ndarray:
    """The ids of tokens that count as labels, `IGNORED` for the others."""
    return np.where(tokens < 0, IGNORED, tokens).astype(tokens.dtype)

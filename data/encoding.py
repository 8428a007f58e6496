"""Texts to tokens: by the package tokenizers, or by tiktoken, which needs a fifth of the time,
where it is installed and gives the same tokens.

tiktoken joins two pieces whenever what they make is a token, tokenizers where a merge says so.
These are one algorithm where each token comes from one merge, merges are ranked as their tokens
are, and each token's own bytes become that token. For let the two differ first at a pair that makes
token T and is not T's merge. No merge has crossed the ends of T's bytes so far, so they went the
way that they go alone; and that ends with T's merge.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from popxl_gpt.data.limited_tokenizer import LimitedTokenizer, is_plain_bpe

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""How text is cut before: as ByteLevel of tokenizers does it. Source: github.com/openai/tiktoken,
tiktoken_ext/openai_public.py, r50k_pat_str.
"""
NEWER_CHARACTERS = (
    "\u0560\U00010d00\U00010fe0\U00010e80\U00010570\U00011f04"
    "\U0002ebf0\U000105c0\u1c89\U00010d40\U00010940\U000323b0"
)
"""Letters and a digit that Unicode has since 11, 12, 13, 14, 15, 15.1, 16 and 17. Packages that
know another Unicode cut text at them otherwise.
"""


class Encoder:
    """A tokenizer that takes text as text, whatever special tokens it spells.

    Args:
        tokenizer, name: as of `LimitedTokenizer`.
    """

    def __init__(self, tokenizer: str, name: str = "tokenizer"):
        self._limited = LimitedTokenizer(tokenizer, name)
        self._fast = _tiktoken(self._limited.content, self._limited.library)

    @property
    def is_fast(self) -> bool:
        """Whether tiktoken does it."""
        return self._fast is not None

    def whole(self, text: str) -> "tuple[np.ndarray, np.ndarray]":
        """What `LimitedTokenizer.encode_with_places` gives."""
        return self._limited.encode_with_places(text)

    def __call__(self, texts: Sequence[str]) -> "list[np.ndarray]":
        """The tokens of each text, uint32 [tokens]."""
        if self._fast is None:
            return self._limited.encode(texts)
        encoding, numbers = self._fast
        return [numbers[encoding.encode_ordinary(text)] for text in texts]


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> "list[list[int]]":
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in found]


def _tiktoken(
    content: "dict[str, Any]", library: Tokenizer | None
) -> "tuple[Any, np.ndarray] | None":
    """An encoding of tiktoken, and the number of each of its tokens; None where it is not installed
    or would give other tokens.
    """
    if library is None:
        return None
    try:
        import tiktoken
    except ImportError:
        return None
    names = _names_by_rank(content, library)
    if names is None or not _know_the_same_unicode(tiktoken.Encoding):
        return None
    numbers = np.array([content["model"]["vocab"][name] for name in names], np.uint32)
    bytes_of = {name: byte for byte, name in enumerate(byte_names())}
    ranks = {bytes(bytes_of[c] for c in name): rank for rank, name in enumerate(names)}
    encoding = tiktoken.Encoding(
        "merges", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    return encoding, numbers


def _know_the_same_unicode(encoding_class: Any) -> bool:
    """Whether tiktoken and tokenizers cut text at the same characters, of those that are newer."""
    texts = [first + character for first in "a1" for character in NEWER_CHARACTERS]
    tokens = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in texts)]
    whole = encoding_class(
        "whole",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return all(
        (len(whole.encode_ordinary(text)) == 1) == (len(cut.pre_tokenize_str(text)) == 1)
        for text in texts
    )


def _names_by_rank(content: "dict[str, Any]", library: Tokenizer) -> "list[str] | None":
    """The tokens of bytes and of merges, those that are joined first before others; None for a
    tokenizer that is more than byte-level BPE as GPT-2's, or whose tokens do not all come of their
    own bytes by one merge.
    """
    model, cut = content["model"], content["pre_tokenizer"] or {}
    is_plain = (
        is_plain_bpe(model)
        and content["normalizer"] is None
        and cut.get("type") == "ByteLevel"
        and not cut["add_prefix_space"]
        and cut.get("use_regex", True)
        and all(added["special"] for added in content["added_tokens"])
    )
    if not is_plain:
        return None
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    names = [*byte_names(), *("".join(pair) for pair in pairs)]
    if len(set(names)) != len(names) or not model["vocab"].keys() >= set(names):
        return None
    found = _ids(Tokenizer(library.model), names)
    return names if found == [[model["vocab"][name]] for name in names] else None


def byte_names() -> "list[str]":
    """The character that stands for each byte: bytes that print stand for themselves, the others
    are 256 and what follows. Source: github.com/openai/gpt-2, src/encoder.py.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]

"""Tokenizers that may not take more time and memory than their texts are worth.

A tokenizer is a file of somebody else's. Its normalizers may double a text forty times, and its
patterns try all ways there are. One whose steps are known to take about as long as the text does
its work here; any other in a process of its own, which the system ends.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from popxl_gpt.data import tokenizer_process
from popxl_gpt.data.limited_process import LimitedProcess, LimitError
from popxl_gpt.data.serving import FAILED, GREW
from popxl_gpt.data.tokenizer_process import text_as_text
from popxl_gpt.utils.errors import DataError

SECONDS = 10
"""Time of a core that a request may take."""
BYTES_PER_SECOND = 2**17
"""Text for each second more; ordinary tokenizers take ten times as much."""
MEMORY = 2**30
"""Bytes that a request may take."""
MEMORY_PER_BYTE = 2**10
"""More, for each byte of text; ordinary tokenizers take some 150."""
GROWTH = 64
"""Tokens for each byte of a text, and characters for each of the tokens' own, at most."""
PLAIN_BPE = {
    "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
    "end_of_word_suffix": None, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip
"""Settings of a BPE model as GPT-2's."""
EACH_CHARACTER = r"[\s\S]"
"""Pattern of tokenizers of characters."""
LONGEST = 1024
"""Characters of a token that no process is needed for: text of it takes so many times the memory of
its number. GPT-2's has 128.
"""


def is_linear(content: "dict[str, Any]") -> bool:
    """Whether each step of a tokenizer is known to take about as long as its text: those that are
    made here, and byte-level BPE as GPT-2's.
    """
    model, cut = content["model"], content["pre_tokenizer"] or {}
    is_plain_model = model.get("type") == "WordLevel" or is_plain_bpe(model)
    is_plain_cut = cut.get("type") == "ByteLevel" or (
        cut.get("type") == "Split" and cut.get("pattern") == {"Regex": EACH_CHARACTER}
    )
    put_together = (content["decoder"] or {}).get("type")
    added = (token["content"] for token in content["added_tokens"])
    return (
        content["normalizer"] is None
        and all(len(token) <= LONGEST for token in (*model["vocab"], *added))
        and is_plain_model
        and is_plain_cut
        and put_together in ("ByteLevel", "Fuse", None)
    )


def is_plain_bpe(model: "dict[str, Any]") -> bool:
    """Whether a model is BPE as GPT-2's."""
    return model.get("type") == "BPE" and all(
        model.get(name, value) in (value, "") for name, value in PLAIN_BPE.items()
    )


class LimitedTokenizer:
    """Text to tokens and back. What a tokenizer cannot do, or not within its limits, is DataError.

    Args:
        tokenizer: content of a tokenizer.json.
        name: names it in errors.
    """

    def __init__(self, tokenizer: str, name: str):
        self.name = name
        self.content: dict[str, Any] = json.loads(tokenizer)
        self.library: Tokenizer | None = None
        """Does the work in this process, where its steps are known."""
        if is_linear(self.content):
            with self._told("vocabulary"):
                self.library = text_as_text(Tokenizer.from_str(tokenizer))
        self._tokenizer = tokenizer
        self._process: LimitedProcess | None = None

    def encode(self, texts: Sequence[str], special_tokens: bool = False) -> "list[np.ndarray]":
        """The tokens of each text, uint32 [tokens].

        Args:
            special_tokens: take those that texts spell as tokens, not as text.
        """
        if self.library is not None:
            self.library.encode_special_tokens = not special_tokens
            with self._told("tokens"):
                found = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, np.uint32) for encoding in found]
        content = self._encoded(texts, special_tokens, places=False)
        counts = np.frombuffer(content, np.uint64, len(texts))
        ends = np.cumsum(counts.astype(np.int64))[:-1]
        return np.split(np.frombuffer(content, np.uint32, offset=counts.nbytes), ends)

    def encode_with_places(self, text: str) -> "tuple[np.ndarray, np.ndarray]":
        """The tokens of a text, special ones that it spells as tokens, uint32 [tokens], and the
        characters where each begins and ends, uint32 [tokens, 2].
        """
        if self.library is not None:
            self.library.encode_special_tokens = False
            with self._told("tokens"):
                found = self.library.encode(text, add_special_tokens=False)
            pairs = np.array(found.offsets, np.uint32).reshape(-1, 2)
            return np.array(found.ids, np.uint32), pairs
        content = self._encoded([text], True, places=True)
        count = int(np.frombuffer(content, np.uint64, 1)[0])
        values = np.frombuffer(content, np.uint32, offset=8)
        return values[:count], values[count:].reshape(-1, 2)

    def _encoded(self, texts: Sequence[str], special_tokens: bool, places: bool) -> bytes:
        asked = {"do": "encode", "texts": list(texts), "special_tokens": special_tokens}
        return self._ask({**asked, "places": places}, sum(map(len, texts)), "tokens")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        if self.library is not None:
            with self._told("text"):
                text: str = self.library.decode(list(tokens))
            return text
        asked = {"do": "decode", "tokens": [int(token) for token in tokens]}
        return self._ask(asked, len(tokens), "text").decode()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        # the tokenizers package raises nothing narrower, and panics are no Exception
        except BaseException as error:
            raise self._failed(what, str(error)) from error

    def _ask(self, asked: "dict[str, Any]", size: int, what: str) -> bytes:
        """The content of an answer.

        Args:
            size: of what is given, bytes, about; `what`: is made of it.
        """
        # one that has not answered, for Ctrl-C came between, is not asked again
        process, self._process = self._process, None
        if process is None:
            process = LimitedProcess(tokenizer_process.__file__, self.name)
            load = {"do": "load", "tokenizer": self._tokenizer}
            self._answer(process, load, len(self._tokenizer), "vocabulary")
        content = self._answer(process, asked, size, what)
        self._process = process
        return content

    def _answer(
        self, process: LimitedProcess, asked: "dict[str, Any]", size: int, what: str
    ) -> bytes:
        seconds, memory = SECONDS + size // BYTES_PER_SECOND, MEMORY + size * MEMORY_PER_BYTE
        try:
            kind, content = process.ask({**asked, "growth": GROWTH}, what, seconds, memory)
        except LimitError as error:
            raise self._refused(f"no {what} within {error}") from error
        if kind == FAILED:
            raise self._failed(what, content.decode())
        if kind == GREW:
            raise self._refused(f"{what} of more than {GROWTH} times the size of what it is given")
        return content

    def _failed(self, what: str, why: str) -> DataError:
        return DataError(
            f"{self.name}: got '{' '.join(why.split())}' instead of {what}; expected a tokenizer "
            "that takes any text. Use another, or give it a token for what it does not know."
        )

    def _refused(self, got: str) -> DataError:
        return DataError(
            f"{self.name}: got {got}; expected a tokenizer whose steps neither multiply text nor "
            "search for long. Use another."
        )

"""Tokenizers as programs use them: what stands around a text, and the token that ends documents.

`tokenizer.json` does not say which token ends documents. A model's folder says it beside it, and so
do the folders that are made here, by `tokenizer_config.json`.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from popxl_gpt.data.chat_template import (
    KEPT,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TOKENIZER_CONFIG,
    ChatTemplate,
    find_template,
)
from popxl_gpt.data.limited_tokenizer import LimitedTokenizer
from popxl_gpt.data.special_tokens import as_list
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.files.bounded import read_object
from popxl_gpt.utils.files.hub import TOKENIZER
from popxl_gpt.utils.files.plain import write_plain
from popxl_gpt.utils.files.whole import sync, write_whole

END_OF_TEXT = "<|endoftext|>"
MOST_AROUND = 64
"""Tokens around a text; models have up to five."""
_OF_TOKENIZER = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)
GENERATION = "generation_config.json"
"""Names all tokens that texts end with, beside a tokenizer.json."""
_OF_MODEL = (GENERATION, "config.json")
_CONFIG_BYTES = 2**26
NO_OBJECT = (
    "got no JSON object; expected one, for it tells of the special tokens of the tokenizer beside "
    "it. Copy it again."
)
_NAMES = {"eos_token": str, "bos_token": str, "eos_token_id": int}


def special_tokens_beside(path: Path) -> "dict[str, Any]":
    """What the files of a model beside its tokenizer.json say of special tokens, by Hugging Face's
    names.

    Raises:
        DataError: one of the files cannot be read.
    """
    found: dict[str, Any] = {}
    for file in (*_OF_TOKENIZER, *_OF_MODEL):
        if file in _OF_MODEL and "eos_token" in found:
            break
        values = read_object(path.parent / file, _CONFIG_BYTES, NO_OBJECT) or {}
        for name, kind in _NAMES.items():
            value = values.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, list):  # several end texts, the first of them documents
                value = next(iter(value), None)
            if type(value) is kind and name not in found:
                found[name] = value
    return found


def ends_beside(path: Path) -> "list[int]":
    """The tokens with which texts end, as the files of a model beside its tokenizer.json, or what a
    run keeps of them, list them.

    Raises:
        DataError: one of the files cannot be read.
    """
    found: dict[int, None] = {}
    for file in (path.parent / part / name for part in ("", KEPT) for name in _OF_MODEL):
        values = read_object(file, _CONFIG_BYTES, NO_OBJECT) or {}
        named = as_list(values.get("eos_token_id"))
        found |= {token: None for token in named if type(token) is int}
    return list(found)


class TextTokenizer:
    """A tokenizer, and what transformers would put around a text.

    Args:
        library: the tokenizer.
        name: names it in errors.
        beside: as of `special_tokens_beside`.
        end: the name of the token that ends documents; None: the one that `beside` names, or else
            `END_OF_TEXT`, or else the one whose number `beside` says.
    Raises:
        ValueError: the post-processor does more than to put tokens around a text.
        DataError: `end` is no token.
    """

    def __init__(
        self,
        library: Tokenizer,
        name: str = "tokenizer",
        beside: "dict[str, Any] | None" = None,
        end: str | None = None,
    ):
        self.library, self.name = library, name
        self._vocabulary: dict[str, int] = library.get_vocab()
        beside = beside or {}
        if end is not None and end not in self._vocabulary:
            raise DataError(
                f"--eos_token: got '{end}', which is no token of {name}; expected one that ends "
                "documents. Write it as the tokenizer does."
            )
        names = (end, beside.get("eos_token"), END_OF_TEXT)
        known = [self._vocabulary[n] for n in names if n is not None and n in self._vocabulary]
        number = beside.get("eos_token_id")
        if number is not None and number in self._vocabulary.values():
            known.append(number)
        self.end: int | None = next(iter(known), None)
        """The token that ends documents; None where nothing says which does."""
        self.first, self.last = _around(library, set(self._vocabulary.values()))
        """Tokens that stand before a text, and after it, uint32 [tokens]."""
        named = beside.get("bos_token")
        begin = None if named is None else self._vocabulary.get(named)
        self.begin: int | None = (
            next(iter(self.first[-1:].tolist()), None) if begin is None else begin
        )
        """The token that is said to begin texts, whether it stands before them or not."""
        self.ends: list[int] = []
        """Tokens that end a text, beside the one that ends documents."""
        self.template: ChatTemplate | None = None
        """Writes conversations; None where nothing says how they are written."""

    @classmethod
    def beside(cls, library: Tokenizer, path: Path, end: str | None = None) -> "TextTokenizer":
        """The tokenizer of a file, with what stands beside it; `end` is that of the class."""
        found = cls(library, str(path), special_tokens_beside(path), end)
        known = set(found.get_vocab().values())
        found.ends = [token for token in ends_beside(path) if token in known]
        found.template = find_template(path)
        if found.template is not None and end is not None:
            found.template.tokens["eos_token"] = end  # as `files` keeps it
        return found

    def special_in(self, text: str) -> str | None:
        """A special token that a text spells; None where it spells none."""
        return next((token for token in self._special if token in text), None)

    @cached_property
    def _special(self) -> "list[str]":
        added = self.library.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def get_vocab(self) -> "dict[str, int]":
        """The numbers of all tokens."""
        return self._vocabulary

    @property
    def classes(self) -> int:
        """One more than the highest number of a token."""
        return max(self._vocabulary.values()) + 1

    @property
    def config(self) -> str | None:
        """What `TOKENIZER_CONFIG` beside a copy of it has to hold; None where it needs none."""
        if {self.end, self.begin} <= {None, self._vocabulary.get(END_OF_TEXT)}:
            return None
        return json.dumps(self._named, indent=2) + "\n"

    @property
    def _named(self) -> "dict[str, Any]":
        """The tokens that begin and end documents, by Hugging Face's names."""
        named = {"bos_token": self.begin, "eos_token": self.end}
        return {name: self.library.id_to_token(n) for name, n in named.items() if n is not None}

    @property
    def files(self) -> "dict[str, str]":
        """Files that stand beside a copy of it, by their names."""
        config, found = self.config, {}
        if self.template is not None:  # its tokens may name another end
            config = json.dumps({**self.template.tokens, **self._named}, indent=2) + "\n"
            found[TEMPLATE] = self.template.source
        if config is not None:
            found[TOKENIZER_CONFIG] = config
        if not {self.end, *self.ends} <= {self.end}:
            found[GENERATION] = json.dumps({"eos_token_id": self.ends}) + "\n"
        return found

    @cached_property
    def limited(self) -> LimitedTokenizer:
        """Does the work."""
        return LimitedTokenizer(self.library.to_str(), self.name)

    def encode(self, text: str, special_tokens: bool = False) -> "list[int]":
        """The tokens of a text, with those around it: what transformers makes of it.

        Args:
            special_tokens: as of `LimitedTokenizer.encode`.
        """
        return self.around(self.encode_part(text, special_tokens))

    def around(self, tokens: "list[int]") -> "list[int]":
        """A text's tokens with those that stand around it."""
        return [*self.first.tolist(), *tokens, *self.last.tolist()]

    def encode_part(self, text: str, special_tokens: bool = False) -> "list[int]":
        """The tokens of a text alone."""
        (found,) = self.limited.encode([text], special_tokens)
        tokens: list[int] = found.tolist()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.limited.decode(tokens)

    def to_str(self) -> str:
        """The content of a tokenizer.json."""
        content: str = self.library.to_str(pretty=True)
        return content

    def save(self, folder: Path) -> None:
        """Write it into a folder. Once its tokenizer.json is there, the disk has all of it."""
        for name, content in self.files.items():
            write_plain(folder / name, content + "\n" * (name == TOKENIZER_CONFIG))
            sync(folder / name)
        write_whole(folder / TOKENIZER, self.to_str() + "\n")


def _around(library: Tokenizer, known: "set[int]") -> "tuple[np.ndarray, np.ndarray]":
    """What a post-processor puts before a text and after it."""
    if library.post_processor is None:
        return np.array([], np.uint32), np.array([], np.uint32)
    count = library.post_processor.num_special_tokens_to_add(False)
    if count > MOST_AROUND:  # a template may name a list of tokens many times
        raise ValueError(f"a post-processor that puts {count} tokens around a text")
    one = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    found = library.post_processor.process(one, None, True)
    is_added = np.array(found.special_tokens_mask, bool)
    tokens = np.array(found.ids, np.uint32)
    (places,) = np.nonzero(~is_added)
    if len(places) != 1 or not known >= set(tokens[is_added].tolist()):
        raise ValueError("a post-processor that does more than to put tokens around a text")
    return tokens[: places[0]], tokens[places[0] + 1 :]

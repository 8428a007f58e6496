"""Chat templates: how a model's folder says that conversations are written.

A template is a program of somebody else's, in Jinja. It runs in a sandbox in a process of its own
(`template_process`), which the system ends where a conversation takes more time or memory than it
may.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from popxl_gpt.data import template_process
from popxl_gpt.data.limited_process import LimitedProcess, LimitError
from popxl_gpt.data.serving import FAILED, GREW
from popxl_gpt.utils.errors import DataError, unreadable
from popxl_gpt.utils.files.bounded import read_bounded, read_object

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Files that hold a template: it alone, or among what is said of a tokenizer."""
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
"""Names special tokens in older folders."""
KEPT = "hugging_face"
"""The folder beside a run's tokenizer with what came with its model."""
TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that templates know, each by its name and `_token`."""
TEMPLATE_BYTES = 2**20
CONFIG_BYTES = 2**26
SECONDS = 5
"""Time of a core that a conversation may take."""
MEMORY = 2**28
"""Bytes that one may take, and `MEMORY_PER_BYTE` more for each of its own."""
MEMORY_PER_BYTE = 2**8
LONGEST, GROWTH = 2**16, 64
"""Characters that a template may write, and more for each that it is given."""
ANSWERS = "assistant"
Message = Mapping[str, Any]


class RefusedError(ValueError):
    """A template does not write a conversation; says why."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a template writes it."""

    text: str
    spans: "list[list[int]]"
    """The characters where each answer begins and ends."""


@dataclass
class ChatTemplate:
    """A template, and what writes conversations with it."""

    source: str
    file: Path
    """Names it in errors."""
    tokens: "dict[str, str]"
    """Special tokens, by the names that templates know."""
    _process: LimitedProcess | None = field(default=None, compare=False, repr=False)

    @property
    def digest(self) -> str:
        """Tells it from others."""
        return hashlib.sha256(json.dumps([self.source, self.tokens]).encode()).hexdigest()

    def prompt(self, messages: Sequence[Message]) -> str:
        """A conversation, and what asks for the next answer.

        Raises:
            RefusedError: the template does not take it.
            DataError: the template cannot be used.
        """
        return self._render(messages, prompt=True).text

    def conversation(self, messages: Sequence[Message]) -> Rendered:
        """A conversation, and where its answers are; raises what `prompt` does."""
        return self._render(messages, spans=True)

    def _render(
        self, messages: Sequence[Message], prompt: bool = False, spans: bool = False
    ) -> Rendered:
        told = [{k: v for k, v in each.items() if v is not None} for each in messages]
        size = len(json.dumps(told))
        asked = {
            "do": "render",
            "messages": told,
            "tokens": self.tokens,
            "prompt": prompt,
            "spans": spans,
            "answers": ANSWERS,
            "longest": LONGEST + GROWTH * size,
        }
        # one that has not answered, for Ctrl-C came between, is not asked again
        process, self._process = self._process, None
        if process is None:
            process = LimitedProcess(template_process.__file__, str(self.file))
            kind, content = self._ask(process, {"do": "load", "template": self.source}, 0)
            if kind == FAILED:
                raise DataError(
                    f"{self.file}: got a chat template that is none: "
                    f"'{' '.join(content.decode().split())}'; expected Jinja as transformers reads "
                    "it. Correct it."
                )
        kind, content = self._ask(process, asked, size)
        self._process = process
        if kind == GREW:
            raise self._refused("a text many times as long as the conversation")
        if kind == FAILED:
            why = " ".join(content.decode().split()) or "no reason"
            raise RefusedError(f"got '{why}' from the chat template {self.file}")
        return Rendered(**json.loads(content))

    def _ask(
        self, process: LimitedProcess, asked: "dict[str, Any]", size: int
    ) -> "tuple[bytes, bytes]":
        try:
            return process.ask(asked, "text", SECONDS, MEMORY + size * MEMORY_PER_BYTE)
        except LimitError as error:
            raise self._refused(f"no text within {error}") from error

    def _refused(self, got: str) -> DataError:
        return DataError(
            f"{self.file}: got {got} from its chat template; expected one that writes a "
            "conversation once. Use another, or --no-chat_template."
        )


def find_template(tokenizer: Path) -> ChatTemplate | None:
    """The template of a model whose tokenizer.json this is, or beside which a run keeps what came
    with it; None where it has none.

    Raises:
        DataError: a file cannot be read, or names several of which none is meant.
    """
    folders = (tokenizer.parent, tokenizer.parent / KEPT)
    named = [_said(folder) for folder in folders]
    tokens = {key: value for values in reversed(named) for key, value in _tokens(values).items()}
    for folder, values in zip(folders, named):
        file = folder / TEMPLATE
        try:
            return ChatTemplate(read_bounded(file, TEMPLATE_BYTES).decode(), file, tokens)
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(file, error) from error
        found = _default(folder / TOKENIZER_CONFIG, values.get("chat_template"))
        if found is not None:
            return ChatTemplate(found, folder / TOKENIZER_CONFIG, tokens)
    return None


def _said(folder: Path) -> "dict[str, Any]":
    """What files say of a tokenizer, as transformers takes them together."""
    said = _object(folder / TOKENIZER_CONFIG)
    return said if "added_tokens_decoder" in said else said | _object(folder / SPECIAL_TOKENS_MAP)


def _object(file: Path) -> "dict[str, Any]":
    problem = "got no JSON object; expected one, for it tells of a tokenizer. Copy it again."
    return read_object(file, CONFIG_BYTES, problem) or {}


def _tokens(values: "dict[str, Any]") -> "dict[str, str]":
    found = {f"{name}_token": values.get(f"{name}_token") for name in TOKENS}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _default(file: Path, given: Any) -> str | None:
    """The template that is meant: the only one, or of several with names that named default."""
    if isinstance(given, list):
        known = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = known.get("default") or (next(iter(known.values()), None) if len(known) == 1 else 0)
    if given is None or isinstance(given, str) and len(given) <= TEMPLATE_BYTES:
        return given
    raise DataError(
        f"{file}: got a chat_template that is no text and no list with one named default; expected "
        f"a template. Correct it, or put it into {TEMPLATE} beside it."
    )

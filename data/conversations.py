"""Conversations: JSON lines with `prompt` and `answer`, or `messages`, of which the answers count.

A conversation is a sequence of parts, each some text and whether its tokens count as labels. A
prompt is what a model is asked, an answer what it is to say; the end of the text after the last
answer counts, for a model is to know where it ends. `messages` is the form of chat programs:
objects with `role` and `content`, of which those of the assistant count. Each is followed by a line
break, as `demo/generate.py --chat` writes them.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from popxl_gpt.config.texts import shown_text
from popxl_gpt.data.json_lines import json_objects, whole_characters
from popxl_gpt.data.masking import masked
from popxl_gpt.data.sources import Source, source_of, text_files

ROLES = ("system", "user", "assistant")
ANSWERS = "assistant"
Part = tuple[str, bool]
"""Text, and whether it counts."""
Conversation = tuple[Part, ...]


def conversation_source(
    patterns: Sequence[str], *, skip_damaged: bool = False, without: Sequence[str] = ()
) -> Source:
    """Return the conversations of files of JSON lines.

    Args:
        patterns: files, folders or globs, as of `text_source`.
        skip_damaged: leave out lines that hold none, and note them in `damaged`.
        without: as of `text_files`.
    """
    files = text_files(patterns, without)
    damaged: dict[tuple[str, int], str] = {}

    def read() -> Iterator[Conversation]:
        note = damaged if skip_damaged else None
        for path in files:
            yield from json_objects(path, conversation_of, EXPECTED, note)

    return source_of(
        files,
        "conversation",
        read,
        {"documents": "conversations", "skip_damaged": skip_damaged},
        damaged,
        is_masked=True,
    )


EXPECTED = (
    "a JSON object with texts 'prompt' and 'answer', or with 'messages', a list of objects with "
    f"'role' ({', '.join(ROLES)}) and 'content'. Correct the line, or leave such lines out with "
    "--skip_damaged"
)


def conversation_of(found: dict[str, Any]) -> Conversation:
    """The parts of a JSON object. ValueError says what it has instead."""
    if "messages" in found:
        return _of_messages(found["messages"])
    texts = [found.get(name) for name in ("prompt", "answer")]
    if not all(isinstance(text, str) for text in texts):
        names = ", ".join(found) or "none"
        raise ValueError(f"got no texts 'prompt' and 'answer' (fields: {shown_text(names)})")
    prompt, answer = (whole_characters(str(text)) for text in texts)
    if not answer:
        raise ValueError("got an empty answer")
    return (prompt, False), (answer, True)


def _of_messages(messages: Any) -> Conversation:
    if not isinstance(messages, list):
        raise ValueError(f"got messages {shown_text(json.dumps(messages))}")
    parts: list[Part] = []
    for message in messages:
        role, content = (
            message.get(name) if isinstance(message, dict) else None for name in ("role", "content")
        )
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"got message {shown_text(json.dumps(message))}")
        parts.append((whole_characters(content) + "\n", role == ANSWERS))
    if not any(counts for _, counts in parts):
        raise ValueError(f"got messages without one of the {ANSWERS}")
    return tuple(parts)


def text_of(conversation: Conversation) -> str:
    """All of its text."""
    return "".join(text for text, _ in conversation)


class RecordPacker:
    """Puts whole conversations into records, one after the other; what is left of a record is
    padding, which does not count.

    Iterating yields int32 [1, sequence_length + 1] blocks with marked tokens (see `masking`). A
    conversation that is longer than a record is cut into several, each of which begins with the
    last token of the one before, so that every token but the first is a label; a piece in which no
    label counts is left out.

    Args:
        conversations: uint32 [tokens] each, marked tokens seen as such.
        padding: a token.
    """

    def __init__(
        self, conversations: Iterable[np.ndarray], sequence_length: int, padding: int
    ) -> None:
        self.documents = 0
        self.tokens = 0
        self.cut = 0
        """Conversations that were longer than a record."""
        self._conversations = conversations
        self._length = sequence_length + 1
        self._padding = masked(np.array([padding]), np.array([False]))

    def __iter__(self) -> Iterator[np.ndarray]:
        waiting: list[np.ndarray] = []
        room = self._length
        for tokens in self._conversations:
            self.documents += 1
            self.tokens += tokens.size
            self.cut += tokens.size > self._length
            for piece in self._pieces(tokens.view(np.int32)):
                if piece.size > room:
                    yield self._record(waiting)
                    waiting, room = [], self._length
                waiting.append(piece)
                room -= piece.size
        if waiting:
            yield self._record(waiting)

    def _pieces(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, tokens.size - 1, self._length - 1):
            piece = tokens[start : start + self._length]
            if (piece[1:] >= 0).any():
                yield piece

    def _record(self, pieces: list[np.ndarray]) -> np.ndarray:
        filled = np.concatenate(pieces)
        left = np.repeat(self._padding, self._length - filled.size)
        return np.concatenate([filled, left])[None]

"""Conversations: rows with `prompt` and `answer`, or `messages`, of which the answers count.

A conversation is a sequence of parts, each some text and whether its tokens count as labels. A
prompt is what a model is asked, an answer what it is to say; the end of the text after the last
answer counts, for a model is to know where it ends. `messages` is the form of chat programs:
objects with `role` and `content`, of which those of the assistant count. Each is followed by a line
break, as `demo/generate.py --chat` writes them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.data.delimited import is_delimited
from popxl_gpt.data.json_lines import whole_characters
from popxl_gpt.data.left_out import LeftOut
from popxl_gpt.data.masking import masked
from popxl_gpt.data.rows import Documents
from popxl_gpt.data.sources import Source, rows_of, source_of, text_files
from popxl_gpt.data.tables import is_table
from popxl_gpt.utils.texts import shown_text

ROLES = ("system", "user", "assistant")
ANSWERS = "assistant"
PAIR = ("prompt", "answer")
Part = tuple[str, bool]
"""Text, and whether it counts."""
Conversation = tuple[Part, ...]


def conversation_source(
    patterns: Sequence[str], *, skip_damaged: bool = False, without: Sequence[str] = ()
) -> Source:
    """Return the conversations of files of JSON, CSV files and tables.

    Args:
        patterns: files, folders or globs, as of `text_source`.
        skip_damaged: leave out rows that hold none, and files that cannot be read.
        without: as of `text_files`.
    """
    left_out = LeftOut(skip_damaged)

    def read(path: Path) -> Iterator[Conversation]:
        is_json = not is_table(path) and not is_delimited(path)
        return rows_of(path, CONVERSATIONS, left_out, is_json)

    return source_of(
        text_files(patterns, without),
        "conversation",
        read,
        {"documents": "conversations", "skip_damaged": skip_damaged},
        left_out,
        is_masked=True,
    )


def conversation_of(found: dict[str, Any]) -> Conversation | None:
    """The parts of a row; None where it is null. ValueError says what it has instead."""
    messages, prompt, answer = (found.get(name) for name in ("messages", *PAIR))
    if messages is not None:
        return _of_messages(messages)
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise ValueError("got an empty answer")
        return (whole_characters(prompt), False), (whole_characters(answer), True)
    has_pair = found.keys() >= set(PAIR)
    if has_pair and None in (prompt, answer) or "messages" in found and not has_pair:
        return None
    names = ", ".join(found) or "none"
    raise ValueError(f"got no texts 'prompt' and 'answer' (fields: {shown_text(names)})")


def _columns(texts: Mapping[str, bool]) -> list[str]:
    """The columns of conversations, of those that there are."""
    has_pair = all(texts.get(name) for name in PAIR)
    found = ["messages"] * ("messages" in texts) + [name for name in PAIR if name in texts]
    return found if "messages" in texts or has_pair else []


def _has_both(found: dict[str, Any]) -> bool:
    """Whether a row has messages, and a prompt or an answer beside them."""
    has_pair = any(found.get(name) is not None for name in PAIR)
    return has_pair and found.get("messages") is not None


_FORMS = (
    "texts 'prompt' and 'answer', or with 'messages', a list of objects with 'role' "
    f"({', '.join(ROLES)}) and 'content'"
)
CONVERSATIONS: Documents[Conversation] = Documents(
    read=conversation_of,
    columns=_columns,
    expected=f"with {_FORMS}. Correct it, or leave out what is damaged with --skip_damaged",
    lack="texts 'prompt' and 'answer', nor 'messages'",
    expected_columns=f"columns with {_FORMS}. Rename them",
    is_choice=_has_both,
)


def _of_messages(messages: Any) -> Conversation:
    if not isinstance(messages, list):
        raise ValueError(f"got messages {_shown(messages)}")
    parts: list[Part] = []
    for message in messages:
        role, content = (
            message.get(name) if isinstance(message, dict) else None for name in ("role", "content")
        )
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"got message {_shown(message)}")
        parts.append((whole_characters(content) + "\n", role == ANSWERS))
    if not any(counts for _, counts in parts):
        raise ValueError(f"got messages without one of the {ANSWERS}")
    return tuple(parts)


def _shown(value: Any) -> str:
    return shown_text(json.dumps(value, default=str))


def text_of(document: "str | Conversation") -> str:
    """All text of a document."""
    return document if isinstance(document, str) else "".join(text for text, _ in document)


def packed(
    conversations: Iterable[np.ndarray], sequence_length: int, padding: int
) -> Iterator[np.ndarray]:
    """Put whole conversations into records, one after the other; what is left of a record is
    padding, which does not count.

    Yields int32 [1, sequence_length + 1] blocks with marked tokens (see `masking`). A conversation
    that is longer than a record is cut into several, each of which begins with the last token of
    the one before, so that every token but the first is a label; a piece in which no label counts
    is left out.

    Args:
        conversations: uint32 [tokens] each, marked tokens seen as such.
        padding: a token.
    """
    shape = (1, sequence_length + 1)
    blank = masked(np.full(shape, padding), np.zeros(shape, np.bool_))
    record, used = blank.copy(), 0
    for tokens in conversations:
        for piece in _pieces(tokens.view(np.int32), sequence_length):
            if used + piece.size > blank.size:
                yield record
                record, used = blank.copy(), 0
            record[0, used : used + piece.size] = piece
            used += piece.size
    if used:
        yield record


def _pieces(tokens: np.ndarray, sequence_length: int) -> Iterator[np.ndarray]:
    for start in range(0, tokens.size - 1, sequence_length):
        piece = tokens[start : start + sequence_length + 1]
        if (piece[1:] >= 0).any():
            yield piece

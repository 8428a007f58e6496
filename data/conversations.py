"""Conversations: rows with `prompt` and `answer`, or `messages`, of which the answers count.

A conversation is a sequence of parts, each some text and whether its tokens count as labels. A
prompt is what a model is asked, an answer what it is to say; the end of the text after the last
answer counts, for a model is to know where it ends. `messages` is the form of chat programs:
objects with `role` and `content`, of which those of the assistant count; `conversations` is the
same with `from` and `value`. A chat template writes them, or else each is followed by a line break,
as `demo/generate.py --chat` writes them, too.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.utils.texts import shown_text

ROLES = ("system", "user", "assistant")
ANSWERS = "assistant"
PAIR = ("prompt", "answer")
Part = tuple[str, bool]
"""Text, and whether it counts."""
Conversation = tuple[Part, ...]
Messages = list[dict[str, Any]]
LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Fields that hold messages, and the fields of each for who says what."""
NAMES = {"human": "user", "gpt": ANSWERS, "chatgpt": ANSWERS, "bot": ANSWERS}
"""What roles are called where `from` says them."""


class Written(tuple[Part, ...]):
    """A conversation as a chat template writes it: it has all that stands around texts, and spells
    special tokens.
    """


def conversation_source(
    patterns: Sequence[str],
    *,
    skip_damaged: bool = False,
    without: Sequence[str] = (),
    tokenizer: TextTokenizer | None = None,
) -> Source:
    """Return the conversations of files of JSON, CSV files and tables.

    Args:
        patterns: files, folders or globs, as of `text_source`.
        skip_damaged: leave out rows that hold none, and files that cannot be read.
        without: as of `text_files`.
        tokenizer: its chat template writes them, where it has one.
    """
    left_out = LeftOut(skip_damaged)
    template = None if tokenizer is None else tokenizer.template
    documents = CONVERSATIONS
    if tokenizer is not None and template is not None:
        documents = replace(CONVERSATIONS, read=lambda found: written(found, tokenizer))

    def read(path: Path) -> Iterator[Conversation]:
        is_json = not is_table(path) and not is_delimited(path)
        return rows_of(path, documents, left_out, is_json)

    return source_of(
        text_files(patterns, without),
        "conversation",
        read,
        {
            "documents": "conversations",
            "skip_damaged": skip_damaged,
            **({} if template is None else {"template": template.digest}),
        },
        left_out,
        is_masked=True,
    )


def conversation_of(found: dict[str, Any]) -> Conversation | None:
    """The parts of a row; None where it is null. ValueError says what it has instead."""
    messages = messages_of(found)
    if messages is not None:
        return tuple((each["content"] + "\n", each["role"] == ANSWERS) for each in messages)
    pair = _pair(found)
    return None if pair is None else ((pair[0], False), (pair[1], True))


def written(found: dict[str, Any], tokenizer: TextTokenizer) -> Written | None:
    """A row as a tokenizer's template writes it; None and ValueError as of `conversation_of`."""
    messages = messages_of(found)
    if messages is None:
        pair = _pair(found)
        if pair is None:
            return None
        messages = [{"role": r, "content": text} for r, text in zip(("user", ANSWERS), pair)]
    for each in messages:
        special = tokenizer.special_in(each["content"])
        if special is not None:
            raise ValueError(f"got a message that spells the special token {shown_text(special)}")
    assert tokenizer.template is not None
    made = tokenizer.template.conversation(messages)
    parts, place = [], 0
    for begin, end in made.spans:
        parts += [(made.text[place:begin], False), (made.text[begin:end], True)]
        place = end
    if not any(text for text, counts in parts if counts):
        raise ValueError("got messages of which the chat template writes no answer")
    return Written([*parts, (made.text[place:], False)])


def _pair(found: dict[str, Any]) -> "tuple[str, str] | None":
    """A prompt and its answer; None where the row is null."""
    prompt, answer = (found.get(name) for name in PAIR)
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise ValueError("got an empty answer")
        return whole_characters(prompt), whole_characters(answer)
    has_pair = found.keys() >= set(PAIR)
    if has_pair and None in (prompt, answer) or found.keys() & LISTS.keys() and not has_pair:
        return None
    names = ", ".join(found) or "none"
    raise ValueError(f"got no texts 'prompt' and 'answer' (fields: {shown_text(names)})")


def _columns(texts: Mapping[str, bool]) -> list[str]:
    """The columns of conversations, of those that there are."""
    has_pair = all(texts.get(name) for name in PAIR)
    lists = [name for name in LISTS if name in texts]
    found = [*lists, *(name for name in PAIR if name in texts)]
    return found if lists or has_pair else []


def _has_both(found: dict[str, Any]) -> bool:
    """Whether a row has messages, and a prompt or an answer beside them."""
    has_pair = any(found.get(name) is not None for name in PAIR)
    return has_pair and any(found.get(name) is not None for name in LISTS)


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


def messages_of(found: dict[str, Any]) -> Messages | None:
    """The messages of a row, by `role` and `content`; None where it has none. ValueError says what
    it has instead.
    """
    named = next((name for name in LISTS if found.get(name) is not None), None)
    if named is None:
        return None
    messages, parts = found[named], []
    if not isinstance(messages, list):
        raise ValueError(f"got {named} {_shown(messages)}")
    for message in messages:
        role, content = (
            message.get(name) if isinstance(message, dict) else None for name in LISTS[named]
        )
        if named != "messages" and isinstance(role, str):
            role = NAMES.get(role, role)
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"got message {_shown(message)}")
        parts.append({"role": role, "content": whole_characters(content)})
    if not any(each["role"] == ANSWERS for each in parts):
        raise ValueError(f"got {named} without one of the {ANSWERS}")
    return parts


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

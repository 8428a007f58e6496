"""A chat template in a process of its own, which the system ends where a request takes more time or
memory than it may: `data/chat_template.py` starts it, and asks it.

What templates find is what transformers gives them: Jinja's sandbox, in which nothing is changed
but what the template makes; blocks trimmed; `raise_exception`, `strftime_now`, `tojson`, `break`
and `continue`; and `{% generation %}` around what the assistant says.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from popxl_gpt.data.serving import GREW, Answer, serve

RENDERED = b"r"
"""An answer that holds JSON: `text`, and `spans`, the characters where each answer begins and
ends.
"""
OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Stand around what `{% generation %}` holds until the text is whole."""


class _Generation(Extension):
    """The tag `generation`."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Call `_marked` with what the tag holds."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _load(asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
    global _template, _marks
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    _template = environment.from_string(asked["template"])
    _marks = environment.parse(asked["template"]).find(nodes.ExtensionAttribute) is not None
    return RENDERED, b""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: "int | None" = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON in which nothing is escaped for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


class _TooLongError(Exception):
    """A template wrote more than it may."""


def _rendered(asked: "dict[str, Any]", messages: "list[Any]", prompt: bool) -> str:
    pieces, left = [], asked["longest"]
    given = {**asked["tokens"], "messages": messages, "add_generation_prompt": prompt}
    for piece in _template.generate(tools=None, documents=None, **given):
        left -= len(piece)
        if left < 0:
            raise _TooLongError
        pieces.append(piece)
    return "".join(pieces)


def _render(asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
    """A conversation as text, and where its answers are if that is asked for."""
    messages = asked["messages"]
    try:
        text = _rendered(asked, messages, asked["prompt"])
        if _marks:
            text, spans = _parted(text)
        else:
            spans = _spans(asked, text) if asked["spans"] else []
    except _TooLongError:
        return GREW, b""
    return RENDERED, json.dumps({"text": text, "spans": spans}).encode()


def _parted(marked: str) -> "tuple[str, list[tuple[int, int]]]":
    """The text without marks, and what stands between them."""
    spans = []
    text, *others = marked.split(OPEN)
    if len(others) != marked.count(CLOSE) or any(CLOSE not in other for other in others):
        raise TemplateError("a message with characters that stand for nothing, U+E0F0 or U+E0F1")
    for other in others:
        inside, _, after = other.partition(CLOSE)
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _spans(asked: "dict[str, Any]", text: str) -> "list[tuple[int, int]]":
    """The places of answers in a text: each from what the template writes to ask for it to what
    it writes once it is there.
    """
    messages, spans = asked["messages"], []
    for number, message in enumerate(messages):
        if message["role"] != asked["answers"]:
            continue
        before = _rendered(asked, messages[:number], True)
        after = _rendered(asked, messages[: number + 1], False)
        if not after.startswith(before) or not text.startswith(after):
            raise TemplateError(
                f"message {number + 1} is written in another way where it is asked for, or where "
                "others follow it, so nothing tells where it begins and ends"
            )
        spans.append((len(before), len(after)))
    return spans


_template: Any
_marks: bool
"""Whether the template says itself where answers are."""
_ANSWERS: "dict[str, Answer]" = {"load": _load, "render": _render}


if __name__ == "__main__":
    serve(_ANSWERS)

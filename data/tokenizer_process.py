"""A tokenizer in a process of its own, which the system ends where a request takes more time or
memory than it may: `data/limited_tokenizer.py` starts it, and asks it.
"""

from array import array
from typing import Any

from tokenizers import Tokenizer

from popxl_gpt.data.serving import GREW, Answer, serve

TOKENS, TEXT = b"i", b"t"
"""What an answer holds: the count of each text's tokens, all of them, and where each begins and
ends if that is asked for; or text.
"""
SMALL = 64
"""Bytes, at least, of which an answer may be so many times."""


def text_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """Let a tokenizer take all of a text and no more, as text, whatever special tokens it spells.

    Returns the same one.
    """
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _load(asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
    global _tokenizer
    _tokenizer = text_as_text(Tokenizer.from_str(asked["tokenizer"]))
    return TEXT, b""


def _encode(asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
    _tokenizer.encode_special_tokens = not asked["special_tokens"]
    encode = _tokenizer.encode_batch if asked["places"] else _tokenizer.encode_batch_fast
    found = encode(asked["texts"], add_special_tokens=False)
    counts, tokens, places = array("Q"), array("I"), array("I")
    for text, encoding in zip(asked["texts"], found):
        ids = encoding.ids
        if len(ids) > asked["growth"] * max(SMALL, len(text.encode("utf-8", "surrogatepass"))):
            return GREW, b""
        counts.append(len(ids))
        tokens.extend(ids)
        if asked["places"]:
            places.extend(place for pair in encoding.offsets for place in pair)
    return TOKENS, counts.tobytes() + tokens.tobytes() + places.tobytes()


def _decode(asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
    tokens = asked["tokens"]
    text = _tokenizer.decode(tokens)
    size = sum(len(_tokenizer.id_to_token(token) or "") for token in tokens)
    if len(text) > asked["growth"] * max(SMALL, size):
        return GREW, b""
    return TEXT, text.encode()


_tokenizer: Tokenizer
_ANSWERS: "dict[str, Answer]" = {
    "load": _load,
    "encode": _encode,
    "decode": _decode,
}


if __name__ == "__main__":
    serve(_ANSWERS)

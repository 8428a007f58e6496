"""A tokenizer in a process of its own, which the system ends where a request takes more time or
memory than it may: `data/limited_tokenizer.py` starts it, with this file alone, and asks it.

A request is JSON; an answer a letter and bytes. Each has its length before it, 8 bytes.
"""

import json
import os
import re
import resource
import signal
from array import array
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

TOKENS, TEXT, FAILED, GREW = b"i", b"t", b"f", b"g"
"""What an answer holds: the count of each text's tokens and all of them, text, why there is none;
or nothing, for it has more than the request allows.
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
    found = _tokenizer.encode_batch_fast(asked["texts"], add_special_tokens=False)
    counts, tokens = array("Q"), array("I")
    for text, encoding in zip(asked["texts"], found):
        ids = encoding.ids
        if len(ids) > asked["growth"] * max(SMALL, len(text.encode("utf-8", "surrogatepass"))):
            return GREW, b""
        counts.append(len(ids))
        tokens.extend(ids)
    return TOKENS, counts.tobytes() + tokens.tobytes()


def _decode(asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
    tokens = asked["tokens"]
    text = _tokenizer.decode(tokens)
    size = sum(len(_tokenizer.id_to_token(token) or "") for token in tokens)
    if len(text) > asked["growth"] * max(SMALL, size):
        return GREW, b""
    return TEXT, text.encode()


_tokenizer: Tokenizer
_ANSWERS: "dict[str, Callable[[dict[str, Any]], tuple[bytes, bytes]]]" = {
    "load": _load,
    "encode": _encode,
    "decode": _decode,
}


def _limit(seconds: int, memory: int) -> None:
    """Let this process work so many seconds more, and have so many bytes more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            found = re.search(r"VmData:\s*(\d+) kB", file.read())
    except FileNotFoundError:  # only Linux counts what is asked of the system as data
        return
    if found is not None:
        _lower(resource.RLIMIT_DATA, int(found[1]) * 1024 + memory)


def _lower(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Answer until nobody asks."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever asks decides when that is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(0, "rb") as requests, os.fdopen(1, "wb") as answers:
        while len(head := requests.read(8)) == 8:
            asked = json.loads(requests.read(int.from_bytes(head, "little")))
            _limit(asked["seconds"], asked["memory"])
            try:
                kind, content = _ANSWERS[asked["do"]](asked)
            except MemoryError:
                os.abort()  # as where the library finds none
            # the tokenizers package raises nothing narrower, and panics are no Exception
            except BaseException as error:
                kind, content = FAILED, str(error).encode("utf-8", "replace")
            answers.write(len(kind + content).to_bytes(8, "little") + kind + content)
            answers.flush()


if __name__ == "__main__":
    main()

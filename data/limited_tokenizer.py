"""Tokenizers that may not take more time and memory than their texts are worth.

A tokenizer is a file of somebody else's. Its normalizers may double a text forty times, and its
patterns try all ways there are. One whose steps are known to take about as long as the text does
its work here; any other in a process of its own, which the system ends.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGXCPU
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from popxl_gpt.data import tokenizer_process
from popxl_gpt.data.tokenizer_process import FAILED, GREW, text_as_text
from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.units import bytes_text

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
_START = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
_START += "runpy.run_path(sys.argv[2], run_name='__main__')"


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
        self._process: _Process | None = None

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
        asked = {"do": "encode", "texts": list(texts), "special_tokens": special_tokens}
        content = self._ask(asked, sum(map(len, texts)), "tokens")
        counts = np.frombuffer(content, np.uint64, len(texts))
        ends = np.cumsum(counts.astype(np.int64))[:-1]
        return np.split(np.frombuffer(content, np.uint32, offset=counts.nbytes), ends)

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
            process = _Process()
            load = {"do": "load", "tokenizer": self._tokenizer}
            self._answer(process, load, len(self._tokenizer), "vocabulary")
        content = self._answer(process, asked, size, what)
        self._process = process
        return content

    def _answer(self, process: "_Process", asked: "dict[str, Any]", size: int, what: str) -> bytes:
        seconds, memory = SECONDS + size // BYTES_PER_SECOND, MEMORY + size * MEMORY_PER_BYTE
        limits = {"seconds": seconds, "memory": memory, "growth": GROWTH}
        kind, content = process.ask({**asked, **limits})
        if kind == FAILED:
            raise self._failed(what, content.decode())
        if kind == GREW:
            raise self._refused(f"{what} of more than {GROWTH} times the size of what it is given")
        if not kind:
            code = process.code()
            if code == -SIGKILL:  # which none of its limits does
                raise DataError(
                    f"{self.name}: got no {what}, for the process that makes them was killed; "
                    "expected it to go on. Perhaps the machine's memory ran out. Start again."
                )
            is_late = code == -SIGXCPU
            within = f"{seconds} s" if is_late else f"{bytes_text(memory)} of memory"
            raise self._refused(f"no {what} within {within}")
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


class _Process:
    """One of `tokenizer_process`. It ends with this one."""

    def __init__(self) -> None:
        words = [json.dumps(sys.path), str(Path(tokenizer_process.__file__))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # panics write there
        )
        self.end: Callable[[], Any] = weakref.finalize(self, _end, self._process)

    def ask(self, asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
        """What an answer is, and its content; nothing where the process has ended."""
        request = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(len(request).to_bytes(8, "little") + request)
            requests.flush()
        except BrokenPipeError:
            return b"", b""
        size = int.from_bytes(answers.read(8), "little")
        content = answers.read(size)
        if not size or len(content) < size:
            return b"", b""
        return content[:1], content[1:]

    def code(self) -> int:
        """The exit status of one that has ended."""
        found = self._process.wait()
        self.end()
        return found


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        try:
            stream.close()
        except BrokenPipeError:  # what was not written is not wanted any more
            pass

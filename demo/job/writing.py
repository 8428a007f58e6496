"""Texts that a model writes: token by token, and as text for readers."""

from collections.abc import Callable, Sequence

import numpy as np

from popxl_gpt.config.schema import Model
from popxl_gpt.data.text_tokenizer import END_OF_TEXT, TextTokenizer
from popxl_gpt.execution.inference.generation import CachedModel
from popxl_gpt.execution.inference.sampling import Sampling, choose
from popxl_gpt.utils.errors import NotFiniteError
from popxl_gpt.utils.runtime import gather
from popxl_gpt.utils.units import counted

UNFINISHED = "\ufffd"
"""What stands for bytes that are no whole character."""
CONTEXT, BYTES = 8, 3
"""Tokens of a prompt that decide how the next ones look, and bytes of a character, each of which
may be a token, before its last one.
"""
NOT_FINITE = -1
"""Stands for a token that cannot be chosen."""
OnText = Callable[[int, str], None]
"""Gets a text's number, and what is new of it."""
OnEnd = Callable[[int], None]
"""Gets a text's number."""


class TextStream:
    """The text of tokens that come one after the other: whole characters, up to a text that ends
    it.

    Args:
        prompt: tokens before; their text is not given again.
        stop: texts that end it, none of them empty. They are not given.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self.text = ""
        """What was given so far."""
        self.is_stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt)
        self._context, self._read = self._whole_context(), len(self._tokens)
        """The first of the tokens that decide how the next ones look, and the first of these."""
        self._held = ""
        """May be the beginning of a stop."""

    def append(self, token: int) -> str:
        """Add a token. Returns the text that is certain now."""
        self._tokens.append(token)
        new = self._new_text()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return self._give(new)

    def end(self) -> str:
        """What is left when no more tokens come."""
        return "" if self.is_stopped else self._give(self._new_text(), is_end=True)

    def _whole_context(self) -> int:
        """The first of a prompt's last tokens, at the beginning of a character if there is one."""
        first = max(0, len(self._tokens) - CONTEXT)
        places = range(first, max(0, first - BYTES) - 1, -1)
        return min(places, key=lambda n: self._tokenizer.decode(self._tokens[n:]).count(UNFINISHED))

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._read])
        return self._tokenizer.decode(self._tokens[self._context :])[len(before) :]

    def _give(self, new: str, is_end: bool = False) -> str:
        self._held += new
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        self.is_stopped = bool(found)
        kept = 0 if found or is_end else max(map(self._begun, self._stop), default=0)
        end = min(found) if found else len(self._held) - kept
        given, self._held = self._held[:end], self._held[end:]
        self.text += given
        return given

    def _begun(self, stop: str) -> int:
        """Characters of a stop that the text may end with."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)


def end_of_documents(
    tokenizer: TextTokenizer, model: Model, ends: Sequence[int] = ()
) -> int | None:
    """The token that ends documents: the tokenizer's, or else that which a model of Hugging Face's
    has brought; None where there is none.

    Args:
        ends: as of `write`.
    """
    if tokenizer.end is not None:
        return tokenizer.end
    return next(iter(ends), model.end_of_text or None)


def write(
    model: CachedModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    stop: Sequence[str] = (),
    on_text: OnText = lambda number, text: None,
    on_end: OnEnd = lambda number: None,
    first_number: int = 0,
    ends: Sequence[int] = (),
) -> "list[str]":
    """What a model writes after each of some prompts, all at the same time.

    A text ends after so many tokens, before a token that ends documents, and before a `stop`. The
    same seed gives the same texts. All processes of a program must call it.

    Args:
        prompts: token ids, at least one of each, no more prompts than the model takes.
        on_text: called with text as it is made.
        on_end: called with texts to which nothing more comes.
        first_number: of these texts: each has a number, which decides what it draws.
        ends: other tokens that end a text, as the one that ends documents does.
    Raises:
        NotFiniteError: the model's logits are not finite; says where.
    """
    of_text = tokenizer.get_vocab().get(END_OF_TEXT)
    ending = {end_of_documents(tokenizer, model.config.model), of_text, *tokenizer.ends, *ends}
    classes = tokenizer.classes
    streams = [TextStream(tokenizer, prompt, stop) for prompt in prompts]
    randoms = [sampling.random(first_number + number) for number in range(len(prompts))]
    is_open = [True] * len(prompts)
    logits = model.start(prompts)
    for count in range(1, tokens + 1):
        own = [
            [
                number,
                choose(row, sampling, randoms[number]) if np.isfinite(row).all() else NOT_FINITE,
            ]
            for number, row in zip(model.own, logits[:, :classes])
            if number < len(prompts) and is_open[number]
        ]
        chosen = [0] * len(prompts)
        for theirs in gather(own):
            for number, token in theirs:
                chosen[number] = token
        if NOT_FINITE in chosen:
            raise NotFiniteError(
                f"logits: got numbers that are not finite after {counted(count - 1, 'token')} of "
                f"text {chosen.index(NOT_FINITE) + 1}; expected finite ones. First in "
                f"{model.where_not_finite()}. Use an older checkpoint, or --precision float32."
            )
        for number in [number for number, is_so in enumerate(is_open) if is_so]:
            stream = streams[number]
            if chosen[number] not in ending:
                on_text(number, stream.append(chosen[number]))
            if chosen[number] in ending or stream.is_stopped or count == tokens:
                on_text(number, stream.end())
                on_end(number)
                is_open[number] = False
                model.forget(number)
        if not any(is_open):
            break
        logits = model.append(chosen)
    return [stream.text for stream in streams]

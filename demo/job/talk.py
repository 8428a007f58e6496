"""Conversations with a model: what it is given to answer, as its chat template writes it, or as
lines where it has none.
"""

from collections.abc import Callable
from typing import Any

from popxl_gpt.data.chat_template import ANSWERS, RefusedError
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.runtime import gather
from popxl_gpt.utils.texts import encoding_problem, shown_text


class Lines:
    """A conversation as lines, each with a line break after it.

    Args:
        tokens: of a text that stands after others.
        first: tokens that stand before all.
        system: is said before.
    """

    def __init__(
        self, tokens: "Callable[[str], list[int]]", first: "list[int]", system: str | None
    ):
        self._tokens = tokens
        self._said = [*first, *([] if system is None else tokens(system + "\n"))]

    def ask(self, text: str) -> "list[int]":
        """All that was said, and this."""
        self._said += self._tokens(text + "\n")
        return self._said

    def answered(self, text: str) -> None:
        """Note what the model has said."""
        self._said += self._tokens(text + "\n")


class Templated:
    """A conversation as a tokenizer's chat template writes it.

    Args:
        special_tokens: take those that messages spell as tokens; else such messages are refused.
        system: is said before.
    """

    def __init__(self, tokenizer: TextTokenizer, special_tokens: bool, system: str | None):
        self._tokenizer, self._special_tokens = tokenizer, special_tokens
        self._messages: list[dict[str, Any]] = []
        if system is not None:
            self._add("system", system)

    def ask(self, text: str) -> "list[int]":
        """The tokens of all that was said, of this, and of what asks for an answer; those of
        instance 0, for a template may look at the clock.
        """
        self._add("user", text)
        template = self._tokenizer.template
        assert template is not None
        try:
            written = template.prompt(self._messages)
        except RefusedError as error:
            raise UserError(
                f"--chat: {error}; expected one that takes this conversation. Leave out --system, "
                "or give --no-chat_template."
            ) from error
        found = self._tokenizer.encode_part(written, special_tokens=True)
        tokens: list[int] = gather(found)[0]
        return tokens

    def answered(self, text: str) -> None:
        """Note what the model has said."""
        self._messages.append({"role": ANSWERS, "content": text})

    def _add(self, role: str, text: str) -> None:
        problem = encoding_problem(text)
        if problem is not None:
            raise UserError(f"--chat: {problem}. Convert it.")
        special = None if self._special_tokens else self._tokenizer.special_in(text)
        if special is not None:
            raise UserError(
                f"--chat: got a message that spells the special token {shown_text(special)}; "
                "expected text. Write it in another way, or give --special_tokens."
            )
        self._messages.append({"role": role, "content": text})

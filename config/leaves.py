"""The leaves of a record of settings, read from its dataclasses: type, range, default and help text
of each.
"""

import ast
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from popxl_gpt.config.bounds import (
    Bytes,
    Largest,
    Needs,
    NoNumbers,
    Range,
    as_computed,
)
from popxl_gpt.config.numbers import KINDS
from popxl_gpt.config.schema import Config
from popxl_gpt.utils.files.bounded import shortened
from popxl_gpt.utils.texts import (
    IsFreeText,
    IsPath,
    encoding_problem,
    path_text,
    text_of_path,
    text_problem,
)

TRUE_WORDS = {"true", "yes", "on", "1"}
FALSE_WORDS = {"false", "no", "off", "0"}
NONE_WORDS = {"none", "null", ""}
"""Words for values: files and the command line mean the same by them."""
LARGEST = 2**63 - 1
"""No setting is larger: numbers of programs and files have 64 bits."""
FLOAT32_LARGEST = 3.4028234663852886e38
FLOAT32_SMALLEST = 2.0**-126
"""Programs compute in float32, whatever a setting's text says. What is nearer to 0 may become 0."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One setting."""

    section: str
    """Field of the parent record that holds it; empty at the top."""
    name: str
    kind: type
    """bool, int, float or str."""
    default: Any
    record: type
    """The dataclass whose field it is."""
    optional: bool = False
    is_list: bool = False
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """Texts that may stand for a number."""
    is_path: bool = False
    is_free_text: bool = False
    bound: Range | Bytes | None = None
    largest: int | None = None
    needs: Needs | None = None
    decides_numbers: bool = True

    @property
    def doc(self) -> str:
        """Its help text, read from the source: that takes longer than the rest of a start."""
        return field_docstrings(self.record)[self.name]

    @property
    def path(self) -> str:
        """Dotted name, such as `model.layers`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    def of(self, config: Config) -> Any:
        """Its value in a configuration."""
        return getattr(getattr(config, self.section) if self.section else config, self.name)

    @property
    def expected(self) -> str:
        """The values that are accepted, in words."""
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        else:
            words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[
                self.kind
            ]
            if self.bound is not None:
                words += f" {self.bound}" if isinstance(self.bound, Bytes) else f", {self.bound}"
        if self.is_list:
            is_text = self.kind is str
            words = "a list of texts, none of them empty" if is_text else f"a list, of each {words}"
        words = " or ".join([words, *self.words])
        return f"{words}, or none" if self.optional else words

    def check(self, value: Any) -> Any:
        """Return the value in its final type.

        Raises:
            ValueError: if it is of another type or out of range; says what is given and expected.
        """
        if self.is_path and isinstance(value, Path):
            value = text_of_path(value)
        word = value.lower() if isinstance(value, str) else None
        if self.optional and (value is None or word in NONE_WORDS - {""}):
            return None
        if self.kind is bool and word in TRUE_WORDS | FALSE_WORDS:
            return word in TRUE_WORDS
        if word in self.choices:
            return word
        if isinstance(value, str) and value in self.words:
            return value
        is_several = self.is_list and isinstance(value, (list, tuple))
        if is_several and self.kind is not str:
            single = replace(self, is_list=False, optional=False)
            return tuple(single.check(item) for item in value)
        if is_several and all(isinstance(item, str) and item for item in value):
            return tuple(self._checked_text(item) for item in value)
        if self.is_list or (isinstance(value, int) and abs(value) > LARGEST):
            raise self._refusal(value)
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) <= sys.float_info.max else math.inf
        if isinstance(self.bound, Bytes) and isinstance(value, str):
            return self.parse(value)
        kinds = (int, float) if self.bound == Bytes(or_share=True) else self.kind
        is_kind = isinstance(value, kinds) and isinstance(value, bool) == (self.kind is bool)
        if not is_kind or not self._is_in_range(value):
            raise self._refusal(value)
        return self._checked_text(value) if self.kind is str else value

    def is_beyond(self, value: Any) -> bool:
        """Whether a value is larger than that of any run."""
        return self.largest is not None and value is not None and value > self.largest

    def _checked_text(self, text: str) -> str:
        """A text that every output and file takes; for a path, with `~` expanded."""
        try:
            if self.is_path:
                return path_text(text)
            problem = encoding_problem(text) if self.is_free_text else text_problem(text)
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            raise ValueError(f"{self.name}: {problem}. Correct it.")
        return text

    def parse(self, text: str) -> Any:
        """Return the value that a word of the command line stands for; raises ValueError as `check`
        does.
        """
        if self.optional and text.lower() in NONE_WORDS:
            return None
        if self.kind not in KINDS or text in self.words:
            return self.check(text)
        try:
            read = self.bound.read if isinstance(self.bound, Bytes) else KINDS[self.kind]
            value = read(text)
        except (ValueError, OverflowError):
            raise self._refusal(text) from None
        return self.check(value)

    def parse_list(self, words: Sequence[str]) -> tuple[Any, ...]:
        """What several words stand for; raises as `check` does."""
        if self.kind is str:
            return tuple(self.check(words))
        single = replace(self, is_list=False, optional=False)
        return tuple(single.parse(word) for word in words)

    def _is_in_range(self, value: Any) -> bool:
        if self.kind is str:
            return value in self.choices if self.choices else bool(value)
        if self.kind is float and not (
            value == 0 or FLOAT32_SMALLEST <= abs(value) <= FLOAT32_LARGEST
        ):
            return False
        return self.bound is None or self.bound.admits(value)

    def _refusal(self, value: Any) -> ValueError:
        expected, hint = self.expected, ""
        if isinstance(value, float):
            hint = self._of_float32(value)
        elif isinstance(value, str) and self._reads_as_number(value):
            hint = " Write it without quotes."
        elif isinstance(value, int) and self.kind is str and not self.choices:
            hint = " Write it in quotes."
        if isinstance(value, int) and abs(value) > LARGEST:
            is_told = "below" in expected or "at most" in expected
            expected += "" if is_told else f" and below 2**63 = {LARGEST + 1}"
        return ValueError(f"{self.name}: got {shortened(value)}; expected {expected}.{hint}")

    def _of_float32(self, value: float) -> str:
        """Why a number is out of range that float32 does not hold, or holds as another."""
        if FLOAT32_LARGEST < abs(value) < math.inf:
            return " float32 holds no more than 3.4e38."
        if 0 < abs(value) < FLOAT32_SMALLEST:
            return " float32 holds nothing between 0 and 1.2e-38."
        below = self.bound.below if isinstance(self.bound, Range) else math.inf
        is_rounded = value < below <= as_computed(value)
        return f" float32 holds it as {as_computed(value):g}." if is_rounded else ""

    def _reads_as_number(self, text: str) -> bool:
        try:
            self.check(KINDS[self.kind](text))
        except (ValueError, OverflowError, KeyError):
            return False
        return True


@cache
def records(record: type = Config) -> dict[str, type]:
    """A record under '', and those of its sections by name."""
    found: dict[str, Any] = {"": record}
    found |= {item.name: item.type for item in fields(record) if is_dataclass(item.type)}
    return found


@cache
def leaves(record: type = Config) -> tuple[Leaf, ...]:
    """Every setting of a dataclass, sections after the record's own fields, in the order they are
    written.
    """
    found = [
        _leaf(section, owner, item)
        for section, owner in records(record).items()
        for item in fields(owner)
        if section or item.name not in records(record)
    ]
    names = [leaf.name for leaf in found]
    assert len(names) == len({*names}), f"leaf names must be unique, for each is a flag: {names}"
    return tuple(found)


def _leaf(section: str, record: type, item: Field[Any]) -> Leaf:
    """The setting of a field."""
    default = item.default_factory() if item.default_factory is not MISSING else item.default
    about = _read_type(item.type)
    return Leaf(section=section, name=item.name, default=default, record=record, **about)


_NOTES: dict[type, Callable[[Any], dict[str, Any]]] = {
    IsPath: lambda note: {"is_path": True},
    IsFreeText: lambda note: {"is_free_text": True},
    Largest: lambda note: {"largest": note.value},
    Needs: lambda note: {"needs": note},
    NoNumbers: lambda note: {"decides_numbers": False},
}
"""What notes on a type say of a leaf; others are bounds."""


def _read_type(hint: Any) -> dict[str, Any]:
    """Take a field's annotation apart: the keyword arguments of `Leaf` that depend on it."""
    if get_origin(hint) in (Union, types.UnionType):
        inner, *others = [part for part in get_args(hint) if part is not type(None)]
        # int | float: bytes or a share
        is_known = all(part is float or get_origin(part) is Literal for part in others)
        assert is_known, f"no setting can have type {hint}"
        words = tuple(word for part in others for word in get_args(part))
        return {**_read_type(inner), "words": words, "optional": type(None) in get_args(hint)}
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        found = _read_type(inner)
        for note in notes:
            found |= _NOTES.get(type(note), lambda bound: {"bound": bound})(note)
        return found
    if get_origin(hint) is Literal:
        return {"kind": str, "choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {**_read_type(get_args(hint)[0]), "is_list": True}
    assert hint in (bool, int, float, str), f"no setting can have type {hint}"
    return {"kind": hint}


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """The string that follows each field in the source of the class, or of one that it derives
    from, by field name.
    """
    docs: dict[str, str] = {}
    for owner in reversed(record.__mro__):
        if is_dataclass(owner):
            docs.update(_own_docstrings(owner))
    return docs


def _own_docstrings(record: type) -> dict[str, str]:
    (definition,) = ast.parse(dedent(inspect.getsource(record))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, follower in zip(definition.body, definition.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
                docs[statement.target.id] = inspect.cleandoc(str(follower.value.value))
    return docs


def flatten(config: Config) -> dict[str, Any]:
    """The value of every leaf, by name."""
    return {leaf.name: leaf.of(config) for leaf in leaves()}


def assemble(values: Mapping[str, Any]) -> Config:
    """The configuration with these values, one for every leaf; nothing is checked."""
    found: dict[str, Any] = {section: {} for section in records()}
    for leaf in leaves():
        found[leaf.section][leaf.name] = values[leaf.name]
    own = found.pop("")
    return Config(**own, **{section: records()[section](**found[section]) for section in found})


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def sections(record: type = Config) -> dict[str, str]:
    """The first paragraph of each section of a record, by section name; the record's own under
    ''.
    """
    paragraphs = {
        name: (inspect.getdoc(owner) or "").split("\n\n")[0]
        for name, owner in records(record).items()
    }
    return {name: " ".join(paragraph.split()) for name, paragraph in paragraphs.items()}

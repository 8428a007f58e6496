"""YAML of plain values, read and written. A scalar without quotes means what the same text means on
the command line: 010 is ten, 1e-5 and 1_000 are numbers; yes, on, 1:30 and 0x10 are texts.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from popxl_gpt.config.numbers import FLOAT, INTEGER, integer, real
from popxl_gpt.utils.errors import ConfigError
from popxl_gpt.utils.files.bounded import read_bounded
from popxl_gpt.utils.texts import shown_text

FILE_BYTES, DEPTH, KEYS, TEXT = 2**20, 16, 2000, 4096
"""The most that is read: bytes of a file, mappings and lists inside each other, keys in all (an
alias counts as all values that it stands for), characters of a text.
"""
TAG = re.compile(r"^%TAG", re.MULTILINE)
"""Directives, each of which libyaml compares with all before, and no value here has a tag."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML of plain values (null, booleans, numbers, texts, lists, mappings), with all usual ways
    of writing floats, and aliases.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._flat: list[yaml.MappingNode] = []

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names into a mapping; a key that stands there twice is an error."""
        if node in self._flat:
            return
        self._flat.append(node)
        own = [key for key, _ in node.value if key.tag != _MERGE]
        names = [self.construct_object(key, deep=True) for key in own]
        repeated = sorted(str(key) for key, count in Counter(names).items() if count > 1)
        if repeated:
            raise yaml.constructor.ConstructorError(
                None, None, f"given twice: {', '.join(repeated)}", node.start_mark
            )
        super().flatten_mapping(node)


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that anybody's YAML, or ours, would read as something else."""


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_BOOLEANS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", "|".join(_BOOLEANS), list("tTfF")),
    ("int", INTEGER.pattern, list("-+0123456789")),
    ("float", f"{FLOAT.pattern}|{_SPECIAL.pattern}", list("-+.0123456789")),
)
"""What scalars without quotes are: tag, pattern, first characters. All others are texts."""
_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(_MERGE, re.compile("^<<$"), ["<"])
for _kind, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)
_KINDS = {
    "null": "nothing",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
}
"""Scalars, by tag, with what is expected of them."""
_VALUES: "dict[str, Callable[[str], Any]]" = {
    "null": lambda text: None,
    "bool": _BOOLEANS.__getitem__,
    "int": integer,
    "float": lambda text: (
        float(text.replace(".", "", 1)) if _SPECIAL.fullmatch(text) else real(text)
    ),
    "str": str,
}


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """What a scalar stands for. A tag that does not fit its text is an error of the file."""
    kind = node.tag.rpartition(":")[2]
    text = str(loader.construct_scalar(node))
    try:
        return _VALUES[kind](text)
    except (ValueError, KeyError) as error:
        got = shown_text(text)
        raise yaml.constructor.ConstructorError(
            None, None, f"got {got}; expected {_KINDS[kind]}", node.start_mark
        ) from error


def _construct_mapping(loader: _Loader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode) and not all(
        isinstance(key, yaml.ScalarNode) for key, _ in node.value
    ):
        raise yaml.constructor.ConstructorError(
            None, None, "expected a name before each colon", node.start_mark
        )
    if not isinstance(node, yaml.MappingNode):
        raise yaml.constructor.ConstructorError(
            None, None, "expected a mapping of names", node.start_mark
        )
    return yaml.SafeLoader.construct_yaml_map(loader, node)


def _refuse(loader: _Loader, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(
        None,
        None,
        f"got a value with the tag {shown_text(node.tag)}; expected plain values",
        node.start_mark,
    )


_Loader.yaml_constructors = {
    **{f"tag:yaml.org,2002:{kind}": _construct_scalar for kind in _KINDS},
    _MERGE: lambda loader, node: str(loader.construct_scalar(node)),  # a value, and no key
    "tag:yaml.org,2002:seq": yaml.SafeLoader.construct_yaml_seq,
    "tag:yaml.org,2002:map": _construct_mapping,
    None: _refuse,
}


def to_text(mapping: dict[str, Any]) -> str:
    """A mapping of plain values as YAML that `read_yaml` reads back."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises ConfigError naming the file and line if it cannot be read
    or is none.
    """
    try:
        text = read_bounded(file, FILE_BYTES).decode("utf-8")
        if (problem := _too_much(text)) is not None:
            raise ConfigError([f"{file}: {problem}. Correct the file."])
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a loader that makes plain values only
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [f"{file}: cannot be read: {error}. Check the path and its permissions."]
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            [f"{file}: is not valid YAML: {_told(error)}. Correct the file."]
        ) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(
            [
                f"{file}: got {type(content).__name__}; expected a mapping of names. Correct "
                "the file."
            ]
        )
    return content


def _too_much(text: str) -> str | None:
    """What a text has more of than any configuration, found before values are made of it.
    YAMLError: it is no YAML.
    """
    tag = TAG.search(text)
    if tag is not None:
        line = text.count("\n", 0, tag.start()) + 1
        return f"line {line}: got a directive (%TAG); expected settings. Leave it out"
    tree = _Tree()
    for event in yaml.parse(text, Loader=_Loader):
        problem = tree.take(event)
        if problem is None and tree.depth > DEPTH:
            problem = f"got more than {DEPTH} mappings and lists inside each other"
        if problem is None and tree.keys > KEYS:
            problem = f"got more than {KEYS} settings; expected those that --help shows"
        if problem is not None:
            return f"line {event.start_mark.line + 1}: {problem}"  # type: ignore[union-attr]
    return None


@dataclass
class _Open:
    """A mapping or list whose end has not come."""

    anchor: str | None
    is_key_next: bool | None
    """Whether a key is next; None in a list."""
    nodes: int
    """The nodes in the text before it."""
    height: int = 1
    """Mappings and lists inside each other, itself counted."""


class _Tree:
    """Counts what the events of a text make, where an alias is all that it stands for."""

    def __init__(self) -> None:
        self.keys, self.nodes, self.depth = 0, 0, 0
        self._around: list[_Open] = []
        self._anchored: dict[str, tuple[int, int]] = {}
        """Nodes and height of what an anchor names."""

    def take(self, event: yaml.Event) -> str | None:
        """Count an event; returns what is wrong with it."""
        if isinstance(event, yaml.CollectionEndEvent):
            ended = self._around.pop()
            if ended.anchor is not None:
                self._anchored[ended.anchor] = self.nodes - ended.nodes, ended.height
            if self._around:
                self._around[-1].height = max(self._around[-1].height, ended.height + 1)
        elif isinstance(event, yaml.NodeEvent):
            return self._take_node(event)
        return None

    def _take_node(self, event: yaml.NodeEvent) -> str | None:
        around = self._around[-1] if self._around else None
        if around is not None and around.is_key_next is not None:
            self.keys += around.is_key_next
            around.is_key_next = not around.is_key_next
        self.nodes += 1
        self.depth = len(self._around)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchored:
                return f"got the alias *{event.anchor}; expected one of a value before it"
            nodes, height = self._anchored[event.anchor]
            self.nodes, self.keys = self.nodes + nodes, self.keys + nodes
            self.depth += height
            if around is not None:
                around.height = max(around.height, height + 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            is_mapping = isinstance(event, yaml.MappingStartEvent)
            self._around.append(_Open(event.anchor, is_mapping or None, self.nodes))
            self.depth += 1
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                self._anchored[event.anchor] = 1, 0
            if len(event.value) > TEXT:
                return f"got a text of {len(event.value)} characters; expected at most {TEXT}"
        return None


def _told(error: yaml.YAMLError) -> str:
    """What is wrong with a text, and where, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + " ".join(str(problem or error).split())

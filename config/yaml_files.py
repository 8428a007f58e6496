"""YAML of plain values, read and written. A scalar without quotes means what the same text means on
the command line: 010 is ten, 1e-5 and 1_000 are numbers; yes, on, 1:30 and 0x10 are texts.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from popxl_gpt.config.bounded import read_bounded
from popxl_gpt.config.errors import ConfigError
from popxl_gpt.config.numbers import FLOAT, INTEGER, integer, real
from popxl_gpt.config.texts import shown_text

FILE_BYTES, DEPTH, KEYS, TEXT = 2**20, 16, 500, 4096
"""At most: bytes of a file, mappings and lists inside each other, keys in all, characters of a
text.
"""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML of plain values (null, booleans, numbers, texts, lists, mappings), with all usual ways
    of writing floats.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted(str(key) for key, count in Counter(keys).items() if count > 1)
        if repeated:
            raise yaml.constructor.ConstructorError(
                None, None, f"given twice: {', '.join(repeated)}", node.start_mark
            )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Puts texts in quotes that anybody's YAML, or ours, would read as something else."""


_TAG = "tag:yaml.org,2002:"
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
    keys = 0
    around: list[bool | None] = []
    """For each mapping that is open whether a key comes next; None for a list."""
    for event in yaml.parse(text, Loader=_Loader):
        where = f"line {event.start_mark.line + 1}"  # type: ignore[union-attr]
        if isinstance(event, yaml.AliasEvent):
            return f"{where}: got an alias (*{event.anchor}); expected values. Write them out"
        if isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        elif isinstance(event, yaml.NodeEvent):
            if around and around[-1] is not None:
                keys += around[-1]
                around[-1] = not around[-1]
            if isinstance(event, yaml.CollectionStartEvent):
                around.append(True if isinstance(event, yaml.MappingStartEvent) else None)
            elif isinstance(event, yaml.ScalarEvent) and len(event.value) > TEXT:
                return (
                    f"{where}: got a text of {len(event.value)} characters; expected at most {TEXT}"
                )
        if len(around) > DEPTH:
            return f"{where}: got more than {DEPTH} mappings and lists inside each other"
        if keys > KEYS:
            return f"{where}: got more than {KEYS} settings; expected those that --help shows"
    return None


def _told(error: yaml.YAMLError) -> str:
    """What is wrong with a text, and where, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    return where + " ".join(str(problem or error).split())

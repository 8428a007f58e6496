"""Reading YAML: a key given twice is an error, and 1e-5 is a number (YAML 1.1 takes it for text)."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Optional

import yaml

from config.bounded import read_bounded
from config.errors import ConfigError

FILE_BYTES, DEPTH, KEYS, TEXT = 2**20, 16, 500, 4096
"""At most: bytes of a file, mappings and lists inside each other, keys in all, characters of a text."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML with every usual way of writing a float."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted(str(key) for key, count in Counter(keys).items() if count > 1)
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {', '.join(repeated)}", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises ConfigError naming the file and line if it cannot be read or is none."""
    try:
        text = read_bounded(file, FILE_BYTES).decode("utf-8")
        if (problem := _too_much(text)) is not None:
            raise ConfigError([f"{file}: {problem}. Correct the file."])
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a loader that makes plain values only
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}. Check the path and its permissions."]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{file}: is not valid YAML: {error}. Correct the file."]) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError([f"{file}: got {type(content).__name__}; expected a mapping of names. Correct the file."])
    return content


def _too_much(text: str) -> Optional[str]:
    """What a text has more of than any configuration, found before values are made of it. YAMLError: it is no YAML."""
    keys = 0
    around: list[Optional[bool]] = []
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
                return f"{where}: got a text of {len(event.value)} characters; expected at most {TEXT}"
        if len(around) > DEPTH:
            return f"{where}: got more than {DEPTH} mappings and lists inside each other"
        if keys > KEYS:
            return f"{where}: got more than {KEYS} settings; expected those that --help shows"
    return None

"""Reading YAML: a key given twice is an error, and 1e-5 is a number (YAML 1.1 takes it for text)."""

import re
from pathlib import Path
from typing import Any

import yaml

from config.errors import ConfigError


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML with every usual way of writing a float."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
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
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}. Check the path and its permissions."]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{file}: is not valid YAML: {error}. Correct the file."]) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError([f"{file}: got {type(content).__name__}; expected a mapping of names. Correct the file."])
    return content

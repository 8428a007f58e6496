"""The original API as `public_names.json` lists it."""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def api() -> dict[str, Any]:
    """What `public_names.json` holds."""
    content: dict[str, Any] = json.loads(
        (Path(__file__).parent / "public_names.json").read_text(encoding="utf-8")
    )
    return content


def private_names() -> set[str]:
    """Underscore names that programs reach for, and that therefore belong to the API."""
    return set(api()["private_names"])


def as_arguments(parameters: str) -> ast.arguments:
    """Declared parameters as a syntax tree."""
    function = ast.parse(f"def f({parameters}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args

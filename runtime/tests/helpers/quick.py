"""What keeps `make check` quick: which cases of a test it runs, and imports that wait until a test
needs them.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from helpers.samples.sample import Sample


def cases(
    values: Iterable[Any], is_quick: Callable[[Any], bool], ids: Sequence[str] | None = None
) -> list[Any]:
    """Values to parametrize with; those that are not quick are marked slow. Without ids their texts
    name them.
    """
    values = list(values)
    return [
        pytest.param(value, marks=[] if is_quick(value) else [pytest.mark.slow], id=name)
        for value, name in zip(values, ids or map(str, values))
    ]


def firsts(samples: Iterable[Sample]) -> Callable[[Sample], bool]:
    """Whether a sample is the first of its op."""
    found: dict = {}
    for sample in samples:
        found.setdefault(sample.op, sample)
    return lambda sample: found[sample.op] is sample


def of_each(names: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Makes one test of a check, for all names: where that takes less time than pytest does for a
    test of each.
    """

    def decorated(check: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            problems = []
            for name in names:
                try:
                    check(name)
                except AssertionError as error:
                    problems.append(f"{name}: {error}")
            assert not problems, "\n".join(problems)

        return test

    return decorated


class Later:
    """A module that is imported when a public name of it is first read, and not where tests are
    only collected.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks every global of a test file for such names
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)

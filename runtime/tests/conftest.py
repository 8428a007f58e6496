"""Fixtures of several test files.

They import what they need when a test has them: the process that hands tests out reads this file,
and would load torch before it starts those that run them.
"""

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses between the ways of `helpers.products`."""
    from helpers.products import choice_of_ways

    yield from choice_of_ways(monkeypatch)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads PyTorch, and so the library, uses."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

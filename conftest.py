"""What every run of the tests has: long tests first, and a collector that looks only at what tests leave."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> "Iterator[None]":
    """Keep the tests themselves, millions of objects, out of garbage collection: a quarter of the time otherwise."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    """Files with slow tests first, and of these the ones with few, which are the slowest.

    What is left at the end is short, and divided evenly between the processes that run tests.
    """
    slow, tests = {item.path for item in items if item.get_closest_marker("slow")}, Counter(i.path for i in items)
    items.sort(key=lambda item: (item.path not in slow, tests[item.path] if item.path in slow else 0))

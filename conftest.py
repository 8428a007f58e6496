"""What every run of the tests has: long tests first, and no time spent on what is not theirs."""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

os.environ.setdefault("POPXL_VERIFY", "1")  # every program of every test, after every pass


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> "Iterator[None]":
    """Keep the tests themselves, millions of objects, out of garbage collection: a quarter of the
    time otherwise.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        pass_logs_on()


def pass_logs_on() -> None:
    """Let every logger pass its records to the root's.

    pytest adds its handlers to the root and to each logger that does not, six times per test: torch
    has forty such, and they take longer than most tests.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    """Files with slow tests first, and of these the ones with few, which are the slowest.

    What is left at the end is short, and divided evenly between the processes that run tests.
    """
    slow, tests = (
        {item.path for item in items if item.get_closest_marker("slow")},
        Counter(i.path for i in items),
    )
    items.sort(
        key=lambda item: (item.path not in slow, tests[item.path] if item.path in slow else 0)
    )


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """What tests have recorded with `record_property`, such as the number of cases."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")

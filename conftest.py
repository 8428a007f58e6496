"""What every run of the tests has: long tests first, no time spent on what is not theirs, no
process left by a test that has failed, and the files that take longest told at the end.
"""

import gc
import inspect
import logging
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

LONG = 60
"""Seconds of all tests together, from which on it is told which files take them."""

os.environ.setdefault("POPXL_VERIFY", "1")  # every program of every test, after every pass


def pytest_configure() -> None:
    """Let what tests start hear Ctrl-C: what a shell starts in the background ignores it, as does
    all that it starts in turn.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    """Mark what `quick_every` leaves out. Then files with slow tests first, and of these the ones
    with few, which are the slowest: what is left at the end is short, and divided evenly between
    the processes that run tests.
    """
    cases: Counter[tuple[object, str]] = Counter()
    for item in items:
        share = item.get_closest_marker("quick_every")
        if share is not None and not item.get_closest_marker("slow"):
            test = (item.parent, getattr(item, "originalname", item.name))
            if cases[test] % share.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    slow, tests = (
        {item.path for item in items if item.get_closest_marker("slow")},
        Counter(i.path for i in items),
    )
    items.sort(
        key=lambda item: (item.path not in slow, tests[item.path] if item.path in slow else 0)
    )


AT_ONCE, TOGETHER = 4, 12
"""Tests marked `waits` that run at a time, and those that begin with the first of them: they wait
for one another's processes and limits more than they work, and a core has nothing to do meanwhile.
"""
_waited: "dict[str, Future[None]]" = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: "pytest.Function") -> "bool | None":
    """Run a test that is marked `waits` with the next ones of its file, several at a time and
    nothing beside them; each then ends as its own run did. They take no fixture but `tmp_path`.
    """
    if not does_wait(pyfuncitem):
        return None
    if pyfuncitem.nodeid not in _waited:
        items = pyfuncitem.session.items
        of_file = [each for each in items if each.path == pyfuncitem.path and does_wait(each)]
        first = of_file.index(pyfuncitem)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for each in of_file[first : first + TOGETHER]:
                _waited[each.nodeid] = pool.submit(run_alone, each)
    _waited.pop(pyfuncitem.nodeid).result()
    return True


def does_wait(item: "pytest.Item") -> bool:
    """Whether a test is one of those, and takes what a thread can give it."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("waits") is None:
        return False
    return {"tmp_path", *parameters(item)}.issuperset(inspect.signature(item.obj).parameters)


def parameters(item: "pytest.Item") -> "dict[str, object]":
    """What a test is parametrized with."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def run_alone(item: "pytest.Function") -> None:
    """Run a test in a folder of its own."""
    with TemporaryDirectory(prefix="waits-") as folder:
        known = {**parameters(item), "tmp_path": Path(folder)}
        item.obj(**{name: known[name] for name in inspect.signature(item.obj).parameters})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: "pytest.CallInfo[None]") -> "Iterator[None]":
    """End the processes of a test that has failed: the next one would fail by their warnings."""
    try:
        return (yield)
    finally:
        if call.excinfo is not None:
            for entry in call.excinfo.traceback:
                for value in entry.frame.f_locals.values():
                    end_processes(value)


def end_processes(value: object) -> None:
    """End and reap a process, or those of a list, where they still run."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, subprocess.Popen) and each.poll() is None:
            with each:
                each.kill()


ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals that a run which was ended by one ignores to the end of its process."""


@pytest.fixture(autouse=True)
def own_signals() -> "Iterator[None]":
    """No test leaves signals ignored: every process that a later one starts would ignore them."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """What tests have recorded with `record_property`, such as the number of cases, and after a
    long run the files that took longest.
    """
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() > LONG:
        terminalreporter.write_sep("-", f"slowest files, of {seconds.total():.0f} s in all")
        for path, duration in seconds.most_common(15):
            terminalreporter.write_line(f"{duration:6.1f} s {path}")

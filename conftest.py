"""What every run of the tests has: long tests first, no time spent on what is not theirs, no
process left by a test that has failed, and the files that take longest told at the end.
"""

import gc
import logging
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

LONG = 60
"""Seconds of all tests together, from which on it is told which files take them."""

PLAIN = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
"""What Python does at these signals where nobody has them ignored."""

os.environ.setdefault("POPXL_VERIFY", "1")  # every program of every test, after every pass


def pytest_configure() -> None:
    """Let what tests start hear Ctrl-C and SIGQUIT: what a shell starts in the background ignores
    them, as does all that it starts in turn.
    """
    for number, handler in PLAIN.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> "Iterator[None]":
    """Keep the tests themselves, millions of objects, out of garbage collection: a quarter of the
    time otherwise. Programs are made of few cycles: looking for them less often saves half of what
    is left.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
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
    """Mark what `quick_every` and `sampled` leave out. Then files with slow tests first, and of
    these the ones with few, which are the slowest: what is left at the end is short, and divided
    evenly between the processes that run tests.
    """
    for share, left_out in (("sampled", "exhaustive"), ("quick_every", "slow")):
        cases: Counter[tuple[object, str]] = Counter()
        for item in items:
            marker = item.get_closest_marker(share)
            if marker is not None and not item.get_closest_marker(left_out):
                test = (item.parent, getattr(item, "originalname", item.name))
                if cases[test] % marker.args[0]:
                    item.add_marker(left_out)
                cases[test] += 1
    slow, tests = (
        {item.path for item in items if item.get_closest_marker("slow")},
        Counter(i.path for i in items),
    )
    items.sort(
        key=lambda item: (item.path not in slow, tests[item.path] if item.path in slow else 0)
    )


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


def reason_of(skipped: object) -> str:
    """Why a test, or all of a file, was skipped: pytest has (path, line, "Skipped: why")."""
    where = getattr(skipped, "longrepr", None)
    return where[2].removeprefix("Skipped: ") if isinstance(where, tuple) else str(where)


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    """What tests have recorded with `record_property`, such as the number of cases, why some were
    skipped, and after a long run the files that took longest.
    """
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
    reasons = Counter(map(reason_of, terminalreporter.getreports("skipped")))
    if reasons:
        terminalreporter.write_sep("-", f"{reasons.total()} skipped")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:6} {reason}")
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() > LONG:
        terminalreporter.write_sep("-", f"slowest files, of {seconds.total():.0f} s in all")
        for path, duration in seconds.most_common(15):
            terminalreporter.write_line(f"{duration:6.1f} s {path}")

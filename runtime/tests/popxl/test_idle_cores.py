"""Cores that other programs use, and that they leave alone."""

import os
import subprocess
import sys
import time

import pytest
from popxl import idle_cores
from popxl.idle_cores import CoreTimes

BEGIN = CoreTimes(moment=10.0, idle=100.0, own=1.0, cores=4)


@pytest.mark.parametrize(
    "idle, own, expected",
    [
        (4.0, 0.0, True),
        (3.0, 1.0, True),  # this process alone
        (0.0, 4.0, True),
        (3.5, 0.0, True),  # others now and then
        (3.0, 0.0, False),  # another program on one core
        (0.0, 1.0, False),
        (2.0, 1.0, False),
    ],
)
def test_cores_are_idle_where_none_but_this_process_takes_time(idle, own, expected):
    later = CoreTimes(moment=11.0, idle=100.0 + idle, own=1.0 + own, cores=4)
    assert BEGIN.are_others_idle(later) is expected


def test_times_are_those_of_the_cores_that_this_process_may_use(monkeypatch, tmp_path):
    lines = ["cpu  9 0 9 4000 30 0 0", "cpu0 9 0 9 1000 10 0 0", "cpu1 9 0 9 3000 20 0 0", "ctxt 7"]
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(idle_cores, "STATISTICS", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    found = CoreTimes.now()
    assert found is not None
    assert (found.idle, found.cores) == (3020 / os.sysconf("SC_CLK_TCK"), 1)


@pytest.mark.parametrize("text", [None, "cpu0 1 2\n", "cpu0 0 0 0 many 0\n", "cpux 0 0 0 0 0\n"])
def test_a_system_that_does_not_tell_has_no_idle_cores(monkeypatch, tmp_path, text):
    if text is not None:
        (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(idle_cores, "STATISTICS", tmp_path / "stat")
    assert CoreTimes.now() is None
    monkeypatch.setattr(idle_cores, "BEGIN", None)
    assert not idle_cores.are_others_idle()


def test_cores_whose_time_is_limited_are_not_idle(monkeypatch):
    monkeypatch.setattr(idle_cores, "BEGIN", BEGIN)
    monkeypatch.setattr(idle_cores, "core_limit", lambda: 2.0)
    assert not idle_cores.are_others_idle()


def test_a_busy_program_on_each_core_is_seen():
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        time.sleep(0.2)
        begin = CoreTimes.now()
        time.sleep(0.3)
        assert begin is not None and (later := CoreTimes.now()) is not None
        assert not begin.are_others_idle(later)
    finally:
        for each in busy:
            each.kill()
            each.wait()

"""The benchmark of recording: steps with marks and without, beside each other."""

import json
import sys

import pytest
from helpers.quick import cases

from benchmarks import profiling


@pytest.mark.slow
@pytest.mark.parametrize("check", cases([[], ["--check"]], bool, ["plain", "check"]))
def test_the_cost_of_recording_is_told_for_each_preset(check, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["profiling.py", "--presets", "tiny", "--rounds", "2", "--warmup", "1", *check]
    )
    code = profiling.main()
    *shown, last = capsys.readouterr().out.strip().splitlines()
    figures = json.loads(last)
    assert any(line.startswith("tiny ") for line in shown)
    assert (
        figures["presets"]["tiny"]["spans"] > 1000 and figures["presets"]["tiny"]["cpu_seconds"] > 0
    )
    assert figures["worst"] == figures["presets"]["tiny"]["cpu_cost"] and figures["met"] == (
        figures["worst"] <= 0.05
    )
    assert code == (1 if check and not figures["met"] else 0)

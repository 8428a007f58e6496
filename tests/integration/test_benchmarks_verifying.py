"""The benchmark of verification: steps whose phases run twice and steps whose phases run once."""

import json
import sys

import pytest

from benchmarks import verifying


@pytest.mark.slow
def test_the_cost_of_a_verification_is_told_for_each_preset(monkeypatch, capsys):
    words = ["verifying.py", "--presets", "tiny", "--rounds", "1", "--warmup", "0"]
    monkeypatch.setattr(sys, "argv", words)
    assert verifying.main() == 0
    *shown, last = capsys.readouterr().out.strip().splitlines()
    figures = json.loads(last)
    assert any(line.startswith("tiny ") for line in shown)
    assert figures["worst"] == figures["presets"]["tiny"]["cpu_cost"] > 0.2
    assert figures["met"] == (figures["worst"] <= verifying.BAR)

"""The benchmark of checkpoints: written while steps go on, and waited for."""

import json
import sys

import pytest

from benchmarks import saving


@pytest.mark.slow
def test_the_cost_of_a_checkpoint_is_told_for_each_preset(monkeypatch, capsys, tmp_path):
    words = ["saving.py", "--presets", "tiny", "--rounds", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--folder", str(tmp_path)])
    assert saving.main() == 0
    *shown, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    figures = found["presets"]["tiny"]
    assert any(line.startswith("tiny ") for line in shown)
    assert found["worst"] == figures["share"] == figures["cost_cpu_seconds"] / 1800
    assert 0 < figures["reading_wall_seconds"] and 0 < figures["waited_wall_seconds"]
    assert figures["bytes"] > 10_000 and found["met"] == (found["worst"] <= saving.BAR)

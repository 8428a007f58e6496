"""The benchmark of recording: steps with marks and without, beside each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.multi
@pytest.mark.parametrize("check", [[], ["--check"]], ids=["plain", "check"])
def test_the_cost_of_recording_is_told_for_each_preset(check):
    command = [sys.executable, "benchmarks/profiling.py", "--presets", "tiny", "--rounds", "2", "--warmup", "1", *check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    *shown, last = done.stdout.strip().splitlines()
    figures = json.loads(last)
    assert any(line.startswith("tiny ") for line in shown), done.stderr
    assert figures["presets"]["tiny"]["spans"] > 1000 and figures["presets"]["tiny"]["cpu_seconds"] > 0
    assert figures["worst"] == figures["presets"]["tiny"]["cpu_cost"] and figures["met"] == (figures["worst"] <= 0.05)
    assert done.returncode == (1 if check and not figures["met"] else 0)

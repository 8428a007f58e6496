"""The benchmark of state larger than memory: it runs, rows really move, and its shares are of the measured rounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import larger_than_memory
from benchmarks.harness import Measurement

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"layers": 3, "hidden_size": 64, "heads": 2, "sequence_length": 8, "vocabulary_size": 64}


@pytest.mark.multi
def test_state_in_files_is_measured_beside_the_same_steps_in_memory(tmp_path):
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    flags += ["--batches", "1", "--rounds", "2", "--host_memory", "1", "--disk_mib", "1", "--limit", "4000"]
    command = [sys.executable, "benchmarks/larger_than_memory.py", *flags, "--folder", str(tmp_path / "rows")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.strip().splitlines()
    assert any(line.startswith("1, in files ") for line in shown)
    figures = json.loads(last)
    variants = figures["batches"]["1"]
    assert variants.keys() == {"in memory", "in files", "in files, fetched when asked for"}
    assert variants["in memory"]["read_bytes"] == 0
    for name in ("in files", "in files, fetched when asked for"):
        assert variants[name]["read_bytes"] > 0 and variants[name]["written_bytes"] > 0
        assert variants[name]["losses_equal"] and 0 < variants[name]["waiting"] < 1
    assert figures["within_limit"] and all(figures["disk"][way] > 0 for way in ("read", "write", "both"))
    assert str(ROOT) not in last and list((tmp_path / "rows").iterdir()) == []


def measurement(name, seconds, peak=100, loss=1.0, **moved):
    steps = tuple({"loss": loss, **moved} for _ in range(3))
    return Measurement(
        name=name, seconds=(seconds, seconds), cpu_seconds=(seconds, seconds), peak_bytes=peak, stepping_bytes=peak,
        steps=steps, finish={"cgroup": False},
    )  # fmt: skip


def test_the_bound_is_the_larger_of_the_steps_in_memory_and_of_the_transfers():
    alone = measurement("in memory", 2.0, peak=1000)
    files = measurement("in files", 4.0, read_bytes=20.0, written_bytes=10.0, waited=1.0)
    for rate, bound in ((30.0, 2.0), (10.0, 3.0)):
        found = larger_than_memory.compare([alone, files], 8, {"both": rate}, limit=100)
        assert found["in files"]["of_bound"] == bound / 4.0 and found["in files"]["waiting"] == 0.25
        assert found["in files"]["transfer_seconds"] == 30.0 / rate and found["in files"]["tokens_per_s"] == 2.0
        assert found["in files"]["within_limit"] and found["in files"]["losses_equal"]
        assert found["in memory"]["of_bound"] == 1.0


def test_more_than_the_limit_and_other_losses_are_told():
    alone = measurement("in memory", 2.0)
    files = measurement("in files", 4.0, peak=101, loss=2.0)
    found = larger_than_memory.compare([alone, files], 8, {"both": 1.0}, limit=100)["in files"]
    assert not found["within_limit"] and not found["losses_equal"]

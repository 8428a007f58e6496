"""The benchmark of state larger than memory: it runs, rows really move, and its shares are of the
measured rounds.
"""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import larger_than_memory
from benchmarks.harness import BenchmarkError, Measurement
from tests import warm

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"layers": 3, "hidden_size": 64, "heads": 2, "sequence_length": 8, "vocabulary_size": 64}


@pytest.mark.exhaustive
@pytest.mark.multi
def test_state_in_files_is_measured_beside_the_same_steps_in_memory(tmp_path):
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    flags += "--batches 1 2 --rounds 1 --host_memory 1 --disk_mib 1 --limit 4000".split()
    command = [
        warm.python(),
        "benchmarks/larger_than_memory.py",
        *flags,
        "--folder",
        str(tmp_path / "rows"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.strip().splitlines()
    assert any(line.startswith("1, in files ") for line in shown)
    figures = json.loads(last)
    wide, narrow = (figures["moments"][name] for name in ("float32", "bfloat16"))
    assert (
        wide["state_bytes"] == 12 * figures["parameters"]
        and narrow["state_bytes"] == 8 * figures["parameters"]
    )
    assert wide["batches"].keys() == {"1", "2"} and narrow["batches"].keys() == {"2"}
    for found in (wide["batches"]["1"], wide["batches"]["2"], narrow["batches"]["2"]):
        assert found.keys() == {"in memory", "in files", "in files, fetched when asked for"}
        assert found["in memory"]["read_bytes"] == 0
        for name in ("in files", "in files, fetched when asked for"):
            assert found[name]["read_bytes"] > 0 and found[name]["written_bytes"] > 0
            assert found[name]["losses_equal"] and 0 < found[name]["waiting"] < 1
    assert narrow["batches"]["2"]["in files"]["loss"] != wide["batches"]["2"]["in files"]["loss"]
    assert wide["within_limit"] and all(
        figures["disk"][way] > 0 for way in ("read", "write", "both")
    )
    assert str(ROOT) not in last and list((tmp_path / "rows").iterdir()) == []


def test_a_limit_that_leaves_nothing_for_rows_is_refused():
    given = argparse.Namespace(host_memory=None)
    with pytest.raises(BenchmarkError) as refused:
        larger_than_memory.variants_of(given, 1, "float32", 2**20)
    assert str(refused.value) == (
        "limit: got 0.00 GiB; expected more than the 480 MiB of a process, for rows. Measure a "
        "larger model, or give --limit and --host_memory."
    )


def measurement(name, seconds, peak=100, loss=1.0, **moved):
    steps = tuple({"loss": loss, **moved} for _ in range(3))
    times = {"seconds": (seconds, seconds), "cpu_seconds": (seconds, seconds)}
    return Measurement(name=name, peak_bytes=peak, steps=steps, finish={}, **times)


def test_the_bound_is_the_larger_of_the_steps_in_memory_and_of_the_transfers():
    alone = measurement("in memory", 2.0, peak=1000)
    files = measurement("in files", 4.0, read_bytes=20.0, written_bytes=10.0, waited=1.0)
    for rate, bound in ((30.0, 2.0), (10.0, 3.0)):
        found = larger_than_memory.compare([alone, files], 8, {"both": rate}, limit=100)
        assert found["in files"]["of_bound"] == bound / 4.0 and found["in files"]["waiting"] == 0.25
        assert (
            found["in files"]["transfer_seconds"] == 30.0 / rate
            and found["in files"]["tokens_per_s"] == 2.0
        )
        assert found["in files"]["within_limit"] and found["in files"]["losses_equal"]
        assert found["in files"]["of_memory"] == 0.5
        assert found["in memory"]["of_bound"] == found["in memory"]["of_memory"] == 1.0


def test_more_than_the_limit_and_other_losses_are_told():
    alone = measurement("in memory", 2.0)
    files = measurement("in files", 4.0, peak=101, loss=2.0)
    found = larger_than_memory.compare([alone, files], 8, {"both": 1.0}, limit=100)["in files"]
    assert not found["within_limit"] and not found["losses_equal"]

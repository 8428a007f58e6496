"""The benchmark of layouts: it runs, and all layouts do the same work."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import replicas
from benchmarks.harness import Measurement
from tests import warm

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"layers": 1, "hidden_size": 16, "heads": 2, "sequence_length": 8, "vocabulary_size": 30}


@pytest.mark.exhaustive
@pytest.mark.multi
def test_layouts_are_measured_beside_the_single_replica():
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    flags += ["--batch", "8", "--rounds", "1", "--layouts", "8 x 1 x 1", "1 x 1 x 2"]
    flags += ["--processes", "2"]
    command = [warm.python(), "benchmarks/replicas.py", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.strip().splitlines()
    assert any(line.startswith("1 x 1 x 2 ") for line in shown)
    figures = json.loads(last)
    layouts = figures["layouts"]
    assert layouts.keys() == {"1 x 1 x 1", "8 x 1 x 1", "1 x 1 x 2"}
    assert layouts["1 x 1 x 1"]["collectives_share"] == 0 and layouts["1 x 1 x 1"]["ratio"] == 1
    assert all(
        0 < layouts[name]["collectives_share"] < 1 for name in layouts if name != "1 x 1 x 1"
    )
    assert all(0 < layout["ceiling_share"] < 1 for layout in layouts.values())
    assert len({round(layout["loss"], 2) for layout in layouts.values()}) == 1
    assert figures["overhead"] == layouts["8 x 1 x 1"]["ratio"]
    rows = figures["processes"]
    assert [(row["replicas"], row["processes"]) for row in rows] == [(2, 2), (4, 2), (8, 2)]
    assert all(row["seconds"] > 0 and row["planned_seconds"] > 0 for row in rows)
    assert rows[0]["efficiency"] == rows[0]["planned_efficiency"] == 1
    assert str(ROOT) not in last


def test_ratios_are_of_the_measured_rounds():
    rest = {"peak_bytes": 1, "finish": {"collectives_share": 0.25}, "steps": ({"loss": 1.0},)}
    alone = Measurement(name="a", seconds=(2.0, 2.0), cpu_seconds=(4.0, 4.0), **rest)
    split = Measurement(name="b", seconds=(4.0, 4.0), cpu_seconds=(5.0, 5.0), **rest)
    found = replicas.compare([alone, split])["b"]
    assert (found["ratio"], found["cpu_ratio"], found["collectives_share"]) == (2.0, 1.25, 0.25)


def test_how_threads_wait_is_left_to_the_runtime():
    given = dict.fromkeys((*replicas.SIZES, "layouts"))
    (variant, *_) = replicas.variants_of(argparse.Namespace(batch=8, **given))
    assert set(variant.environment) == {"OMP_NUM_THREADS"}

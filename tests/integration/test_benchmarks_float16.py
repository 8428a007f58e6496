"""The benchmark of float16 programs: it runs, and both types train the same model."""

import json
import subprocess
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.multi
def test_both_types_start_from_one_loss_and_are_compared():
    sizes = {"batch": 2, "sequence": 8, "hidden": 8, "layers": 1, "vocabulary": 50}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command = [warm.python(), "benchmarks/float16.py", "--rounds", "1", "--warmup", "1", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=warm.with_children(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["sizes"] == sizes
    for program in figures["programs"].values():
        assert program["float16"]["loss"] == pytest.approx(program["float32"]["loss"], rel=2e-2)
        assert (
            program["ratio"]
            == program["float16"]["cpu_seconds"] / program["float32"]["cpu_seconds"]
        )

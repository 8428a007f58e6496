"""How threads wait, in programs that know nothing of OpenMP."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2]
PROGRAM = """
import numpy as np, popxl
from popxl import ops

ir = popxl.Ir()
with ir.main_graph:
    v = popxl.variable(np.ones((4, 4), np.float32))
    ops.add_(v, v)
with popxl.Session(ir, "cpu") as session:
    session.run()
print(session.get_tensor_data(v)[0, 0])
"""


@pytest.mark.sampled(2)
@pytest.mark.multi
@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "30000000000"),
    ],
)
def test_threads_that_wait_sleep_soon_unless_users_say_something_else(given, spins):
    plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(RUNTIME)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        env={**plain, **told, **given},
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    # as each of the process's OpenMP libraries has read it
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)) == {spins}, done.stderr

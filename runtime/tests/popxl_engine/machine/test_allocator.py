"""What the allocator is told about large blocks."""

import subprocess
import sys

CODE = """
import numpy as np
from popxl_engine.machine.allocator import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def filled(nbytes):
    return np.ones(nbytes, np.uint8)

blocks = [filled(100_000) for _ in range(1000)]
kept = blocks[::10]
del blocks
before = resident()
assert keep_freed_memory()
assert before - resident() > 50e6, "holes between blocks are handed back"
large = filled(200_000_000)
del large
assert resident() > before + 50e6, "large blocks are kept from here on"
assert keep_freed_memory() and resident() > before + 50e6, "and nothing is handed back again"
"""


def test_what_was_freed_before_runs_is_handed_back_and_what_runs_free_is_kept():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

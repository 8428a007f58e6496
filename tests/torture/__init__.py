"""Torture: what the program promises under kills, errors, damage, full disks and signals, tried out
at random.

`make torture` spends minutes on it (`python -m tests.torture --help`); `make test` tries a small
share. To add a kind, write a file with a `Torture` and put it into the list of `kinds.py`;
`application.py` has runs of the training job to do it to, `calls.py` has system calls that fail,
and `judge.py` has the judges.
"""

import sys
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "runtime"
for folder in (str(RUNTIME), str(RUNTIME / "tests")):  # pytest's `pythonpath` has them
    if folder not in sys.path:
        sys.path.append(folder)

"""Processes that share work end with the one that began them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

KILLED = """
import itertools, os, signal
from multiprocessing import active_children
from popxl_gpt.data.text_tokenizer import TextTokenizer
from popxl_gpt.data.tokenisation import character_tokenizer, tokenise

tokenizer = TextTokenizer(character_tokenizer(["ab"]))
found = tokenise(itertools.repeat("ab" * 2**19), tokenizer, workers=2)
next(found)
print(*(child.pid for child in active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_what_prepares_text_ends_with_the_program_that_is_killed(tmp_path):
    with open(tmp_path / "workers", "w") as file:  # they would hold a pipe open
        done = subprocess.run([sys.executable, "-c", KILLED], stdout=file, timeout=100)
    workers = [int(word) for word in (tmp_path / "workers").read_text().split()]
    assert done.returncode == -signal.SIGKILL and len(workers) == 2
    end = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [worker for worker in workers if is_running(worker)]
    for worker in left:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert not left

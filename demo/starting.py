"""How training starts: what asks it to save does not end it while it loads its commands."""

import importlib
import signal

from popxl_gpt.utils import program_clock


def train() -> None:
    """`popxl-gpt-train`, `demo/pretraining.py`."""
    program_clock.begin()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing is there to save yet
    importlib.import_module("popxl_gpt.demo.commands").train()

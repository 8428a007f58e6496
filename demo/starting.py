"""How training starts: what asks it to save does not end it while it loads its commands."""

import importlib
import signal


def train() -> None:
    """`popxl-gpt-train`, `demo/pretraining.py`."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing is there to save yet
    importlib.import_module("popxl_gpt.utils.program_clock").begin()
    importlib.import_module("popxl_gpt.demo.commands").train()

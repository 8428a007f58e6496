"""What is begun before PyTorch is loaded, in programs of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2]
BEGIN = "import sys, popxl.extensions as e; e.expect_session({device!r})\n"
WAIT = (
    "import threading\n"
    "for thread in threading.enumerate():\n"
    "    if thread is not threading.current_thread(): thread.join()\n"
    "maps = open('/proc/self/maps').read()\n"
    "print('libtorch_cpu.so' in maps, 'torch' in sys.modules)\n"
)


def printed(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(RUNTIME), **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.multi
@pytest.mark.parametrize(("device", "loaded"), [("cpu", "True"), ("cuda", "False")])
def test_pytorchs_library_is_loaded_before_pytorch_is_for_a_processor(device, loaded):
    assert printed(BEGIN.format(device=device) + WAIT) == f"{loaded} False\n"


@pytest.mark.multi
def test_a_program_that_ends_at_once_ends_well():
    assert printed(BEGIN.format(device="cpu")) == ""


@pytest.mark.multi
def test_pytorch_multiplies_the_same_after_its_library_was_loaded():
    multiply = (
        "import torch; torch.manual_seed(0); x = torch.randn(300, 200)\n"
        "print(torch.get_num_threads(), (x.T @ x).sum().item())\n"
    )
    assert printed(BEGIN.format(device="cpu") + multiply) == printed(multiply)

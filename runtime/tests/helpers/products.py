"""Ways to multiply bfloat16: as this CPU has it, and as CPUs with AMX, with dot products or with
neither.
"""

import functools
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from popxl_engine.native import compiling
from popxl_engine.native import library as native
from popxl_engine.native.library import (
    _are_tiles_refused,
    _functions,
    _library,
    has_tiles,
    library,
)

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="no tiles: torch multiplies")

EMULATOR = Path(__file__).parent / "emulated" / "amx.h"
FLAGS = {
    "compiled": "",
    "AMX": f"-D__AMX_BF16__ -include {shlex.quote(str(EMULATOR))}",
    "dot products": "-mno-amx-bf16",
    "vectors": "-mno-amx-bf16 -mno-avx512bf16",
}
"""What the compiler is told, if this is an x86."""
TURNED_OFF = {"-mno-amx-bf16": "__AMX_BF16__", "-mno-avx512bf16": "__AVX512BF16__"}
"""By flag: what the compiler defines on a CPU on which that changes something."""


@functools.cache
def _defined() -> frozenset[str]:
    """What the compiler defines on this CPU."""
    command = [*(compiling.find_compiler() or ["c++"]), "-march=native", "-dM", "-E", "-x", "c++"]
    told = subprocess.run([*command, os.devnull], capture_output=True, text=True)
    return frozenset(line.split()[1] for line in told.stdout.splitlines())


def _flags_of(way: str) -> str:
    """Without those that change nothing here: the same library is not compiled twice."""
    words = FLAGS[way].split()
    return " ".join(w for w in words if w not in TURNED_OFF or TURNED_OFF[w] in _defined())


def choice_of_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses between the ways, "parts" among them: op by op."""

    def load_again() -> None:
        for cached in (library, _library, _functions, _are_tiles_refused):
            cached.cache_clear()

    def choose(way: str) -> None:
        if way == "parts":
            monkeypatch.setattr(native, "attends", lambda *tensors: False)
        elif platform.machine() == "x86_64" and (flags := _flags_of(way)):
            monkeypatch.setenv("CXX", f"{os.environ.get('CXX', 'c++')} {flags}")
            load_again()
            assert library() is not None
            assert way != "vectors" or not hasattr(library(), "refuses_tiles")

    yield choose
    monkeypatch.undo()
    load_again()

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
from typing import TypeVar

import pytest
import torch
from popxl_engine.native import build, instruction_sets
from popxl_engine.native import library as native
from popxl_engine.native.instruction_sets import InstructionSet
from popxl_engine.native.library import (
    _are_tiles_refused,
    _function,
    _library,
    has_tiles,
    library,
)

TYPES = (torch.float32, torch.bfloat16) if has_tiles() else (torch.float32,)
"""What the library multiplies matrices of."""
Test = TypeVar("Test", bound=Callable[..., None])


def needs_tiles(test: Test) -> Test | None:
    """A test of products of bfloat16 by tiles. Where there are none, torch multiplies, there is
    nothing to test, and none is collected.
    """
    return test if has_tiles() else None


EMULATOR = Path(__file__).parent / "emulated" / "amx.h"
EMULATED = f"-D__AMX_BF16__ -include {shlex.quote(str(EMULATOR))}"
LESSER = {"dot products": "avx512_bf16", "vectors": "avx512"}
"""The best instruction set that multiplies in a way."""


@functools.cache
def _defined(flags: tuple[str, ...]) -> frozenset[str]:
    """What the compiler defines, told these."""
    command = [*(build.find_compiler() or ["c++"]), *flags, "-dM", "-E", "-x", "c++"]
    told = subprocess.run([*command, os.devnull], capture_output=True, text=True, check=True)
    return frozenset(line.split()[1] for line in told.stdout.splitlines())


def sets_in_use() -> list[InstructionSet]:
    """The instruction sets that the compiler uses here, the best first."""
    chosen = instruction_sets.named()
    defined = _defined((build.THIS_CPU,) if chosen is None else chosen.flags)
    return [each for each in instruction_sets.SETS if each.macro in defined]


_LESSER_SETS = [each.name for each in sets_in_use()[1:]]
WAYS = ("compiled", "AMX", *(way for way, name in LESSER.items() if name in _LESSER_SETS))
"""Ways of this CPU: its best one is "compiled", and "AMX" is emulated."""


def choice_of_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses between the ways, "parts" among them: op by op."""

    def load_again() -> None:
        for cached in (library, _library, _function, _are_tiles_refused):
            cached.cache_clear()

    def choose(way: str) -> None:
        if way == "parts":
            monkeypatch.setattr(native, "attends", lambda *tensors: False)
        elif way == "AMX" and platform.machine() == "x86_64":
            monkeypatch.setenv("CXX", f"{os.environ.get('CXX', 'c++')} {EMULATED}")
            load_again()
            assert library() is not None
        elif way in LESSER and way in WAYS:
            monkeypatch.setenv(instruction_sets.VARIABLE, LESSER[way])
            load_again()
            has_tiles = hasattr(library(torch.bfloat16), "refuses_tiles")
            assert has_tiles == (way != "vectors")

    yield choose
    monkeypatch.undo()
    load_again()

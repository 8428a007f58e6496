"""Instruction sets of x86-64 for which kernels are compiled differently: what each adds.

``POPXL_NATIVE_ISA=avx2`` has kernels compiled for a lesser CPU than the one at hand, which then
stands for such a CPU. A wheel brings kernels for all but the least.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from poprun.environment import EnvironmentVariableError

VARIABLE = "POPXL_NATIVE_ISA"


@dataclass(frozen=True)
class InstructionSet:
    """CPUs for which the sources are the same, and the compiler may use the same instructions."""

    name: str
    flags: tuple[str, ...]
    instructions: frozenset[str]
    """All that such a CPU has beyond x86-64, in the words of Linux."""
    macro: str
    """What the sources ask the compiler for."""
    functions: frozenset[str] = frozenset()
    """What the library has that it has for no lesser CPU."""


V3 = frozenset(
    "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split()
    + "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave".split()
)
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
BF16 = V4 | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16"}
V4_BF16 = ("-march=x86-64-v4", "-mavx512bf16")
PRODUCTS = frozenset(
    "refuses_tiles accumulate_product_bf16 multiply_add_bf16 multiply_ceiling_bf16".split()
    + "newton_schulz_bf16 newton_schulz_scratch_bf16".split()
)
"""Products of bfloat16, by its dot products or by tiles."""
SETS = (
    InstructionSet("amx", (*V4_BF16, "-mamx-tile", "-mamx-bf16"), AMX, "__AMX_BF16__"),
    InstructionSet("avx512_bf16", V4_BF16, BF16, "__AVX512BF16__", PRODUCTS),
    InstructionSet("avx512", ("-march=x86-64-v4",), V4, "__AVX512F__"),
    InstructionSet("avx2", ("-march=x86-64-v3",), V3, "__AVX2__"),
    InstructionSet("sse2", ("-march=x86-64",), frozenset(), "__SSE2__"),
)
"""The best first; each has the instructions of those below it."""


def playable() -> tuple[InstructionSet, ...]:
    """The sets whose instructions this CPU has, the best first."""
    if platform.machine() != "x86_64":
        return ()
    has = frozenset(instructions().split())
    return tuple(each for each in SETS if each.instructions <= has)


def named() -> InstructionSet | None:
    """The set that ``POPXL_NATIVE_ISA`` names; None: this CPU's own instructions are used.

    Raises:
        EnvironmentVariableError: there is no such set, or this CPU lacks some of it.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    found = playable()
    for each in found:
        if each.name == name:
            return each
    expected = ", ".join(each.name for each in found) or "no value, as this is no x86-64"
    lacks = ", which this CPU lacks" if any(each.name == name for each in SETS) else ""
    raise EnvironmentVariableError(
        f"{VARIABLE}: got {name}{lacks}; expected {expected}. Correct or unset the variable."
    )


def in_use() -> InstructionSet | None:
    """The set whose kernels run here: the named one, or the best; None: this is no x86-64."""
    return named() or next(iter(playable()), None)


def is_amd() -> bool:
    """Whether this CPU is one of AMD's."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def multiplies_bfloat16() -> bool:
    """Whether kernels may multiply in bfloat16: by dot products or by tiles of this CPU."""
    level = in_use()
    return level is not None and level.instructions >= BF16


def may_use(instruction: str) -> bool:
    """Whether an instruction that this CPU has may be used: the named set has it, if there is
    one.
    """
    chosen = named()
    return chosen is None or instruction in chosen.instructions


def instructions() -> str:
    """The line of the system's that names the instructions of this CPU; nothing where there is
    none.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

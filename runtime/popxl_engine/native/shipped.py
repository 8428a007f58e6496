"""Kernels that a wheel brings compiled: a file for each level of instructions.

    python -m popxl_engine.native.shipped FOLDER

makes these files in a folder, as far as the compiler can; `wheel` has setuptools do it. The files
lie beside the package's Python and are trusted as it is. Each name says what the file was made of:
one of other sources, flags or instructions is not found.
"""

import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from popxl_engine.native import compiling

FOLDER = compiling.FOLDER / "compiled"
"""There is none in a checkout."""


@dataclass(frozen=True)
class Level:
    """CPUs for which the sources are the same, and the compiler may use the same instructions."""

    name: str
    flags: tuple[str, ...]
    instructions: frozenset[str]
    """All that such a CPU has, in the words of Linux."""


V3 = frozenset(
    "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3".split()
    + "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave".split()
)
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
BF16 = V4 | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16"}
LEVELS = (
    Level("amx", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), AMX),
    Level("bf16", ("-march=x86-64-v4", "-mavx512bf16"), BF16),
    Level("v4", ("-march=x86-64-v4",), V4),
    Level("v3", ("-march=x86-64-v3",), V3),
)
"""The best first. A CPU has the first one whose instructions it has, and no other one's file."""


def library_for(instructions: str) -> Path | None:
    """The file for a CPU; None where the wheel has brought none that is whole.

    Args:
        instructions: that the CPU has, as Linux lists them.
    """
    if not FOLDER.is_dir():
        return None
    has = frozenset(instructions.split())
    level = next((level for level in LEVELS if level.instructions <= has), None)
    path = FOLDER / _name(level) if level else None
    return path if path and path.is_file() and compiling.is_whole(path.read_bytes()) else None


def make(folder: Path) -> None:
    """Compile for every level. Prints which ones the compiler refuses: these are left out.

    Makes no folder where there is no compiler, or no such CPU or system.
    """
    compiler = compiling.find_compiler()
    if compiler is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return
    with ThreadPoolExecutor(len(LEVELS)) as pool:
        codes = list(pool.map(lambda level: _compiled(level, compiler), LEVELS))
    for level, code in zip(LEVELS, codes):
        if code is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _name(level)).write_bytes(compiling.sealed(code))


def _compiled(level: Level, compiler: list[str]) -> bytes | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.so"
        units = map(str, compiling.units_in(compiling.FOLDER))
        command = [*compiler, *_flags(level), "-shared", "-Wl,-s", *units, "-o", str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if not done.returncode:
            return file.read_bytes()
    print(f"kernels for {level.name}: not compiled ({done.stdout.decode(errors='replace')[-500:]})")
    return None


def _name(level: Level) -> str:
    key = compiling.key_of(compiling.files_in(compiling.FOLDER), _flags(level))
    return f"kernels_{level.name}_{key}.so"


def _flags(level: Level) -> list[str]:
    optional = [flag for flag in compiling.OPTIONAL_FLAGS if flag != compiling.THIS_CPU]
    return [*compiling.FLAGS, *optional, *level.flags]


if __name__ == "__main__":
    make(Path(sys.argv[1]))

"""Kernels that a wheel brings compiled: a file for each instruction set.

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
from pathlib import Path

from popxl_engine.native import compiling, instruction_sets
from popxl_engine.native.instruction_sets import SETS, InstructionSet

FOLDER = compiling.FOLDER / "compiled"
"""There is none in a checkout."""


LEVELS = tuple(each for each in SETS if each.instructions)


def library() -> Path | None:
    """The file for this CPU, or for the instruction set that is named; None where the wheel has
    brought none that is whole.
    """
    if not FOLDER.is_dir():
        return None
    level = instruction_sets.named() or next(iter(instruction_sets.playable()), None)
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


def _compiled(level: InstructionSet, compiler: list[str]) -> bytes | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.so"
        units = map(str, compiling.units_in(compiling.FOLDER))
        command = [*compiler, *_flags(level), "-shared", "-Wl,-s", *units, "-o", str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if not done.returncode:
            return file.read_bytes()
    print(f"kernels for {level.name}: not compiled ({done.stdout.decode(errors='replace')[-500:]})")
    return None


def _name(level: InstructionSet) -> str:
    key = compiling.key_of(compiling.files_in(compiling.FOLDER), _flags(level))
    return f"kernels_{level.name}_{key}.so"


def _flags(level: InstructionSet) -> list[str]:
    return [*compiling.FLAGS, *compiling.flags_for(level.flags), *level.flags]


if __name__ == "__main__":
    make(Path(sys.argv[1]))

"""Make a file of compiled code: a process of its own, that ends when its standard input does.

    python -I -S compiling.py SECONDS FILE SOURCES FLAGS COMPILER [ARGUMENT ...]

It leaves nothing unfinished behind, and loads nothing but the standard library.
"""

import contextlib
import fcntl
import hashlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# Without contraction an element's bits do not depend on its place in a vector, on the vector's
# width or on the CPU.
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC")
THIS_CPU = "-march=native"
OPTIONAL_FLAGS = (THIS_CPU, "-mprefer-vector-width=512", "-fopenmp")
"""What some compilers or CPUs do not know: tried all together, then those with which an empty file
compiles.
"""
ROOM = 1 << 23
"""Bytes that the library's folder must have room for, with what the compiler writes on the way."""
CANNOT_WRITE, CANNOT_COMPILE = 3, 4
"""Exit codes. The reason is printed."""


def main(seconds: str, file: str, sources: str, named: str, *compiler: str) -> None:
    """Make the library of the units in a folder. Does not return.

    Args:
        named: flags of an instruction set, in one word; nothing for this CPU's own.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    units, flags = units_in(Path(sources)), tuple(shlex.split(named))
    try:
        _make(Path(file), units, list(compiler), float(seconds), flags)
    except OSError as error:
        sys.exit(_told(CANNOT_WRITE, error))
    except subprocess.SubprocessError as error:
        sys.exit(_told(CANNOT_COMPILE, error))
    sys.exit(0)


def _told(code: int, error: Exception) -> int:
    print(error, flush=True)
    return code


def units_in(folder: Path) -> list[Path]:
    """What is compiled side by side, then linked."""
    return sorted(folder.glob("*.cpp"))


def files_in(folder: Path) -> list[Path]:
    """Units and headers."""
    return [*units_in(folder), *sorted(folder.glob("*.h"))]


def key_of(files: Sequence[Path], *how: object) -> str:
    """What names the library that is made from these files in this way."""
    contents = {path.name: path.read_bytes() for path in files}
    return hashlib.sha256(repr((contents, *how)).encode()).hexdigest()[:16]


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: CXX, or the first one in PATH."""
    for command in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        with contextlib.suppress(ValueError):  # CXX has a quote that nothing closes
            words = shlex.split(command or "")
            if words and shutil.which(words[0]):
                return words
    return None


def _make(
    path: Path,
    units: Sequence[Path],
    compiler: list[str],
    seconds: float,
    named: tuple[str, ...],
) -> None:
    """Compile to ``path``, with a hash of the file at its end: loading a damaged one kills. Raises
    as `built`.

    Where another process makes a file in this folder, this one waits for it, and compiles nothing
    if it was this file. Whoever loads the file looks whose it is and whether it is whole.
    """
    before = _mark(path)
    with _alone_in(path.parent, seconds):
        if (after := _mark(path)) is None or after == before:
            _compile_to(path, units, compiler, time.monotonic() + seconds, named)


def _mark(path: Path) -> tuple[int, int] | None:
    """What changes with the file at ``path``; None: there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextlib.contextmanager
def _alone_in(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the folder's lock in the body. Without it after so many seconds, or where the file
    system knows none.

    Raises:
        SystemExit: standard input has ended.
    """
    descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _end_with_input(0.05)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _end_with_input(seconds: float) -> None:
    """Wait, and end this process where standard input ends meanwhile."""
    if select.select([sys.stdin], [], [], seconds)[0]:
        sys.exit(1)


def _compile_to(
    path: Path, units: Sequence[Path], compiler: list[str], until: float, named: tuple[str, ...]
) -> None:
    # A folder of its own: machines that share the cache without locks may compile at the same time.
    folder = Path(tempfile.mkdtemp(".part", f"{path.stem}.", path.parent))
    try:
        part = folder / path.name
        part.write_bytes(bytes(ROOM))  # a full folder is told from a compiler that fails
        part.unlink()
        _compile(compiler, units, part, until, named)
        part.write_bytes(sealed(part.read_bytes()))
        part.chmod(0o600)  # whatever the umask says: a file that others may write to is not loaded
        os.replace(part, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(
    compiler: list[str], units: Sequence[Path], to: Path, until: float, named: tuple[str, ...]
) -> None:
    """Compile with all flags, or else with those that the compiler knows, each by itself; those of
    a named instruction set must be known.
    """
    wanted = flags_for(named)

    def all_units(optional: Sequence[str]) -> None:
        flags = [*FLAGS, *named, *optional]
        objects = [str(to.with_name(f"{unit.stem}.o")) for unit in units]
        compiling = [[*flags, "-c", str(unit), "-o", o] for unit, o in zip(units, objects)]
        _run_all(compiler, compiling, to.parent, until)
        _run_all(compiler, [[*flags, "-shared", *objects, "-o", str(to)]], to.parent, until)

    def knows(flag: str) -> bool:
        try:
            _run_all(
                compiler,
                [[*FLAGS, flag, "-shared", "-x", "c++", os.devnull, "-o", str(to)]],
                to.parent,
                until,
            )
        except Refusal:
            return False
        return True

    try:
        all_units(wanted)
    except Refusal:
        all_units([flag for flag in wanted if knows(flag)])


def flags_for(named: tuple[str, ...]) -> tuple[str, ...]:
    """The optional flags: this CPU's instructions among them, where no others are named."""
    return tuple(flag for flag in OPTIONAL_FLAGS if flag != THIS_CPU or not named)


class Refusal(subprocess.SubprocessError):
    """A compiler has ended with an error."""


def started(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """A process with a session of its own. SubprocessError where it cannot be started."""
    try:
        return subprocess.Popen(command, start_new_session=True, **options)
    except OSError as error:
        raise subprocess.SubprocessError(str(error)) from error


def _run_all(
    compiler: list[str], calls: Sequence[Sequence[str]], folder: Path, until: float
) -> None:
    """Calls of a compiler side by side, whose temporary files are in a folder. None goes on when
    this ends.

    Raises:
        Refusal: one of them fails.
        subprocess.SubprocessError: they cannot be started, or take too long.
        SystemExit: standard input has ended.
    """
    log = folder / "log"
    running: list[subprocess.Popen[bytes]] = []
    try:
        with open(log, "wb") as file:
            output = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            for arguments in calls:
                environment = {**os.environ, "TMPDIR": str(folder)}
                running.append(started([*compiler, *arguments], env=environment, **output))
        while any(process.poll() is None for process in running):
            if any(process.returncode for process in running):
                break
            _end_with_input(0.01)
            if time.monotonic() > until:
                raise subprocess.SubprocessError(f"{shlex.join(compiler)} has not ended in time")
        failed = [number for number, process in enumerate(running) if process.returncode]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait()
    if failed:
        words = log.read_text(errors="replace").strip()[-500:]
        command = shlex.join([*compiler, *calls[failed[0]]])
        raise Refusal(f"{command}: {running[failed[0]].returncode} {words}")


def sealed(code: bytes) -> bytes:
    """A library with a hash of it at its end: loading a damaged one kills."""
    return code + hashlib.sha256(code).digest()


def is_whole(content: bytes) -> bool:
    """Whether a file's content is what was `sealed`."""
    return content == sealed(content[: -hashlib.sha256().digest_size])


if __name__ == "__main__":
    main(*sys.argv[1:])

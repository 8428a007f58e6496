"""The compiled library's file: made once per machine, beside the program that will need it.

    python -I -S build.py SECONDS FILE COMPILER [ARGUMENT ...]

is how it is made: by a process that ends when its standard input does, and leaves nothing unfinished behind. This
module loads no torch, so that it can begin before torch is there.
"""

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import platform
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

logger = logging.getLogger("popxl")

FOLDER = Path(__file__).parent / "native"
UNITS = sorted(FOLDER.glob("*.cpp"))
"""Compiled side by side, then linked."""
SOURCES = sorted([*UNITS, *FOLDER.glob("*.h")])
# Without contraction an element's bits do not depend on its place in a vector, on the vector's width or on the CPU.
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC")
OPTIONAL_FLAGS = ("-march=native", "-mprefer-vector-width=512", "-fopenmp")
"""What some compilers or CPUs do not know: tried all together, then those with which an empty file compiles."""
TIME_LIMIT = 120
"""Seconds that compiling may take; it takes about three on two cores."""
ROOM = 1 << 23
"""Bytes that the library's folder must have room for, with what the compiler writes on the way."""
PATIENCE = 5
"""Seconds in which a process that makes the file, and is told to, has ended."""

LOCK = threading.RLock()
"""Held while the file is looked for."""
_begun: Dict[Path, "Making"] = {}


# In the program's process


@functools.cache
def begin() -> None:
    """Start to make the library in the background, unless it is there, switched off, or impossible."""
    compiler = _compiler()
    if _is_off() or compiler is None:
        return
    for path in _places(tuple(compiler)):
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # who needs the library says so
            _start(path, compiler)
            return


def libraries() -> Iterator[Path]:
    """Where the library is, place after place: the loader may refuse some. Waits, and says why there are no more."""
    if _is_off():
        return
    compiler = _compiler()
    if compiler is None:
        logger.warning("native kernels: no C++ compiler (CXX, c++, g++, clang++); the plain, slower ones are used.")
        return
    for path in _places(tuple(compiler)):
        try:
            found = made(path, compiler)
        except OSError as error:
            logger.debug("native kernels: %s cannot be used (%s)", path.parent, error)
        except subprocess.SubprocessError as error:
            logger.warning("native kernels: not compiled (%s); the plain, slower ones are used.", error)
            return
        else:
            yield found
    logger.warning("native kernels: no folder to keep them in (set POPXL_CACHE_DIR); the plain, slower ones are used.")


def made(path: Path, compiler: List[str]) -> Path:
    """Wait until the library is at ``path``.

    Raises:
        OSError: the folder cannot be written or is full, or somebody else may write what would be loaded from it.
        subprocess.SubprocessError: the compiler fails with every set of flags, or takes too long.
    """
    with LOCK:
        _start(path, compiler)
        if path in _begun:
            try:
                _begun[path].wait()
            finally:
                del _begun[path]
    return path


def _start(path: Path, compiler: List[str]) -> None:
    """Make the library at ``path`` in the background, unless it is there or this has begun. Raises as `made`."""
    with LOCK:
        if path in _begun:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.parent.stat()
        if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            raise PermissionError(f"{path.parent} belongs to another user, or everybody may write to it")
        if not (path.exists() and _is_whole(path.read_bytes())):
            _begun[path] = Making(path, compiler)


class Making:
    """A process that makes the library at ``path``. It ends with this one, which does not wait for it otherwise."""

    def __init__(self, path: Path, compiler: List[str]):
        command = [sys.executable or "python3", "-I", "-S", __file__, str(TIME_LIMIT), str(path), *compiler]
        _watch_ends()
        self._process = _started(  # Ctrl-C is for the program
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def wait(self) -> None:
        """Until it has ended. Raises as `made`."""
        try:
            assert self._process.stdout is not None
            said = self._process.stdout.read().decode(errors="replace").strip()
        finally:
            self.end()
        code = self._process.returncode
        if code == CANNOT_WRITE:
            raise OSError(said)
        if code:
            raise subprocess.SubprocessError(said if code == CANNOT_COMPILE else f"ended with {code}: {said[-500:]}")

    def end(self) -> None:
        """Give up what is not finished."""
        self._close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def leave(self) -> None:
        """In a fork: it belongs to the process that has started it."""
        self._close()
        self._process.returncode = 0

    def _close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


@functools.cache
def _watch_ends() -> None:
    atexit.register(_end_all)
    os.register_at_fork(after_in_child=_leave_all)


def _end_all() -> None:
    for making in _begun.values():
        making.end()


def _leave_all() -> None:
    global LOCK
    LOCK = threading.RLock()  # the other one's holder may be missing
    for making in _begun.values():
        making.leave()
    _begun.clear()


def _is_off() -> bool:
    return os.environ.get("POPXL_NATIVE", "1") == "0"


def _compiler() -> Optional[List[str]]:
    for command in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        with contextlib.suppress(ValueError):  # CXX has a quote that nothing closes
            words = shlex.split(command or "")
            if words and shutil.which(words[0]):
                return words
    return None


@functools.cache
def _places(compiler: Tuple[str, ...]) -> List[Path]:
    """Where the library may be, of these sources and flags, this compiler and machine; the same when asked again."""
    sources = {path.name: path.read_bytes() for path in SOURCES}
    key = hashlib.sha256(repr((sources, FLAGS, OPTIONAL_FLAGS, compiler, _machine())).encode()).hexdigest()[:16]
    return [folder / f"kernels_{key}.so" for folder in _folders()]


def _machine() -> str:
    """What compiled code depends on: the architecture, and the instructions that this CPU has."""
    features = sysconfig.get_platform() + platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return features + platform.processor()
    return features + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _folders() -> List[Path]:
    """Where the library may be kept, the preferred place first; a private temporary folder is the last resort."""
    folders = [Path(named)] if (named := os.environ.get("POPXL_CACHE_DIR")) else []
    with contextlib.suppress(RuntimeError):  # the user has no home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popxl")
    with contextlib.suppress(OSError):  # no temporary folder can be written
        folders.append(Path(tempfile.gettempdir()) / f"popxl-{os.getuid()}")
    return [folder.absolute() for folder in folders]  # the loader looks up names without a folder elsewhere


def _started(command: List[str], **options: Any) -> "subprocess.Popen[bytes]":
    """A process with a session of its own. SubprocessError where it cannot be started."""
    try:
        return subprocess.Popen(command, start_new_session=True, **options)
    except OSError as error:
        raise subprocess.SubprocessError(str(error)) from error


# In the process that makes the file

CANNOT_WRITE, CANNOT_COMPILE = 3, 4
"""Exit codes. The reason is printed."""


def main(seconds: str, file: str, *compiler: str) -> None:
    """Make the library. Does not return."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        _make(Path(file), list(compiler), time.monotonic() + float(seconds))
    except OSError as error:
        sys.exit(_told(CANNOT_WRITE, error))
    except subprocess.SubprocessError as error:
        sys.exit(_told(CANNOT_COMPILE, error))
    sys.exit(0)


def _told(code: int, error: Exception) -> int:
    print(error, flush=True)
    return code


def _make(path: Path, compiler: List[str], until: float) -> None:
    """Compile to ``path``, with a hash of the file at its end: loading a damaged one kills. Raises as `made`."""
    # A folder of its own: other programs, and machines that share the cache, may compile at the same time.
    folder = Path(tempfile.mkdtemp(".part", f"{path.stem}.", path.parent))
    try:
        part = folder / path.name
        part.write_bytes(bytes(ROOM))  # a full folder is told from a compiler that fails
        part.unlink()
        _compile(compiler, part, until)
        part.write_bytes(_sealed(part.read_bytes()))
        os.replace(part, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(compiler: List[str], to: Path, until: float) -> None:
    """Compile with all flags, or else with those that the compiler knows, each by itself."""

    def all_units(optional: Sequence[str]) -> None:
        flags = [*FLAGS, *optional]
        objects = [str(to.with_name(f"{unit.stem}.o")) for unit in UNITS]
        compiling = [[*flags, "-c", str(unit), "-o", o] for unit, o in zip(UNITS, objects)]
        _run_all(compiler, compiling, to.parent, until)
        _run_all(compiler, [[*flags, "-shared", *objects, "-o", str(to)]], to.parent, until)

    def knows(flag: str) -> bool:
        try:
            _run_all(compiler, [[*FLAGS, flag, "-shared", "-x", "c++", os.devnull, "-o", str(to)]], to.parent, until)
        except Refusal:
            return False
        return True

    try:
        all_units(OPTIONAL_FLAGS)
    except Refusal:
        all_units([flag for flag in OPTIONAL_FLAGS if knows(flag)])


class Refusal(subprocess.SubprocessError):
    """A compiler has ended with an error."""


def _run_all(compiler: List[str], calls: Sequence[Sequence[str]], folder: Path, until: float) -> None:
    """Calls of a compiler side by side, whose temporary files are in a folder. None goes on when this ends.

    Raises:
        Refusal: one of them fails.
        subprocess.SubprocessError: they cannot be started, or take too long.
        SystemExit: standard input has ended.
    """
    log = folder / "log"
    running: List["subprocess.Popen[bytes]"] = []
    try:
        with open(log, "wb") as file:
            output = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            for arguments in calls:
                environment = {**os.environ, "TMPDIR": str(folder)}
                running.append(_started([*compiler, *arguments], env=environment, **output))
        while any(process.poll() is None for process in running):
            if any(process.returncode for process in running):
                break
            if select.select([sys.stdin], [], [], 0.01)[0]:
                sys.exit(1)
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


def _sealed(code: bytes) -> bytes:
    return code + hashlib.sha256(code).digest()


def _is_whole(content: bytes) -> bool:
    return content == _sealed(content[: -hashlib.sha256().digest_size])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Libraries of native code: made once per machine, beside the program that will need them, or
brought by a wheel.

A process of its own makes a library. It ends with the program, and leaves nothing unfinished
behind. Libraries are only taken from folders and files that no other user has written and none can
change (`poprun.private`); where there are none such, each program makes its own. A wheel's kernels
lie beside the package's Python, and are trusted as it is. This module loads no torch.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from poprun import private

from popxl_engine.native import instruction_sets
from popxl_engine.native.instruction_sets import SETS, InstructionSet

logger = logging.getLogger("popxl")

FOLDER = Path(__file__).parent
SHIPPED = FOLDER / "compiled"
"""The folder of a wheel's kernels; there is none in a checkout."""
LEVELS = tuple(each for each in SETS if each.instructions)
"""The instruction sets for which a wheel has kernels."""
# Without contraction an element's bits do not depend on its place in a vector or on the vector's
# width, nor, on CPUs with FMA, on the CPU. Kernels need two things of -O3, which takes half as long
# again to compile: loops over registers are unrolled, and those of any length are in vectors, for
# which GCC before 12 needs a flag more. Clang has both at -O2, and ignores the flags.
FLAGS = (
    *("-O2", "-fpeel-loops", "-ftree-vectorize", "-fvect-cost-model"),
    *("-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC"),
)
THIS_CPU = "-march=native"
OPTIONAL_FLAGS = (THIS_CPU, "-mprefer-vector-width=512", "-fopenmp")
"""What some compilers or CPUs do not know: left out where no empty file compiles with it."""
TIME_LIMIT = 120
"""Seconds that compiling may take; it takes about three on two cores."""
VERSION_TIME_LIMIT = 5
"""Seconds in which a compiler names its version; it takes some milliseconds."""
MAKE = (
    "import sys; sys.path.append(sys.argv[1]); from popxl_engine.native.build import main; main()"
)
"""The program that makes a library. It needs the standard library and this package alone."""
PR_SET_PDEATHSIG = 1
"""prctl(2), Linux: the signal that a process gets when its parent ends, however that ends."""
LOCK = threading.RLock()
"""A lock that is held while a library is looked for."""
_in_background: dict[str, "subprocess.Popen[str]"] = {}
"""The processes that make a library in the background, by its name."""


@dataclass(frozen=True)
class Sources:
    """What is compiled into one library."""

    name: str
    """The library's name begins with it."""
    folder: Path
    """The folder of units, which are compiled side by side, and headers."""
    instead: str
    """Words for what is used where there is no such library."""
    words: tuple[str, ...] = ()
    """Arguments of the compiler beside `FLAGS`."""
    others: tuple[Path, ...] = ()
    """Files elsewhere that change when what is compiled does."""
    named: tuple[str, ...] = ()
    """Flags of an instruction set, in place of those of `instruction_sets.named`."""
    without: tuple[str, ...] = ()
    """Units of the folder that have nothing for this library."""

    @property
    def units(self) -> list[Path]:
        """The files that are compiled."""
        return sorted(p for p in self.folder.glob("*.cpp") if p.stem not in self.without)

    def file_name(self, name: str, *how: object) -> str:
        """The name of a library that is made from these files in one way, which begins so."""
        files = (*self.units, *sorted(self.folder.glob("*.h")), *self.others)
        contents = {path.name: path.read_bytes() for path in files}
        key = hashlib.sha256(repr((contents, *how)).encode()).hexdigest()[:16]
        return f"{name}_{key}.so"


KERNEL_SOURCES = Sources(
    "kernels",
    FOLDER,
    "the plain, slower ones are used",
    without=("newton_schulz_tiles", "products"),
)
"""The sources of kernels of float32, and of those of no one type."""
BFLOAT16_SOURCES = replace(
    KERNEL_SOURCES,
    name="bfloat16_kernels",
    words=("-DBFLOAT16_LIBRARY",),
    without=("adamw", "float_products", "newton_schulz"),
)
"""The sources of kernels of bfloat16: most programs need none, and wait half as long."""
KERNELS = (KERNEL_SOURCES, BFLOAT16_SOURCES)


@functools.cache
def allocator() -> Sources | None:
    """What is compiled with the headers of PyTorch; None where it has come without them."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    torch = Path(spec.origin).parent
    include, library = torch / "include", torch / "lib" / "libc10.so"
    if not (library.exists() and (include / "c10/core/CPUAllocator.h").exists()):
        return None
    words = ("-isystem", str(include), "-Wl,--no-as-needed", str(library))
    instead, version = "the C library's is used", torch / "version.py"
    return Sources("allocator", FOLDER / "memory", instead, words, (version,))


# A program's side


def begin(bfloat16: bool = False) -> None:
    """Start to make the libraries that every program needs in the background, where they lack and
    can be made.

    Args:
        bfloat16: make that of bfloat16's kernels, too.
    """
    if _is_off():
        return
    for sources in (allocator(), KERNEL_SOURCES, BFLOAT16_SOURCES):  # the short one first
        if sources is not None and (bfloat16 or sources is not BFLOAT16_SOURCES):
            _begin(sources)


@functools.cache
def _begin(sources: Sources) -> None:
    compiler = find_compiler()
    if compiler is None or sources in KERNELS and shipped(sources) is not None:
        return
    with contextlib.suppress(OSError):  # who needs the library says so
        path = _path(sources, compiler)
        if not is_there(path):
            process = _maker(path, sources, compiler, subprocess.DEVNULL)
            _in_background[sources.name] = process
            for end in (process.wait, process.terminate):  # the last one comes first
                atexit.register(end)


def is_being_made(sources: Sources) -> bool:
    """Whether a compiler still works on a library."""
    return sources.name in _in_background and _in_background[sources.name].poll() is None


def load(sources: Sources = KERNEL_SOURCES) -> ctypes.CDLL | None:
    """A library, once it is there. None where there is none, and says why: of the kernels, for the
    others lack for the same reasons.
    """
    if _is_off():
        return None
    level = logging.WARNING if sources in KERNELS else logging.DEBUG
    with LOCK:
        try:
            path = library(sources)
            try:
                loaded = ctypes.CDLL(str(path))
            except OSError:  # such as one that needs a newer C library
                if path.parent != SHIPPED or find_compiler() is None:
                    raise
                path = _made(sources)
                loaded = ctypes.CDLL(str(path))
            logger.debug("native code: %s is used", path)
            return loaded
        except (OSError, subprocess.SubprocessError) as error:
            logger.log(level, "native %s: %s; %s.", sources.name, error, sources.instead)
    return None


def library(sources: Sources = KERNEL_SOURCES) -> Path:
    """The path of a library, once it is there: the wheel's, or one made here.

    Raises:
        OSError: there is no compiler, or no folder; another user can have written the library.
        subprocess.SubprocessError: the compiler fails, cannot write, or takes too long.
    """
    if sources in KERNELS and (path := shipped(sources)) is not None:
        return path
    return _made(sources)


def _made(sources: Sources) -> Path:
    """The path of a library that is made here, once it is there. Raises as `library`."""
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (CXX, c++, g++, clang++)")
    if sources.name in _in_background:
        _in_background.pop(sources.name).wait(TIME_LIMIT)
    path = _path(sources, compiler)
    if not is_there(path):
        make(path, sources, compiler)
    return path


def is_there(path: Path) -> bool:
    """Whether a whole library is at ``path``. NotPrivate: another user can have written it."""
    try:
        with open(private.open_file(path), "rb") as file:
            return is_whole(file.read())
    except FileNotFoundError:
        return False


def make(path: Path, sources: Sources, compiler: list[str]) -> None:
    """Make a library at ``path``. Where another process makes one in this folder, this one waits,
    and compiles nothing if it was this one. Raises as `library`.
    """
    with _maker(path, sources, compiler, subprocess.PIPE) as process:
        try:
            said, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            said = f"{shlex.join(compiler)} has not ended in time"
        finally:
            process.terminate()
    if process.returncode:
        raise subprocess.SubprocessError(f"not compiled ({said.strip()[-500:]})")


def _maker(path: Path, sources: Sources, compiler: list[str], out: int) -> "subprocess.Popen[str]":
    """A process that makes a library and prints why it cannot."""
    command = [sys.executable or "python3", "-I", "-S", "-B", "-c", MAKE, str(FOLDER.parents[1])]
    named = shlex.join(sources.named or _named_flags())
    command += [str(os.getpid()), str(path), shlex.join(map(str, sources.units)), named]
    return subprocess.Popen(
        [*command, *compiler, *sources.words],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the program
    )


def _is_off() -> bool:
    return os.environ.get("POPXL_NATIVE", "1") == "0"


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: CXX, or the first one in PATH."""
    for command in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        with contextlib.suppress(ValueError):  # CXX has a quote that nothing closes
            words = shlex.split(command or "")
            if words and shutil.which(words[0]):
                return words
    return None


def flags_for(named: Sequence[str]) -> list[str]:
    """The optional flags: this CPU's instructions among them, where no others are named."""
    return [flag for flag in OPTIONAL_FLAGS if flag != THIS_CPU or not named]


def _named_flags() -> tuple[str, ...]:
    """The flags of the instruction set that is named; nothing where none is."""
    chosen = instruction_sets.named()
    return () if chosen is None else chosen.flags


def _path(sources: Sources, compiler: list[str]) -> Path:
    """The path where a library is that this compiler makes for this machine. OSError: no folder."""
    version = _version(*compiler) if sources in KERNELS else b""
    flags = (FLAGS, OPTIONAL_FLAGS, _named_flags(), compiler, version, sources.words)
    cpu = (sysconfig.get_platform(), platform.processor(), instruction_sets.instructions())
    return private_folder() / sources.file_name(sources.name, flags, cpu, platform.libc_ver())


@functools.cache
def _version(*compiler: str) -> bytes:
    """The line in which a compiler names its version; nothing where it does not."""
    try:
        said = subprocess.run(
            [*compiler, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_TIME_LIMIT,
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return said.stdout.partition(b"\n")[0]


@functools.cache
def private_folder() -> Path:
    """The first folder for compiled code that is this user's alone; else one that ends with this
    process. OSError: no temporary folder can be written.
    """
    level = logging.WARNING
    for folder in _folders():
        try:
            real = private.make_folder(folder)
            if os.access(real, os.W_OK):
                return real
        except private.NotPrivate as error:
            told = "native kernels: not kept in %s (%s); they are kept elsewhere."
            logger.log(level, told, folder, error)
            level = logging.DEBUG
        except OSError as error:
            logger.debug("native kernels: %s cannot be used (%s)", folder, error)
    own = tempfile.mkdtemp(prefix="popxl-")  # of mode 0700
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return private.check_folder(Path(own))


def _folders() -> list[Path]:
    """The folders where libraries may be kept, the preferred place first."""
    folders = [Path(named)] if (named := os.environ.get("POPXL_CACHE_DIR")) else []
    with contextlib.suppress(RuntimeError):  # the user has no home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popxl")
    with contextlib.suppress(OSError):  # no temporary folder can be written
        folders.append(Path(tempfile.gettempdir()) / f"popxl-{os.getuid()}")
    # the loader looks up names without a folder elsewhere
    return [folder.absolute() for folder in folders]


# A wheel's side


def shipped(sources: Sources) -> Path | None:
    """A wheel's library of kernels for this CPU or the named instruction set, where it is whole."""
    if not SHIPPED.is_dir():
        return None
    level = instruction_sets.named() or next(iter(instruction_sets.playable()), None)
    path = SHIPPED / _shipped_name(sources, level) if level else None
    return path if path and path.is_file() and is_whole(path.read_bytes()) else None


def ship(folder: Path) -> None:
    """Make kernels for every level in a folder. Prints which ones the compiler refuses.

    Makes no folder where there is no compiler, or no such CPU or system.
    """
    compiler = find_compiler()
    if compiler is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for level, sources in itertools.product(LEVELS, KERNELS):
        path, words = folder / _shipped_name(sources, level), (*sources.words, "-Wl,-s")
        try:
            make(path, replace(sources, words=words, named=level.flags), compiler)
        except subprocess.SubprocessError as error:
            print(f"{sources.name} for {level.name}: {error}")
        else:
            path.chmod(0o644)


def _shipped_name(sources: Sources, level: InstructionSet) -> str:
    flags = (*FLAGS, *flags_for(level.flags), *level.flags, *sources.words)
    return sources.file_name(f"{sources.name}_{level.name}", flags)


# The process that makes a library


def main() -> None:
    """Make the library that the arguments name. SystemExit: it cannot be made, and why."""
    signal.signal(signal.SIGTERM, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parent, path, units, named, *compiler = sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        if os.getppid() == int(parent):  # else it has ended already
            _make_alone(Path(path), shlex.split(units), compiler, shlex.split(named))
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(str(error))


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the cleaning up
    sys.exit(1)


def _make_alone(
    path: Path, units: Sequence[str], compiler: list[str], named: Sequence[str]
) -> None:
    """Compile to ``path`` while nobody else does in this folder."""
    lock = os.open(path.parent, os.O_RDONLY)  # until this process ends
    with contextlib.suppress(OSError):  # the file system knows no locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    if is_there(path):
        return
    # A folder of its own: machines that share the cache without locks may compile at the same time.
    folder = Path(tempfile.mkdtemp(".part", f"{path.stem}.", path.parent))
    try:
        part = folder / path.name
        _compile(compiler, [Path(unit) for unit in units], part, named)
        part.write_bytes(sealed(part.read_bytes()))
        part.chmod(0o600)  # whatever the umask says: what others may write to is not loaded
        os.replace(part, path)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until it is gone
        shutil.rmtree(folder, ignore_errors=True)


def _compile(compiler: list[str], units: Sequence[Path], to: Path, named: Sequence[str]) -> None:
    """Compile with those optional flags that the compiler knows, and all of the named set."""
    run = functools.partial(_run, compiler, to.parent)

    def knows(flag: str) -> bool:
        try:
            run([[*FLAGS, flag, "-shared", "-x", "c++", os.devnull, "-o", to]])
        except subprocess.SubprocessError:
            return False
        return True

    flags = [*FLAGS, *named, *filter(knows, flags_for(named))]
    objects = [to.with_name(f"{unit.stem}.o") for unit in units]
    run([[*flags, "-c", unit, "-o", each] for unit, each in zip(units, objects)])
    run([[*flags, "-shared", *objects, "-o", to]])


def _run(compiler: list[str], folder: Path, calls: Sequence[Sequence[str | Path]]) -> None:
    """Calls of a compiler side by side, whose temporary files are in a folder. None goes on when
    this ends. SubprocessError: one of them fails.
    """
    log, environment = folder / "log", {**os.environ, "TMPDIR": str(folder)}
    commands = [[*compiler, *map(str, call)] for call in calls]
    running: list[subprocess.Popen[str]] = []
    start = functools.partial(subprocess.Popen, text=True, env=environment, start_new_session=True)
    try:
        with open(log, "wb") as file:
            # A signal waits until all that is started is in the list of what to end.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            running.extend(start(command, stdout=file, stderr=file) for command in commands)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for command, process in zip(commands, running):
            if code := process.wait():
                words = log.read_text(errors="replace").strip()[-500:]
                raise subprocess.SubprocessError(f"{shlex.join(command)}: {code} {words}")
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                process.wait()


def sealed(code: bytes) -> bytes:
    """A library with a hash of it at its end: loading a damaged one kills."""
    return code + hashlib.sha256(code).digest()


def is_whole(content: bytes) -> bool:
    """Whether a file's content is what was `sealed`."""
    return content == sealed(content[: -hashlib.sha256().digest_size])

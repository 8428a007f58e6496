"""Files of compiled code: made once per machine, beside the program that will need them.

They are only taken from folders and files that no other user has written and none can change
(`poprun.private`); where there are none such, each process makes its own. `compiling` is how they
are made. Kernels that a wheel has brought for this CPU (`shipped`) are taken before any that would
be made here. This module loads no torch, so that it can begin before torch is there.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from poprun import private

from popxl_engine.native import compiling, instruction_sets, shipped
from popxl_engine.native.compiling import CANNOT_COMPILE, CANNOT_WRITE, FLAGS, OPTIONAL_FLAGS

logger = logging.getLogger("popxl")


@dataclass(frozen=True)
class Sources:
    """What is compiled into one file."""

    name: str
    """The file's name begins with it."""
    folder: Path
    """Of units and headers."""
    instead: str
    """Words for what is used where there is no such file."""
    words: tuple[str, ...] = ()
    """Arguments of the compiler beside `FLAGS`."""
    others: tuple[Path, ...] = ()
    """Files elsewhere that change when what is compiled does."""

    def files(self) -> list[Path]:
        """All that the file is made from, which name it."""
        return [*compiling.files_in(self.folder), *self.others]


KERNEL_SOURCES = Sources("kernels", compiling.FOLDER, "the plain, slower ones are used")


@functools.cache
def allocator() -> Sources | None:
    """What is compiled with the headers of PyTorch; None where it has come without them."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    torch = Path(found.origin).parent
    include, library = torch / "include", torch / "lib" / "libc10.so"
    if not (library.exists() and (include / "c10/core/CPUAllocator.h").exists()):
        return None
    words = ("-isystem", str(include), "-Wl,--no-as-needed", str(library))
    return Sources(
        "allocator",
        compiling.FOLDER / "memory",
        "the C library's is used",
        words,
        (torch / "version.py",),
    )


TIME_LIMIT = 120
"""Seconds that compiling may take; it takes about three on two cores."""
PATIENCE = 5
"""Seconds in which a process that makes the file, and is told to, has ended."""

LOCK = threading.RLock()
"""Held while the file is looked for."""
_begun: dict[Path, "Making"] = {}


@functools.cache
def begin() -> None:
    """Start to make the libraries in the background, unless they are there, switched off, or
    impossible.
    """
    compiler = compiling.find_compiler()
    if _is_off() or compiler is None:
        return
    kernels = KERNEL_SOURCES if _shipped() is None else None
    for sources in (allocator(), kernels):  # one after the other: the short one first
        if sources is not None:
            _begin_one(sources, compiler)


def _begin_one(sources: Sources, compiler: list[str]) -> None:
    for path in _candidates(compiler, sources):
        # who needs the library says so
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _start(path, compiler, sources)
            return


def libraries(sources: Sources = KERNEL_SOURCES) -> Iterator[Path]:
    """Where a library is, place after place: the loader may refuse some. Waits, and says why there
    are no more: of the kernels, for the others lack for the same reasons.
    """
    if _is_off():
        return
    compiler = compiling.find_compiler()
    level = logging.WARNING if sources is KERNEL_SOURCES else logging.DEBUG
    what = f"native {sources.name}"
    if compiler is None:
        no = "no C++ compiler (CXX, c++, g++, clang++)"
        logger.log(level, "%s: %s; %s.", what, no, sources.instead)
        return
    is_told = False
    for path in (*_candidates(compiler, sources), None):
        try:
            found = built(path or _own_folder() / f"{sources.name}.so", compiler, sources)
        except private.NotPrivate as error:
            if not is_told:
                where = path.parent if path else "a temporary folder"
                told = "%s: not kept in %s (%s); they are kept elsewhere."
                logger.log(level, told, what, where, error)
            is_told = True
        except OSError as error:
            logger.debug("%s: %s cannot be used (%s)", what, path, error)
        except subprocess.SubprocessError as error:
            logger.log(level, "%s: not compiled (%s); %s.", what, error, sources.instead)
            return
        else:
            yield found
    no = "no folder to keep them in (set POPXL_CACHE_DIR)"
    logger.log(level, "%s: %s; %s.", what, no, sources.instead)


def load(sources: Sources = KERNEL_SOURCES) -> ctypes.CDLL | None:
    """A library of those that the loader takes: the wheel's, or one made here. Waits; None where
    there is none, as `libraries` says.
    """
    with LOCK:
        path = _shipped() if sources is KERNEL_SOURCES else None
        if path is not None and (loaded := _loaded(path, str)) is not None:
            return loaded  # trusted as the package's Python is
        for path in libraries(sources):
            if (loaded := _loaded(path, loader_name)) is not None:
                return loaded
    return None


def _loaded(path: Path, name: Callable[[Path], str]) -> ctypes.CDLL | None:
    """The library at ``path``, which the loader finds by a name; None where it refuses it."""
    try:
        loaded = ctypes.CDLL(name(path))
    except OSError as error:
        logger.debug("native code: %s cannot be loaded (%s)", path, error)
        return None
    logger.debug("native code: %s is used", path)
    return loaded


def _shipped() -> Path | None:
    """The kernels that a wheel has brought for this CPU; None too where they are switched off."""
    return None if _is_off() else shipped.library()


def is_being_made(sources: Sources) -> bool:
    """Whether a compiler still works on a library."""
    return any(
        path.name.startswith(f"{sources.name}_") and making.is_running()
        for path, making in list(_begun.items())
    )


def built(path: Path, compiler: list[str], sources: Sources = KERNEL_SOURCES) -> Path:
    """Wait until a library is at ``path``. Returns where that is without links.

    Raises:
        private.NotPrivate: somebody else can have written what would be loaded, or can replace it.
        OSError: the folder cannot be written or is full.
        subprocess.SubprocessError: the compiler fails with every set of flags, or takes too long.
    """
    with LOCK:
        path = _start(path, compiler, sources)
        if path in _begun:
            try:
                _begun[path].wait()
            finally:
                del _begun[path]
    return path


def _start(path: Path, compiler: list[str], sources: Sources) -> Path:
    """Make a library at ``path`` in the background, unless it is there or this has begun.
    Returns, raises as `built`.

    What is there and is no library of this user is never read: where it can be replaced, it is.
    """
    with LOCK:
        path = private.make_folder(path.parent) / path.name
        if path not in _begun:
            try:
                os.close(opened(path))
            except FileNotFoundError:
                _begun[path] = Making(path, compiler, sources)
        return path


def loader_name(path: Path) -> str:
    """What the loader finds the library at ``path`` by: the very file that was checked. Raises as
    `opened`.
    """
    descriptor = opened(path)
    if os.path.exists("/proc/self/fd"):
        # it stays open: the loader knows libraries by their names
        return f"/proc/self/fd/{descriptor}"
    os.close(descriptor)
    return str(path)


def opened(path: Path) -> int:
    """A descriptor of the library at ``path``.

    Raises:
        private.NotPrivate: as `built`.
        FileNotFoundError: there is none, or a damaged one.
    """
    descriptor = private.open_file(path)
    with open(descriptor, "rb", closefd=False) as file:
        is_whole = compiling.is_whole(file.read())
    if not is_whole:
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is damaged")
    return descriptor


class Making:
    """A process that makes a library at ``path``. It ends with this one, which does not wait for
    it otherwise.
    """

    def __init__(self, path: Path, compiler: list[str], sources: Sources = KERNEL_SOURCES):
        maker = [sys.executable or "python3", "-I", "-S", compiling.__file__]
        command = [*maker, str(TIME_LIMIT), str(path), str(sources.folder)]
        command += [shlex.join(_named_flags()), *compiler, *sources.words]
        _watch_ends()
        self._process = compiling.started(  # Ctrl-C is for the program
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it has ended. Raises as `built`."""
        try:
            assert self._process.stdout is not None
            said = self._process.stdout.read().decode(errors="replace").strip()
        finally:
            self.end()
        code = self._process.returncode
        if code == CANNOT_WRITE:
            raise OSError(said)
        if code:
            raise subprocess.SubprocessError(
                said if code == CANNOT_COMPILE else f"ended with {code}: {said[-500:]}"
            )

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


def _named_flags() -> tuple[str, ...]:
    """What the compiler is told of the instruction set that is named; nothing where none is."""
    chosen = instruction_sets.named()
    return () if chosen is None else chosen.flags


def _candidates(compiler: list[str], sources: Sources = KERNEL_SOURCES) -> list[Path]:
    """Where a library may be, of these sources and flags, this compiler and machine; the same when
    asked again.
    """
    return _candidates_for((*compiler, *sources.words), sources, _named_flags())


@functools.cache
def _candidates_for(
    compiler: tuple[str, ...], sources: Sources, named_flags: tuple[str, ...]
) -> list[Path]:
    made_by = (FLAGS, OPTIONAL_FLAGS, named_flags, compiler, _machine())
    key = compiling.key_of(sources.files(), *made_by)
    return [folder / f"{sources.name}_{key}.so" for folder in _folders()]


@functools.cache
def private_folder() -> Path:
    """The first of the folders for compiled code that is this user's alone. OSError: there is
    none.
    """
    for folder in _folders():
        with contextlib.suppress(OSError):
            return private.make_folder(folder)
    return private.check_folder(_own_folder())


@functools.cache
def _own_folder() -> Path:
    """A folder that ends with this process. OSError: no temporary folder can be written."""
    folder = tempfile.mkdtemp(prefix="popxl-")  # of mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _machine() -> str:
    """What compiled code depends on: the architecture, and the instructions that this CPU has."""
    features = sysconfig.get_platform() + platform.machine()
    return features + (instruction_sets.instructions() or platform.processor())


def _folders() -> list[Path]:
    """Where the library may be kept, the preferred place first."""
    folders = [Path(named)] if (named := os.environ.get("POPXL_CACHE_DIR")) else []
    with contextlib.suppress(RuntimeError):  # the user has no home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popxl")
    with contextlib.suppress(OSError):  # no temporary folder can be written
        folders.append(Path(tempfile.gettempdir()) / f"popxl-{os.getuid()}")
    # the loader looks up names without a folder elsewhere
    return [folder.absolute() for folder in folders]

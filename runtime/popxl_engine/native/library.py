"""The compiled library: built when it is first needed, kept for later runs, called with tensors."""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger("popxl")

FOLDER = Path(__file__).parent
UNITS = sorted(FOLDER.glob("*.cpp"))
SOURCES = sorted([*UNITS, *FOLDER.glob("*.h")])
# Without contraction an element's bits do not depend on its place in a vector, on the vector's width or on the CPU.
FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC")
OPTIONAL_FLAGS = ("-march=native", "-mprefer-vector-width=512", "-fopenmp")
"""What some compilers or CPUs do not know: tried all together, then those with which an empty file compiles."""
TIME_LIMIT = 120
"""Seconds that compiling may take; it takes about two."""
ROOM = 1 << 20
"""Bytes that the library's folder must have room for; it is smaller."""

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
SIGNATURES = {
    "gelu": ("ppn", 1),
    "gelu_grad": ("pppn", 1),
    "accumulate": ("ppffn", 1),
    "squares": ("ppn", 1),
    "column_sums": ("ppffnn", 1),
    "layer_norm_grad": ("pppppfnn", 1),
    "dropout": ("ppnnfn", 1),
    "logsumexp": ("ppnn", 1),
    "logsumexp_grad": ("ppppppnn", 1),
    "adamw": ("ppppppppppndddddddn", 3),
    "random_words": ("pnnn", 0),
    "accumulate_product": ("pnnpnnpnffnnn", 0),
    "attend": ("pnnn" * 3 + "pfpp" + "pnnn" + "nnnnn" + "pnnf", 1),
    "attend_grad": ("pnnn" * 4 + "ppf" + "pnnn" * 3 + "nnnnn" + "pnnf", 1),
}
"""Of each function: its parameters before the number of threads (pointers, sizes and numbers), and how many element
types its name ends in. `accumulate_product` is there on CPUs with AMX only."""


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the library can work on these: there is one, and they are contiguous, of its types, and on a CPU.

    Tensors without memory pass too, so that plans see the memory that runs will use.
    """
    for t in tensors:
        if not (t.is_cpu or t.is_meta) or t.dtype not in SUFFIXES or not t.is_contiguous():
            return False
    return library() is not None


def attends(*tensors: torch.Tensor) -> bool:
    """Whether `attend` and `attend_grad` can work on these: of one of the library's types, on a CPU.

    Where the library multiplies bfloat16 with tiles, the system must let it.
    """
    dtype = tensors[0].dtype
    if dtype not in SUFFIXES or any(t.dtype != dtype or t.device.type not in ("cpu", "meta") for t in tensors):
        return False
    return library() is not None and (dtype != torch.bfloat16 or not _are_tiles_refused())


def multiplies(total: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    """Whether `accumulate_product` can add a product of these matrices to a total.

    That is bfloat16 to float32, on a CPU with tiles for matrices. A matrix has a stride of 1.
    """
    return (
        (total.dtype, lhs.dtype, rhs.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        and all(t.device.type in ("cpu", "meta") for t in (total, lhs, rhs))
        and total.stride(1) == 1
        and all(1 in t.stride() for t in (lhs, rhs))
        and min(total.numel(), lhs.numel()) > 0
        and _has_tiles()
    )


def _has_tiles() -> bool:
    """Whether the library multiplies with tiles, and the system lets this process use them."""
    return hasattr(library(), "refuses_tiles") and not _are_tiles_refused()


@functools.cache
def _are_tiles_refused() -> bool:
    """Whether the library has functions that use tiles, and the system does not let this process use them."""
    refuses = getattr(library(), "refuses_tiles", None)
    return refuses is not None and bool(refuses())


def call(name: str, dtypes: Tuple[torch.dtype, ...], *arguments: Any) -> None:
    """Run a function on tensors that it `takes`, with as many threads as PyTorch uses.

    Args:
        name: of the function in `SIGNATURES`.
        dtypes: the element types that its name ends in.
        arguments: its parameters; tensors stand for their memory, None for no tensor. The first is a tensor.
    """
    if arguments[0].is_meta:
        return
    function, pointers = _functions()[(name, *dtypes)]
    given = list(arguments)
    for i in pointers:
        if given[i] is not None:
            given[i] = given[i].data_ptr()
    function(*given, torch.get_num_threads())


@functools.cache
def _functions() -> Dict[Any, Any]:
    """(function, which of its parameters are pointers) for each name with its element types."""
    loaded = library()
    assert loaded is not None, "callers ask `takes` first"
    functions = {}
    for name, (kinds, types) in SIGNATURES.items():
        pointers = [i for i, kind in enumerate(kinds) if kind == "p"]
        for dtypes in itertools.product(SUFFIXES, repeat=types):
            function = getattr(loaded, "_".join([name, *(SUFFIXES[dtype] for dtype in dtypes)]), None)
            if function is None:
                continue
            function.argtypes = [*(KINDS[kind] for kind in kinds), ctypes.c_int]
            function.restype = None
            functions[(name, *dtypes)] = function, pointers
    return functions


@functools.cache
def library() -> Optional[ctypes.CDLL]:
    """The library, or None where it is switched off (``POPXL_NATIVE=0``) or cannot be built."""
    if os.environ.get("POPXL_NATIVE", "1") == "0":
        return None
    sources = {path.name: path.read_bytes() for path in SOURCES}
    compiler = _compiler()
    if compiler is None:
        logger.warning("native kernels: no C++ compiler (CXX, c++, g++, clang++); the plain, slower ones are used.")
        return None
    key = hashlib.sha256(repr((sources, FLAGS, OPTIONAL_FLAGS, compiler, _machine())).encode()).hexdigest()[:16]
    for folder in _folders():
        try:
            return ctypes.CDLL(str(_built(folder / f"kernels_{key}.so", compiler)))
        except OSError as error:
            logger.debug("native kernels: %s cannot be used (%s)", folder, error)
        except subprocess.SubprocessError as error:
            logger.warning("native kernels: not compiled (%s); the plain, slower ones are used.", error)
            return None
    logger.warning("native kernels: no folder to keep them in (set POPXL_CACHE_DIR); the plain, slower ones are used.")
    return None


def _compiler() -> Optional[List[str]]:
    for command in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        with contextlib.suppress(ValueError):  # CXX has a quote that nothing closes
            words = shlex.split(command or "")
            if words and shutil.which(words[0]):
                return words
    return None


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


def _built(path: Path, compiler: List[str]) -> Path:
    """Compile to ``path`` unless it is there already, with a hash of the file at its end: loading a damaged one kills.

    Raises:
        OSError: the folder cannot be written or is full, or somebody else may write what would be loaded from it.
        subprocess.SubprocessError: the compiler fails with every set of flags, or takes too long.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{path.parent} belongs to another user, or everybody may write to it")
    if path.exists() and _is_whole(path.read_bytes()):
        return path
    # A name of its own: other threads, and machines that share the folder, may compile at the same time.
    handle, name = tempfile.mkstemp(".part", f"{path.stem}.", path.parent)
    part = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(bytes(ROOM))  # a full folder is told from a compiler that fails
        _compile(compiler, part)
        part.write_bytes(_sealed(part.read_bytes()))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _compile(compiler: List[str], to: Path) -> None:
    sources = [str(path) for path in UNITS]
    done = _run(compiler, (*OPTIONAL_FLAGS, *sources), to)
    if done.returncode:
        empty = ("-x", "c++", os.devnull)
        known = [flag for flag in OPTIONAL_FLAGS if not _run(compiler, (flag, *empty), to).returncode]
        done = _run(compiler, (*known, *sources), to)
    if done.returncode:
        raise subprocess.SubprocessError(f"{shlex.join(done.args)}: {done.returncode} {done.stderr.strip()[-500:]}")


def _run(compiler: List[str], arguments: Sequence[str], to: Path) -> "subprocess.CompletedProcess[str]":
    command = [*compiler, *FLAGS, *arguments, "-o", str(to)]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT
        )
    except OSError as error:
        raise subprocess.SubprocessError(str(error)) from error


def _sealed(code: bytes) -> bytes:
    return code + hashlib.sha256(code).digest()


def _is_whole(content: bytes) -> bool:
    return content == _sealed(content[: -hashlib.sha256().digest_size])

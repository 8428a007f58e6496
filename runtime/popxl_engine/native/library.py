"""The compiled libraries: each loaded when it is first needed, called with tensors."""

import ctypes
import functools
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from popxl_engine.native import build, instruction_sets

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
SOURCES = {torch.float32: build.KERNEL_SOURCES, torch.bfloat16: build.BFLOAT16_SOURCES}
"""What the library of an element type is made from. A function is in that of the first type that
its name ends in; where it ends in none, in float32's."""
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What functions that take operands of several types at a time call these."""
KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
REFUSES_TILES = "refuses_tiles"
SIGNATURES = {
    "gelu": ("ppn", 1),
    "gelu_grad": ("pppn", 1),
    "relu2": ("ppn", 1),
    "relu2_grad": ("pppn", 1),
    "softcap": ("ppfn", 1),
    "softcap_grad": ("pppfn", 1),
    "swiglu": ("ppnn", 1),
    "swiglu_grad": ("pppnn", 1),
    "geglu": ("ppnn", 1),
    "geglu_grad": ("pppnn", 1),
    "rotary": ("pnpppnnnnn", 1),
    "short_convolution": ("ppppnnnn", 1),
    "short_convolution_weight_grad": ("ppppnnn", 1),
    "accumulate": ("ppffn", 1),
    "squares": ("ppn", 1),
    "column_sums": ("ppffnn", 1),
    "layer_norm": ("ppppfnn", 1),
    "layer_norm_grad": ("pppppfnn", 1),
    "merge_moments": ("ppppnn", 0),
    "rms_norm": ("pppfnn", 1),
    "rms_norm_grad": ("pppppfnn", 1),
    "dropout": ("ppnnfn", 1),
    "logsumexp": ("pnpnn", 1),
    "logsumexp_grad": ("pnpppppnnn", 1),
    "cross_entropy": ("pnpppppnnn", 1),
    "softcap_logsumexp": ("pnpfnn", 1),
    "softcap_logsumexp_grad": ("pnpppppnfnn", 1),
    "softcap_cross_entropy": ("pnpppppnfnn", 1),
    "adamw": ("pnpnpnpn" + "nnnn" + "dddddddn", 0),
    "adamw_8bit": ("pnpnpp" + "nnnn" + "dddddddn", 0),
    "round_at_random": ("pnpnnn", 0),
    "newton_schulz": ("pppnnnffffnn", 1),
    "newton_schulz_scratch": ("nn", 1),
    "random_words": ("pnnn", 0),
    "accumulate_product": ("pnnpnnpnffnnnp", 1),
    "multiply_add": ("pnnpnnppnnnn", 1),
    "multiply_small": ("ppppp", 1),
    "multiply_few": ("pnpnnppnnn", 1),
    "attend": ("pnnn" * 3 + "ppnnffpp" + "pnnn" + "nnnnn" + "pnnf", 1),
    "attend_few": ("pnnn" * 4 + "fpp" + "nnnnn", 1),
    "attend_grad": ("pnnn" * 4 + "ppppnnff" + "pnnn" * 3 + "nnnnn" + "pnnfp", 1),
    "attend_grad_scratch": ("nnnn", 0),
    "attend_blocks": ("pnnn" * 3 + "pnnff" + "pnnn" + "nnnnn" + "pnnfp", 1),
    "attend_blocks_scratch": ("nnnn", 1),
    "attend_blocks_grad": ("pnnn" * 4 + "pnnff" + "pnnn" * 3 + "nnnnn" + "pnnfp", 1),
    "attend_blocks_grad_scratch": ("nnnn", 1),
    "multiply_ceiling": ("pnnnp", 1),
    "read_ceiling": ("pnp", 0),
}
"""The parameters of each function before the number of threads (pointers, sizes and numbers), and
how many element types its name ends in. Those that end in `scratch` return a number of elements.
Which of them CPUs without some instructions lack, `instruction_sets` says. `refuses_tiles`, one of
these, has no parameters and returns a number.
"""


class _OfThread(threading.local):
    """What a thread, which may plan while others run, takes tensors without memory for."""

    elsewhere = False
    """Whether they stand for those of another device."""


_of_thread = _OfThread()


@contextmanager
def elsewhere(device: torch.device) -> Iterator[None]:
    """A block in which tensors without memory stand for a device's."""
    before, _of_thread.elsewhere = _of_thread.elsewhere, device.type != "cpu"
    try:
        yield
    finally:
        _of_thread.elsewhere = before


def is_here(device: torch.device) -> bool:
    """Whether a device is the processor, or stands for it."""
    return device.type == "cpu" or device.type == "meta" and not _of_thread.elsewhere


def _is_here(t: torch.Tensor) -> bool:
    return t.is_cpu or is_here(t.device)


def takes(*tensors: torch.Tensor) -> bool:
    """Whether libraries can work on these: there are such, of their types, and they are contiguous
    and on a CPU.

    Tensors without memory pass too, so that plans see the memory that runs will use.
    """
    for t in tensors:
        if not _is_here(t) or not t.is_contiguous() or library(t.dtype) is None:
            return False
    return True


def updates(*tensors: torch.Tensor) -> bool:
    """Whether `adamw` and `round_at_random` can work on these."""
    if all(_is_here(t) and t.dtype in CODES and t.is_contiguous() for t in tensors):
        return library() is not None
    return False


def takes_rows(t: torch.Tensor) -> bool:
    """The same as `takes`, of a matrix whose rows need not follow one another."""
    return takes(t) or t.stride(1) == 1 and _is_here(t) and library(t.dtype) is not None


def attends(*tensors: torch.Tensor) -> bool:
    """Whether `attend` and `attend_grad` can work on these: of one of the library's types, on a
    CPU.

    Where the library multiplies bfloat16 with tiles, the system must let it.
    """
    dtype = tensors[0].dtype
    if dtype not in SUFFIXES or any(t.dtype != dtype or not _is_here(t) for t in tensors):
        return False
    return library(dtype) is not None and (dtype != torch.bfloat16 or not _are_tiles_refused())


LARGE_OPERAND = 2**14
"""Elements of a right operand, at least, whose packing MKL saves. The rows do not count: they may
come in several parts, of the same bits."""


def multiplies(lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    """Whether `multiply_add` can multiply these matrices, and is the fastest way.

    They are not empty, and have a stride of 1: bfloat16 on a CPU that multiplies it, or float32
    where `outpaces_mkl`.
    """
    if (
        lhs.dtype != rhs.dtype
        or not all(_is_here(t) and 1 in t.stride() for t in (lhs, rhs))
        or min(lhs.numel(), rhs.numel()) == 0
    ):
        return False
    if lhs.dtype == torch.bfloat16:
        return has_tiles()
    return lhs.dtype == torch.float32 and rhs.numel() >= LARGE_OPERAND and outpaces_mkl()


@functools.cache
def outpaces_mkl() -> bool:
    """Whether the library multiplies float32 faster than MKL, which has nothing of its own for
    AMD's CPUs. Of those with AVX-512 oneDNN is faster. Decided by the kind of CPU, not by
    measuring, so that the same machine gives the same bits.
    """
    level = instruction_sets.in_use()
    is_avx2 = level is not None and level.name == "avx2"
    return is_avx2 and instruction_sets.is_amd() and library() is not None


FEW_ROWS, LARGE_MATRIX = 8, 2**16
"""Rows of a left operand, at most, and elements of a right one, at least, of a product that reading
the right one limits. PyTorch's libraries read it at a third of the memory's speed."""


def multiplies_few(lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    """Whether `multiply_few` can multiply these matrices, and is the fastest way."""
    return (
        lhs.dtype == rhs.dtype
        and not lhs.is_cuda
        and 1 <= lhs.shape[0] <= FEW_ROWS
        and rhs.numel() >= LARGE_MATRIX
        and lhs.stride(1) == 1
        and 1 in rhs.stride()
        and all(_is_here(t) for t in (lhs, rhs))
        and library(lhs.dtype) is not None
    )


def adds_product(total: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    """Whether `accumulate_product` can add the product of matrices that the library `multiplies` to
    a float32 total.
    """
    return total.dtype == torch.float32 and total.stride(1) == 1 and multiplies(lhs, rhs)


def has_tiles() -> bool:
    """Whether the library multiplies with tiles, and the system lets this process use them."""
    may_have = instruction_sets.multiplies_bfloat16()  # else nobody waits for the library
    has = may_have and hasattr(library(torch.bfloat16), REFUSES_TILES)
    return has and not _are_tiles_refused()


@functools.cache
def _are_tiles_refused() -> bool:
    """Whether the library has functions that use tiles, and the system does not let this process
    use them.
    """
    refuses = getattr(library(torch.bfloat16), REFUSES_TILES, None)
    return refuses is not None and bool(refuses())


def call(name: str, dtypes: tuple[torch.dtype, ...], *arguments: Any) -> None:
    """Run a function on tensors that it `takes`, with as many threads as PyTorch uses.

    Args:
        name: of the function in `SIGNATURES`.
        dtypes: the element types that its name ends in.
        arguments: its parameters; tensors stand for their memory, None for no tensor. The first is
            a tensor.
    """
    if arguments[0].is_meta:
        return
    function, pointers = _function(name, *dtypes)
    given = list(arguments)
    for i in pointers:
        if given[i] is not None:
            given[i] = given[i].data_ptr()
    function(*given, torch.get_num_threads())


def function(name: str, dtype: torch.dtype) -> Any:
    """A function of one element type, for whoever calls it with numbers alone; None where there is
    none.
    """
    return _function(name, dtype)[0]


def scratch(name: str, dtypes: tuple[torch.dtype, ...], *sizes: int) -> int:
    """Elements that a function needs beside its operands, for as many threads as PyTorch uses.

    Args:
        name, dtypes: as of `call`.
        sizes: the parameters of the function that tells it.
    """
    function, _ = _function(f"{name}_scratch", *dtypes)
    return int(function(*sizes, torch.get_num_threads()))


@functools.cache
def _function(name: str, *dtypes: torch.dtype) -> tuple[Any, list[int]]:
    """A function, which callers ask `takes` for, and which of its parameters are pointers."""
    pointers = [i for i, kind in enumerate(SIGNATURES[name][0]) if kind == "p"]
    return getattr(library(*dtypes[:1]), _symbol(name, dtypes), None), pointers


def _symbol(name: str, dtypes: tuple[torch.dtype, ...]) -> str:
    return "_".join([name, *(SUFFIXES[dtype] for dtype in dtypes)])


def symbols() -> dict[str, tuple[list[Any], Any]]:
    """The parameters and the result of every function of the libraries, by the name that it has
    there.
    """
    found: dict[str, tuple[list[Any], Any]] = {REFUSES_TILES: ([], ctypes.c_int64)}
    for name, (kinds, types) in SIGNATURES.items():
        parameters = [*(KINDS[kind] for kind in kinds), ctypes.c_int]
        result = ctypes.c_int64 if name.endswith("scratch") else None
        for dtypes in itertools.product(SUFFIXES, repeat=types):
            found[_symbol(name, dtypes)] = parameters, result
    return found


@functools.cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """The library of an element type, or None where libraries are switched off
    (``POPXL_NATIVE=0``), or it cannot be built, or there is none of the type; waits for the
    compiler.
    """
    with build.LOCK:
        return _library(dtype)


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in SOURCES or dtype != torch.float32 and _library(torch.float32) is None:
        return None  # what float32's lacks, the others would, too: it is told once
    loaded = build.load(SOURCES[dtype])
    for name, (parameters, result) in symbols().items():
        if (function := getattr(loaded, name, None)) is not None:
            function.argtypes, function.restype = parameters, result
    return loaded

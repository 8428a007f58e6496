"""What a session will need, begun beside the program that makes it: kernels are compiled, and the
largest of PyTorch's libraries is loaded.

This module loads no torch.
"""

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from pathlib import Path

from popxl_engine.native import build

LIBRARY = Path("lib", "libtorch_cpu.so")
"""The library, in PyTorch's folder. Loading it takes a sixth of `import torch`."""


def begin() -> None:
    """Begin with both, in the background."""
    build.begin()
    _load_library()


@functools.cache
def _load_library() -> None:
    """Load PyTorch's library in a thread, if nothing has loaded it.

    A process that ends before waits for it: the library's own beginning would meet its end.
    Importing torch waits for it, too, and says what is wrong with it.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / LIBRARY
    if path is None or not path.exists():
        return
    # As a function of the C library's, it is called without Python's lock.
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    threading.Thread(target=load, args=(os.fsencode(path), os.RTLD_LAZY), name="torch").start()

"""Chains of elementwise steps on a GPU as one pass over memory, made by `torch.compile` where
Triton is there.
"""

import logging
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch.utils._triton import has_triton

from popxl_engine.native import build

logger = logging.getLogger("popxl")

KEPT = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable for the folder of what it compiles."""
Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def compiles() -> bool:
    """Whether chains are compiled. ``POPXL_COMPILE=0``: not."""
    if os.environ.get("POPXL_COMPILE", "1") in ("", "0"):
        return False
    if not has_triton():
        logger.info(
            "kernels: got a torch without Triton; expected it on a GPU. Elementwise steps "
            "run one by one."
        )
        return False
    return True


@cache
def _keep_code_private() -> None:
    """Let torch keep what it compiles, and executes later, where no other user can put anything.

    Its own choice is a folder in /tmp, which another user may have made first.
    """
    if KEPT not in os.environ:
        os.environ[KEPT] = str(build.private_folder() / "torch")


def one_pass(fn: Function) -> Function:
    """A function of tensors that is compiled for those on a GPU. Sizes may differ from call to
    call.

    It returns new tensors, or writes to one at its end: where it cannot be compiled, the plain one
    begins again.
    """
    fast: list[Callable[..., Any]] = []

    @wraps(fn)
    def run(first: torch.Tensor, *rest: Any) -> Any:
        if not (first.is_cuda and compiles()):
            return fn(first, *rest)
        if not fast:
            _keep_code_private()
            fast.append(torch.compile(fn, dynamic=True))
        try:
            return fast[0](first, *rest)
        except Exception as error:
            if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise
            logger.warning(
                "kernels: got '%s' while compiling %s; expected a C compiler and Python's "
                "headers. It runs in several passes.",
                *(str(error).strip().partition("\n")[0], fn.__name__),
            )
            fast[0] = fn
            return fn(first, *rest)

    return run  # type: ignore[return-value]

"""Chains of elementwise steps on a GPU as one pass over memory, made by `torch.compile` where
Triton is there.
"""

import logging
import os
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.utils._triton import has_triton

from popxl_engine.native import build

logger = logging.getLogger("popxl")

TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable for the folder of what it compiles."""
VARIANTS = 64
"""Variants of types, layouts and sizes that a function is compiled for. Others run in several
passes.
"""
_OF_THREAD = threading.local()
"""PyTorch's limit of those, which each thread has for itself, once it is set."""


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
    if TORCH_CACHE not in os.environ:
        os.environ[TORCH_CACHE] = str(build.private_folder() / "torch")


class OnePass:
    """A function of tensors that is compiled for those on a GPU, and called there.

    It returns new tensors, or writes to its operands at its end: where it cannot be compiled, the
    plain one begins again.

    Args:
        plain: the function itself.
        of_any_size: sizes may differ from call to call; else it is compiled for each size, which is
            divided by as a constant.
    """

    def __init__(self, plain: Callable[..., Any], of_any_size: bool):
        self.plain, self._dynamic = plain, of_any_size
        self._fast: Callable[..., Any] | None = None
        self._has_failed = False
        wraps(plain)(self)

    def __call__(self, first: torch.Tensor, *rest: Any) -> Any:
        """The result, by either."""
        is_done, result = self.attempt(first, *rest)
        return result if is_done else self.plain(first, *rest)

    def attempt(self, first: torch.Tensor, *rest: Any) -> tuple[bool, Any]:
        """(whether what is compiled did it, the result). Else nothing has changed: for steps that
        the plain function would take much memory for.
        """
        if not self.is_for(first):
            return False, None
        try:
            return True, self._compiled()(first, *rest)
        except Exception as error:
            known = torch._dynamo.exc  # there by now; to import it takes a second
            if isinstance(error, known.FailOnRecompileLimitHit):
                return False, None
            if not isinstance(error, known.TorchDynamoException):
                raise
            cause = str(getattr(error, "inner_exception", error)).strip()
            logger.warning(
                "kernels: got '%s' while compiling %s; expected a C compiler and Python's "
                "headers. It runs in several passes.",
                *(cause.partition("\n")[0], self.plain.__name__),
            )
            self._has_failed = True
            return False, None

    def is_for(self, first: torch.Tensor) -> bool:
        """Whether it is compiled for a tensor, as far as is known."""
        return not self._has_failed and first.is_cuda and compiles()

    def _compiled(self) -> Callable[..., Any]:
        if self._fast is None:
            _keep_code_private()
            self._fast = torch.compile(self.plain, dynamic=self._dynamic, fullgraph=True)
        if not hasattr(_OF_THREAD, "limit"):
            config = torch._dynamo.config
            config.recompile_limit = _OF_THREAD.limit = max(config.recompile_limit, VARIANTS)
        return self._fast


def one_pass(plain: Callable[..., Any]) -> OnePass:
    """A function of tensors of any size as one pass over a GPU's memory, see `OnePass`."""
    return OnePass(plain, of_any_size=True)


def one_pass_of_each_size(plain: Callable[..., Any]) -> OnePass:
    """The same, for a program's few sizes, by which there is much to divide."""
    return OnePass(plain, of_any_size=False)

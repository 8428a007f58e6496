"""Forks of a process that has computed: the threads that PyTorch and the kernels multiply with are
not in them, and are waited for.
"""

import os

import torch

_computed_in: list[int] = []
"""The first process that made a session, here or in a parent."""


def check_threads(where: str) -> None:
    """Note that this process computes. RuntimeError if it is a fork of one that did, unless one
    thread is all it takes.
    """
    if not _computed_in:
        _computed_in.append(os.getpid())
    elif _computed_in[0] != os.getpid() and torch.get_num_threads() > 1:
        raise RuntimeError(
            f"{where}: got a fork of a process in which a session had been made; expected a fork "
            "before the first one, because the threads that multiply are missing and would be "
            "waited for. Start processes afresh, multiprocessing.get_context('spawn'), or set "
            "OMP_NUM_THREADS=1."
        )

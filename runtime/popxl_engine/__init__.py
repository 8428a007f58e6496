"""Runs an IR on PyTorch; beside the launcher's agent the only package that imports torch. May
import ``popxl``.

``interpreter`` is the specification; ``lowering``, ``passes`` and ``codegen`` make the fast
program; ``kernels/`` holds one torch function per op; ``machine/`` is memory, rows, replicas and
streams, and knows no ops.
"""

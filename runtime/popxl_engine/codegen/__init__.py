"""Blocks as Python source: straight-line calls of kernels, every temporary dropped after its last
use.
"""

from popxl_engine.codegen.block_writer import BlockWriter, PhaseMarks, SourceGenerator
from popxl_engine.codegen.source import Source

__all__ = ["BlockWriter", "PhaseMarks", "SourceGenerator", "Source"]

"""Tensors from nothing, copies between places, and printing."""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from popxl.dtypes import dtype as Dtype  # noqa: N812 - `dtype` is a parameter

from popxl_engine.kernels.dtypes import FLOAT8, torch_dtype
from popxl_engine.kernels.registry import kernel


@kernel("init")
def init(
    shape: Iterable[int],
    dtype: Dtype,
    name: str | None,
    init_type: str,
    meta_shape: Iterable[int] | None,
) -> torch.Tensor:
    """New memory on torch's current default device, zeroed if asked for."""
    make = torch.zeros if init_type == "zero" else torch.empty
    return make(tuple(shape), dtype=torch_dtype(dtype))


@kernel("io_tile_copy")
def io_tile_copy(t: torch.Tensor) -> torch.Tensor:
    """The same elements."""
    return t


@kernel("ipu_copy")
def ipu_copy(t: torch.Tensor, destination: int, source: int) -> torch.Tensor:
    """The same elements."""
    return t


def format_array(
    array: np.ndarray,
    threshold: int,
    edge_items: int,
    width: int,
    digits: int,
    float_format: str,
    separator: str,
    brackets: str,
) -> str:
    """An array as text, with these two brackets."""
    forms: dict[str, Any] = {
        "auto": None,
        "none": {"float_kind": str},
        "fixed": {"float_kind": lambda x: f"{x:.{digits}f}"},
        "scientific": {"float_kind": lambda x: f"{x:.{digits}e}"},
    }
    text = np.array2string(
        array,
        max_line_width=width,
        precision=digits,
        threshold=threshold,
        edgeitems=edge_items,
        separator=separator,
        formatter=forms[float_format],
    )
    return text.translate({ord("["): brackets[0], ord("]"): brackets[1]})


@kernel("print_tensor")
def print_tensor(
    t: torch.Tensor,
    title: str,
    print_self: bool,
    print_gradient: bool,
    summarise_threshold: int,
    edge_items: int,
    max_line_width: int,
    digits: int,
    float_format: str,
    separator: str,
    open_bracket: str,
    close_bracket: str,
) -> torch.Tensor:
    """Print to stderr; the same elements."""
    if print_self:
        array: Any = t.detach().cpu()
        array = (array.float() if array.dtype in (torch.bfloat16, *FLOAT8) else array).numpy()
        text = format_array(
            array,
            summarise_threshold,
            edge_items,
            max_line_width,
            digits,
            float_format,
            separator,
            open_bracket + close_bracket,
        )
        print(f"{title}: {text}", file=sys.stderr, flush=True)
    return t

"""Files that torch.save wrote, of which nothing is run."""

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from popxl.pickled import PickledFileError, PickledTensor

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CALLED = re.compile(r"GLOBAL ([\w.]+)|type ([\w.]+)|class ([\w.]+)")


def open_pickled(path: Path) -> Any:
    """See `popxl.extensions.open_pickled`."""
    is_zip = zipfile.is_zipfile(path)  # older files are read as a whole
    try:
        found = torch.load(str(path), map_location="cpu", weights_only=True, mmap=is_zip or None)
    except OSError:
        raise
    except Exception as error:  # whatever a file that somebody made leads torch to
        raise PickledFileError(_problem(error)) from error
    return _described(found)


def _problem(error: Exception) -> str:
    """What torch says of a file, in a line."""
    named = _CALLED.search(str(error))
    if named is None:
        return (
            "got no file that torch.load reads as tensors and numbers alone; expected a state dict"
        )
    called = next(group for group in named.groups() if group)
    return (
        f"got a pickle that asks for code of {called}; expected tensors, numbers and texts alone, "
        "for nothing in a file is run"
    )


def _described(value: Any) -> Any:
    """What a file has, with its tensors as `PickledTensor`."""
    if isinstance(value, torch.Tensor):
        kind = _TYPES.get(value.dtype, str(value.dtype))
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            kind = f"{value.layout} {kind}"
        return PickledTensor(kind, tuple(value.shape), lambda: _array(value))
    if isinstance(value, dict):
        return {name: _described(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return value


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor, bfloat16 as float32."""
    plain = tensor.detach()
    if plain.dtype is torch.bfloat16:
        return plain.float().contiguous().numpy()
    return np.array(plain.numpy(), order="C")

"""Files of a folder of Hugging Face's: its tensors by their names, and its JSON. Nothing of them is
trusted.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.execution.checkpoints.saved_state import is_finite
from popxl_gpt.execution.checkpoints.tensor_files import (
    BFLOAT16,
    TensorFileError,
    read_tensor,
    tensor_entries,
)
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.utils.errors import PointerError, UserError, unreadable
from popxl_gpt.utils.files.bounded import JSON_VALUES, parse_json, read_bounded, shown
from popxl_gpt.utils.files.plain import open_plain
from popxl_gpt.utils.runtime import PickledFileError, PickledTensor, open_pickled

FLOATS = ("F32", "F16", BFLOAT16)
"""Types of weights, as their files name them."""
ROWS_BYTES = 2**26
"""Bytes of the rows that are compared at a time."""
LARGEST_JSON = 2**26
"""Bytes of config.json, of an index and of a tokenizer."""


def named_files(index: Path) -> "dict[str, list[str]]":
    """The tensors of each file, as an index has them."""
    found: dict[str, list[str]] = {}
    names = read_json(index).get("weight_map")
    for tensor, file in names.items() if isinstance(names, dict) else ():
        if not isinstance(file, str) or not file.isprintable() or Path(file).name != file:
            found.clear()
            break
        found.setdefault(file, []).append(tensor)
    if not found:
        raise UserError(
            f"{index}: got no weight_map of files in its folder; expected one. Copy the folder "
            "again."
        )
    return found


def digest(array: np.ndarray) -> bytes:
    """Names the numbers of a tensor of floats, whatever their type; some rows at a time."""
    found, rows = hashlib.sha256(), max(1, ROWS_BYTES * len(array) // max(1, array.nbytes))
    for i in range(0, len(array), rows):
        found.update(np.ascontiguousarray(array[i : i + rows], np.float32).reshape(-1).data)
    return found.digest()


def as_precision(name: str, array: np.ndarray, precision: str | None) -> np.ndarray:
    """Weights in another type, rounded to the nearest; bfloat16 as its bits, uint16.

    Raises:
        UserError: they are too large for it.
    """
    if precision is None or array.dtype.name == precision:
        return array
    wide = array.astype(np.float32)
    if precision == "bfloat16":
        bits = wide.view(np.uint32)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        back = (found.astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(over="ignore"):
            found = back = wide.astype(precision)
    if not np.isfinite(back).all():
        raise UserError(
            f"--precision: got {precision} for {name}, which has numbers beyond it; expected a "
            "type that holds them. Use float32."
        )
    return found


@dataclass(frozen=True)
class Place:
    """The place of a tensor: its file, and its name there.

    Attributes:
        type: as safetensors names it.
        load: gives it, bfloat16 as float32.
    """

    file: Path
    name: str
    type: str
    shape: "tuple[int, ...]"
    load: Callable[[], np.ndarray]


def places(path: Path) -> "dict[str, Place]":
    """Every tensor of a file, by name; raises as `told` tells."""
    if path.suffix == ".safetensors":
        return {
            name: Place(path, name, kept.type, kept.shape, partial(read_tensor, path, name, kept))
            for name, kept in tensor_entries(path).items()
        }
    return pickled_places(path, opened_pickled(path))


def opened_pickled(path: Path) -> Any:
    """What a file holds that torch.save wrote; raises as `told` tells."""
    os.close(open_plain(path))
    return open_pickled(path)


def pickled_places(path: Path, state: Any) -> "dict[str, Place]":
    """Every tensor of a state dict that torch.save wrote, by name.

    Raises:
        PickledFileError: it has something else.
    """
    if not isinstance(state, dict):
        raise PickledFileError("got no state dict; expected tensors by their names")
    for name, found in state.items():
        if not isinstance(name, str) or not isinstance(found, PickledTensor):
            raise PickledFileError(
                f"got {shown(name)}, which is no tensor; expected tensors by their names"
            )
    return {n: Place(path, n, found.type, found.shape, found.read) for n, found in state.items()}


class TensorFiles:
    """Tensors by Hugging Face's names, with and without their family's prefix.

    Attributes:
        found: of every tensor, by its name with the prefix.
    """

    def __init__(self, files: "Mapping[Path, list[str]]", family: Family):
        """``files``: with the tensors that each must have."""
        self.found: dict[str, Place] = {}
        for path, names in files.items():
            with told(path):
                found = places(path)
            missing = [n for n in names if n not in found and not family.is_buffer(n)]
            if missing:
                raise UserError(
                    f"{path}: got no {shown(missing[0])}, which the index names; expected all of "
                    "them. Copy the folder again."
                )
            self.add(found, family)

    def add(self, places: "Mapping[str, Place]", family: Family) -> None:
        """Take the tensors of a file."""
        for name, place in places.items():
            bare = name.removeprefix(family.prefix)
            full = family.head_matrix if family.is_head(name) else f"{family.prefix}{bare}"
            if full in self.found:
                raise UserError(
                    f"{place.file}: got {shown(name)}, which {self.found[full].file.name} has, "
                    f"too, as {shown(self.found[full].name)}; expected one. Remove the other."
                )
            self.found[full] = place

    def check_types(self, names: "Iterable[str]") -> None:
        """Refuse weights that are no floats of 16 or 32 bits."""
        for place in (self.found[name] for name in names):
            if place.type not in FLOATS:
                raise UserError(
                    f"{place.file}, {shown(place.name)}: got {shown(place.type)}; expected "
                    "float32, float16 or bfloat16. Convert the model: load it with transformers "
                    "and dtype=torch.bfloat16, and save it with save_pretrained."
                )

    def read(self, name: str) -> np.ndarray:
        """A tensor that is there: float32, or float16 where the file has that."""
        place = self.found[name]
        with told(place.file):
            array = place.load()
        if not is_finite(array):
            raise UserError(
                f"{place.file}, {shown(place.name)}: got numbers that are not finite; expected "
                "finite ones. Copy the file again, or use another model."
            )
        return array


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A block in which a file of tensors is read: UserError where it cannot be."""
    try:
        yield
    except PointerError as error:
        raise unreadable(path, error) from error
    except PickledFileError as error:
        raise UserError(f"{path}: {error}. Use safetensors, or copy it again.") from error
    except (TensorFileError, OSError) as error:
        kind = "safetensors" if path.suffix == ".safetensors" else "PyTorch"
        raise UserError(f"{path}: got no whole {kind} file ({error}). Copy it again.") from error


def read_json(path: Path, hint: str = "", values: int = JSON_VALUES) -> "dict[str, Any]":
    """The JSON object of a file of a folder.

    Args:
        hint: a sentence for a path where nothing is.
        values: the most that it may have.
    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        found = parse_json(read_bounded(path, LARGEST_JSON), values)
    except PointerError as error:
        raise unreadable(path, error) from error
    except OSError as error:
        raise UserError(
            f"{path}: got '{error.strerror}'; expected a readable file. Check the path.{hint}"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: got no JSON; expected Hugging Face's. Copy it again.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: got no JSON object; expected Hugging Face's. Copy it again.")
    return found

"""Files of a folder of Hugging Face's: its tensors by their names, and its JSON. Nothing of them is
trusted.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from popxl_gpt.execution.checkpoints.tensor_files import (
    BFLOAT16,
    Entry,
    TensorFileError,
    read_tensor,
    tensor_entries,
)
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.utils.errors import PointerError, UserError, unreadable
from popxl_gpt.utils.files.bounded import JSON_VALUES, parse_json, read_bounded, shown

FLOATS = ("F32", "F16", BFLOAT16)
"""Types of weights, as their files name them."""
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


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors of floats hold the same numbers."""
    first, second = (array.astype(np.float32).view(np.uint32) for array in (one, other))
    return np.array_equal(first, second)


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
    """The place of a tensor: its file, and its name there."""

    file: Path
    name: str
    entry: Entry


class TensorFiles:
    """Tensors by Hugging Face's names, with and without their family's prefix.

    Attributes:
        found: of every tensor, by its name with the prefix.
    """

    def __init__(self, files: "Mapping[Path, list[str]]", family: Family):
        """``files``: with the tensors that each must have."""
        self.found: dict[str, Place] = {}
        for path, names in files.items():
            with _told(path):
                entries = tensor_entries(path)
            missing = [n for n in names if n not in entries and not family.is_buffer(n)]
            if missing:
                raise UserError(
                    f"{path}: got no {shown(missing[0])}, which the index names; expected all of "
                    "them. Copy the folder again."
                )
            for name, entry in entries.items():
                bare = name.removeprefix(family.prefix)
                full = name if name == family.head_matrix else f"{family.prefix}{bare}"
                if full in self.found:
                    raise UserError(
                        f"{path}: got {shown(name)}, which {self.found[full].file.name} has, too, "
                        f"as {shown(self.found[full].name)}; expected one. Remove the other."
                    )
                self.found[full] = Place(path, name, entry)

    def check_types(self, names: "Iterable[str]") -> None:
        """Refuse weights that are no floats of 16 or 32 bits."""
        for place in (self.found[name] for name in names):
            if place.entry.type not in FLOATS:
                raise UserError(
                    f"{place.file}, {shown(place.name)}: got {shown(place.entry.type)}; expected "
                    "float32, float16 or bfloat16. Convert the model: load it with transformers "
                    "and dtype=torch.bfloat16, and save it with save_pretrained."
                )

    def read(self, name: str) -> np.ndarray:
        """A tensor that is there: float32, or float16 where the file has that."""
        place = self.found[name]
        with _told(place.file):
            array = read_tensor(place.file, place.name, place.entry)
        if not np.isfinite(array).all():
            raise UserError(
                f"{place.file}, {shown(place.name)}: got numbers that are not finite; expected "
                "finite ones. Copy the file again, or use another model."
            )
        return array


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except PointerError as error:
        raise unreadable(path, error) from error
    except (TensorFileError, OSError) as error:
        raise UserError(
            f"{path}: got no whole safetensors file ({error}). Copy it again."
        ) from error


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

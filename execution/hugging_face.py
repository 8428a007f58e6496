"""Folders of Hugging Face's models: `config.json`, safetensors in one file or several, the
tokenizer's files and, where transformers has not the model's class, its code.

Weights pass through memory a tensor at a time. Nothing is unpickled, and no folder's code is run.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from popxl_gpt.config import Model, UserError
from popxl_gpt.config.bounded import read_bounded
from popxl_gpt.config.plain_files import write_plain
from popxl_gpt.data.text_tokenizer import CONFIG as CONFIG_OF_TOKENIZER
from popxl_gpt.data.text_tokenizer import END_OF_TEXT, special_tokens_beside
from popxl_gpt.execution.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.hugging_face_config import (
    config_of,
    family_in,
    model_in,
    special_tokens_in,
)
from popxl_gpt.execution.special_tokens import BEGIN, END, as_list
from popxl_gpt.execution.tensor_files import (
    TensorFileError,
    read_tensor,
    tensor_shapes,
    write_tensors,
)
from popxl_gpt.modelling import model_table
from popxl_gpt.modelling.hugging_face import HEAD, Family, family_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
OWN_FILES = (
    r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|"
    r"tokenizer(_config)?\.json|modeling_popxl_gpt\.py"
)
"""Pattern of the files that `write_hugging_face` makes."""
LARGEST_JSON = 2**26
"""Bytes of config.json and of an index."""


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face's."""
    return (folder / CONFIG).is_file()


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model as transformers saves it; UserError where it is none, or has no safetensors."""

    path: Path

    @property
    def model(self) -> Model:
        """The model's configuration; `sequence_length` is the number of its positions."""
        file = self.path / CONFIG
        return model_in(file, _read_json(file))

    @property
    def family(self) -> Family:
        """What kind of model it is."""
        file = self.path / CONFIG
        return family_in(file, _read_json(file))

    @property
    def special_tokens(self) -> "dict[str, int | list[int]]":
        """The tokens that texts begin and end with, as `config.json` names them."""
        values = _read_json(self.path / CONFIG)
        return special_tokens_in(values, self.model.vocabulary_size)

    def weights(self) -> "Iterator[tuple[str, np.ndarray]]":
        """Whole weights by our parameter names, in the table's order: float32, or float16 where
        the file has that.

        Raises:
            UserError: tensors are missing, have another shape or type, or the head is tied by the
                configuration alone.
        """
        family, model, problems = self.family, self.model, []
        files, table = self._files(family), model_table(model)
        for name, parameter in table.items():
            for theirs, expected in family.shapes(name, parameter).items():
                shape = files.shape(theirs)
                if shape is None:
                    problems.append(f"{theirs} is missing")
                elif shape != expected:
                    problems.append(f"{theirs} has shape {list(shape)}, not {list(expected)}")
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(
                f"{self.path}: got tensors of another model: {'; '.join(problems[:3])}{more}. "
                f"Use the {CONFIG} of these weights."
            )
        for name, parameter in table.items():
            own_names = family.names(name)
            array = family.joined(parameter, [files.read(theirs) for theirs in own_names])
            is_tied = name == WORDS and model.tied_head and files.shape(HEAD) is not None
            if is_tied and not np.array_equal(array, files.read(HEAD)):
                raise UserError(
                    f"{self.path}: got {HEAD} that is not {own_names[0]}; expected one tensor for "
                    f"both, for tie_word_embeddings is true. Use the {CONFIG} of these weights."
                )
            yield name, array

    def _files(self, family: Family) -> "_TensorFiles":
        if (self.path / INDEX).is_file():
            names = _read_json(self.path / INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(
                isinstance(file, str) and file.isprintable() and Path(file).name == file
                for file in names.values()
            ):
                raise UserError(
                    f"{self.path / INDEX}: got no weight_map of files in its folder; expected one. "
                    "Copy the folder again."
                )
            found = sorted(set(names.values()))
            return _TensorFiles((self.path / file for file in found), family)
        if (self.path / WEIGHTS).is_file():
            return _TensorFiles([self.path / WEIGHTS], family)
        pickled = sorted(path.name for path in self.path.glob("*.bin"))
        other = f"{pickled[0]}, which is pickled, and" if pickled else ""
        raise UserError(
            f"{self.path}: got {other} no {WEIGHTS}; expected safetensors. Load the model with "
            "transformers where you trust it, and save it with save_pretrained."
        )


WORDS = "embedding.word.weight"
"""The parameter that a tied head shares with the embedding."""


class _TensorFiles:
    """Tensors by Hugging Face's names, with and without their family's prefix."""

    def __init__(self, files: "Iterable[Path]", family: Family):
        self._found: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        for path in files:
            with _told(path):
                for name, shape in tensor_shapes(path).items():
                    bare = name.removeprefix(family.prefix)
                    full = name if name == HEAD else f"{family.prefix}{bare}"
                    self._found[full] = path, name, shape

    def shape(self, name: str) -> "tuple[int, ...] | None":
        """A tensor's shape; None where there is none."""
        return self._found[name][2] if name in self._found else None

    def read(self, name: str) -> np.ndarray:
        """A tensor that is there: float32, or float16 where the file has that."""
        path, key, _ = self._found[name]
        with _told(path):
            array = read_tensor(path, key)
        if array.dtype not in (np.float32, np.float16):
            raise UserError(
                f"{path}, {key}: got {array.dtype}; expected float32, float16 or bfloat16. "
                "Convert the model to one of these with transformers."
            )
        if not np.isfinite(array).all():
            raise UserError(
                f"{path}, {key}: got numbers that are not finite; expected finite ones. Copy the "
                "file again, or use another model."
            )
        return array


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (TensorFileError, OSError) as error:
        raise UserError(
            f"{path}: got no whole safetensors file ({error}). Copy it again."
        ) from error


def _read_json(path: Path) -> "dict[str, Any]":
    try:
        values = json.loads(read_bounded(path, LARGEST_JSON).decode("utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: got '{error.strerror}'; expected a readable file. Check the path."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: got no JSON; expected Hugging Face's. Copy it again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: got no JSON object; expected Hugging Face's. Copy it again.")
    return values


def write_hugging_face(
    folder: Path,
    model: Model,
    weights: "Iterator[tuple[str, np.ndarray]]",
    tokenizer: Path | None,
    file_bytes: int,
    special_tokens: "Mapping[str, int | list[int]]" = MappingProxyType({}),
) -> Family:
    """Fill a folder with a model that transformers loads. Returns what it is there.

    Args:
        weights: whole, by our names.
        tokenizer: a tokenizer.json to put beside them.
        file_bytes: another file of weights is begun after so many.
        special_tokens: that texts begin and end with, as `config.json` names them; those that it
            does not name are the tokenizer's, or the model's.
    """
    family = family_of(model)
    table, total, where = model_table(model), 0, {}
    shards: list[dict[str, np.ndarray]] = [{}]
    names: list[Path] = []

    def flush() -> None:
        path = folder / f".weights-{len(names)}"
        write_tensors(shards.pop(), path, {"format": "pt"})
        names.append(path)
        shards.append({})

    for name, array in weights:
        pending = sum(held.nbytes for held in shards[-1].values())
        if pending and pending + array.nbytes > file_bytes:
            flush()
        tensors = family.split(name, table[name], array)
        shards[-1].update(tensors)
        where.update(dict.fromkeys(tensors, len(names)))
        total += array.nbytes
        kind = array.dtype.name
    flush()
    final = [
        WEIGHTS if len(names) == 1 else f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        for i in range(len(names))
    ]
    for path, file in zip(names, final):
        path.rename(folder / file)
    if len(final) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: final[i] for name, i in where.items()},
        }
        _write_json(folder / INDEX, index)
    added = {} if tokenizer is None else _added_tokens(tokenizer)
    beside = {} if tokenizer is None else special_tokens_beside(tokenizer)
    numbers = {text: number for number, text in added.items()}
    begin = special_tokens.get(BEGIN, numbers.get(beside.get("bos_token", END_OF_TEXT)))
    ending = numbers.get(beside.get("eos_token", END_OF_TEXT))
    end = special_tokens.get(END, model.end_of_text or ending)  # 0: the model does not tell
    _write_json(folder / CONFIG, config_of(model, family, kind, begin, end))
    if family.code is not None:
        write_plain(folder / family.code.name, family.code.read_bytes())
    if tokenizer is not None:
        write_plain(folder / TOKENIZER, tokenizer.read_bytes())
        special: dict[str, Any] = {
            name: added.get(next(iter(as_list(tokens)), None))
            for name, tokens in (("bos_token", begin), ("eos_token", end))
        }
        special |= {name: value for name, value in beside.items() if name != END}
        _write_json(folder / CONFIG_OF_TOKENIZER, _tokenizer_config(model, special))
    return family


def _tokenizer_config(model: Model, special: "dict[str, Any]") -> "dict[str, Any]":
    """Its special tokens have their places in the model's configuration, too."""
    kind, known = "PreTrainedTokenizerFast", {n: v for n, v in special.items() if v is not None}
    return {"tokenizer_class": kind, "model_max_length": model.positions, **known}


def _added_tokens(tokenizer: Path) -> "dict[int | None, str]":
    """The tokens of a tokenizer that are no pieces of text, by their numbers."""
    tokens = _read_json(tokenizer).get("added_tokens", [])
    if not isinstance(tokens, list) or not all(
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and type(token.get("id")) is int
        for token in tokens
    ):
        raise UserError(
            f"{tokenizer}: got added_tokens that are none; expected a list of tokens, each with "
            "its content and id. Copy the file again."
        )
    return {token["id"]: token["content"] for token in tokens}


def _write_json(path: Path, values: "dict[str, Any]") -> None:
    write_plain(path, json.dumps(values, indent=2) + "\n")

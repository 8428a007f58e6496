"""Folders of Hugging Face's models: `config.json`, safetensors in one file or several, the
tokenizer's files and, where transformers has not the model's class, its code.

Weights pass through memory a tensor at a time. Nothing is unpickled, and no folder's code is run.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from popxl_gpt.config.schema import Model
from popxl_gpt.data.special_tokens import BEGIN, END, as_list
from popxl_gpt.data.text_tokenizer import CONFIG as CONFIG_OF_TOKENIZER
from popxl_gpt.data.text_tokenizer import END_OF_TEXT, special_tokens_beside
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.checkpoints.tensor_files import write_tensors
from popxl_gpt.execution.exchange.families.family import Family
from popxl_gpt.execution.exchange.families.known import family_of
from popxl_gpt.execution.exchange.hugging_face_config import (
    config_of,
    family_in,
    model_in,
    special_tokens_in,
)
from popxl_gpt.execution.exchange.hugging_face_files import (
    TensorFiles,
    as_precision,
    named_files,
    read_json,
    same_bits,
)
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.utils.errors import PointerError, UserError, unreadable
from popxl_gpt.utils.files.bounded import shown
from popxl_gpt.utils.files.hub import foreign_model, hub_hint
from popxl_gpt.utils.files.plain import check_plain, names_in, write_plain
from popxl_gpt.utils.files.whole import rename

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
OWN_FILES = (
    r"config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|"
    r"tokenizer(_config)?\.json|modeling_popxl_gpt\.py"
)
"""Pattern of the files that `write_hugging_face` makes."""
TOKENIZER_VALUES = 2**23
"""Values in the JSON of a tokenizer, which has several for each token."""


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
        return model_in(self.path / CONFIG, self._config())

    @property
    def family(self) -> Family:
        """What kind of model it is."""
        return family_in(self.path / CONFIG, self._config())

    @property
    def special_tokens(self) -> "dict[str, int | list[int]]":
        """The tokens that texts begin and end with, as `config.json` names them."""
        return special_tokens_in(self._config(), self.model.vocabulary_size)

    def weights(self) -> "Iterator[tuple[str, np.ndarray]]":
        """Whole weights by our parameter names, in the table's order: float32, or float16 where
        the file has that. Every tensor of the folder is one of them, or known to be no weight.

        Raises:
            UserError: tensors are missing, have another shape or type, or are none of the model's,
                or the head is tied by the configuration alone.
        """
        family, model, problems = self.family, self.model, []
        head = family.head_matrix
        files = self._files(family)
        if model.layers > max(len(files.found), 1000):  # a table of so many takes seconds
            raise UserError(
                f"{self.path}: got {len(files.found)} tensors for {model.layers} layers; expected "
                f"several for each. Use the {CONFIG} of these weights."
            )
        table = model_table(model)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in table.items():
            shapes |= family.shapes(name, parameter)
            if name == WORDS and model.tied_head and head in files.found:
                shapes[head] = shapes[family.names(name)[0]]
        for theirs, expected in shapes.items():
            if theirs not in files.found:
                problems.append(f"{theirs} is missing")
            elif (shape := files.found[theirs].entry.shape) != expected:
                problems.append(f"{theirs} has shape {shown(list(shape))}, not {list(expected)}")
        problems += [
            f"{shown(place.name)} is none of its tensors"
            for theirs, place in files.found.items()
            if theirs not in shapes and not family.is_buffer(theirs)
        ]
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(
                f"{self.path}: got tensors of another model: {'; '.join(problems[:3])}{more}. "
                f"Use the {CONFIG} of these weights."
            )
        files.check_types(shapes)
        for name, parameter in table.items():
            own_names = family.names(name)
            array = family.joined(parameter, [files.read(theirs) for theirs in own_names])
            is_tied = name == WORDS and model.tied_head and head in shapes
            if is_tied and not same_bits(array, files.read(head)):
                raise UserError(
                    f"{self.path}: got {head} that is not {own_names[0]}; expected one tensor for "
                    f"both, for tie_word_embeddings is true. Use the {CONFIG} of these weights."
                )
            yield name, array

    def _config(self) -> "dict[str, Any]":
        """What config.json says, of a folder that has one."""
        problem = foreign_model(self.path)
        if problem is not None:
            raise UserError(f"{self.path}: got {problem}")
        return read_json(self.path / CONFIG, hub_hint(self.path))

    def _files(self, family: Family) -> TensorFiles:
        """The weights' files: those that the index names, or the one, and no other beside them."""
        there = {name for name in names_in(self.path) if SHARD.fullmatch(name)}
        named: dict[str, list[str]] = {WEIGHTS: []}
        if (self.path / INDEX).is_file():
            named = named_files(self.path / INDEX)
        elif WEIGHTS not in there:
            raise UserError(f"{self.path}: got {self._in_place_of_weights(there)}")
        others = sorted(there - named.keys())
        if others:
            raise UserError(
                f"{self.path}: got {others[0]} beside {', '.join(sorted(named)[:3])}; expected the "
                "weights of one model. Remove those of another, or copy the folder again."
            )
        return TensorFiles({self.path / file: names for file, names in named.items()}, family)

    def _in_place_of_weights(self, shards: "set[str]") -> str:
        """What a folder without weights that can be read has, what is expected, and what to do."""
        if shards:
            return f"{min(shards)} without {INDEX}; expected both. Copy the folder again."
        pickled = sorted(name for name in names_in(self.path) if name.endswith(".bin"))
        for path in (self.path / name for name in pickled[:1]):
            try:
                check_plain(path)
            except PointerError as error:
                raise unreadable(path, error) from error
        other = f"{pickled[0]}, which is pickled, and " if pickled else ""
        return (
            f"{other}no {WEIGHTS}; expected safetensors. Load the model with transformers where "
            "you trust it, and save it with save_pretrained."
        )


WORDS = "embedding.word.weight"
"""The parameter that a tied head shares with the embedding."""


def write_hugging_face(
    folder: Path,
    model: Model,
    weights: "Iterator[tuple[str, np.ndarray]]",
    tokenizer: Path | None,
    file_bytes: int,
    special_tokens: "Mapping[str, int | list[int]]" = MappingProxyType({}),
    precision: str | None = None,
    family_name: str | None = None,
) -> Family:
    """Fill a folder with a model that transformers loads. Returns what it is there.

    Args:
        weights: whole, by our names.
        tokenizer: a tokenizer.json to put beside them.
        file_bytes: another file of weights is begun after so many.
        special_tokens: that texts begin and end with, as `config.json` names them; those that it
            does not name are the tokenizer's, or the model's.
        precision: type of the weights; none: as they are.
        family_name: what the model is to be there, as `config.json` names it; none: the first
            family that it is of.
    Raises:
        UserError: the model is not of that family, or its weights are beyond the precision.
    """
    family = family_of(model, family_name)
    table, total, where = model_table(model), 0, {}
    shards: list[dict[str, np.ndarray]] = [{}]
    names: list[Path] = []

    def flush() -> None:
        path = folder / f".weights-{len(names)}"
        write_tensors(shards.pop(), path, {"format": "pt"}, precision == "bfloat16")
        names.append(path)
        shards.append({})

    for name, whole in weights:
        array = as_precision(name, whole, precision)
        pending = sum(held.nbytes for held in shards[-1].values())
        if pending and pending + array.nbytes > file_bytes:
            flush()
        tensors = family.split(name, table[name], array)
        shards[-1].update(tensors)
        where.update(dict.fromkeys(tensors, len(names)))
        total += array.nbytes
        kind = precision or array.dtype.name
    flush()
    final = [
        WEIGHTS if len(names) == 1 else f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        for i in range(len(names))
    ]
    for path, file in zip(names, final):
        rename(path, file)
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
    tokens = read_json(tokenizer, values=TOKENIZER_VALUES).get("added_tokens", [])
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

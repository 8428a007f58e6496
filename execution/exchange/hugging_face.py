"""Folders of Hugging Face's models: `config.json`, safetensors in one file or several, the
tokenizer's files and, where transformers has not the model's class, its code.

Weights pass through memory a tensor at a time. Nothing is unpickled, and no folder's code is run.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from popxl_gpt.config.schema import Config, Model, Training
from popxl_gpt.data.chat_template import TOKENIZER_CONFIG
from popxl_gpt.data.special_tokens import BEGIN, END, as_list
from popxl_gpt.data.text_tokenizer import END_OF_TEXT, special_tokens_beside
from popxl_gpt.execution.checkpoints.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.checkpoints.saved_state import Position
from popxl_gpt.execution.checkpoints.tensor_files import BFLOAT16, TensorWriter
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
    digest,
    named_files,
    read_json,
)
from popxl_gpt.execution.exchange.kept_files import (
    BESIDE,
    CONFIG,
    config_text,
    copy_beside,
    has_tokenizer,
)
from popxl_gpt.modelling.gpt import model_table
from popxl_gpt.modelling.parameters import Table
from popxl_gpt.utils.errors import PointerError, UserError, unreadable
from popxl_gpt.utils.files.bounded import shown
from popxl_gpt.utils.files.hub import foreign_model, hub_hint
from popxl_gpt.utils.files.plain import check_plain, names_in, write_plain

Weights = Iterator["tuple[str, np.ndarray]"]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
PICKLED = "pytorch_model.bin"
KINDS = (
    (WEIGHTS, INDEX, SHARD),
    (PICKLED, f"{PICKLED}.index.json", re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")),
)
"""The name of weights in one file, that of the index of several, and the names of those."""
OWN_FILES = "|".join(
    (
        r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json",
        r"modeling_popxl_gpt\.py",
        *map(re.escape, (CONFIG, *BESIDE)),
    )
)
"""Pattern of the files that `write_hugging_face` makes."""
TYPES = {"F32": "float32", BFLOAT16: "bfloat16", "F16": "float16"}
"""Types of weights as their files name them, the widest first."""
SAFETENSORS = {name: kind for kind, name in TYPES.items()}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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

    @property
    def config(self) -> Config:
        """The configuration of a run that trained it, one sequence at a time."""
        return Config(name=self.path.name, model=self.model, training=Training(global_batch_size=1))

    @property
    def folder(self) -> Path:
        """The same as of a checkpoint."""
        return self.path

    @property
    def position(self) -> Position:
        """The position before any step."""
        return Position(0, "")

    @property
    def ends(self) -> "list[int]":
        """The tokens that texts end with."""
        return as_list(self.special_tokens.get(END))

    @property
    def beside(self) -> "list[Path]":
        """Folders where its tokenizer may be."""
        return [self.path]

    @property
    def kept(self) -> Path:
        """The folder with what came beside its weights."""
        return self.path

    @property
    def types(self) -> "dict[str, str]":
        """Type of each weight in its file, by our names; the widest of several."""
        family = self.family
        files = self._files(family)
        return _types(_table(self.path, self.model, files), family, files)

    def weights(self) -> Weights:
        """Whole weights by our parameter names, as of `read_weights`."""
        yield from read_weights(self.path, self.family, self.model, self._files)

    def _config(self) -> "dict[str, Any]":
        """What config.json says, of a folder that has one."""
        problem = foreign_model(self.path)
        if problem is not None:
            raise UserError(f"{self.path}: got {problem}")
        return read_json(self.path / CONFIG, hub_hint(self.path))

    def _files(self, family: Family) -> TensorFiles:
        """The weights' files: those that the index names, or the one, and no other beside them.
        What PyTorch pickled is only taken where there is nothing else.
        """
        names = names_in(self.path)
        whole, index, shard = next(
            (kind for kind in KINDS if any(kind[2].fullmatch(name) for name in names)), KINDS[0]
        )
        there = {name for name in names if shard.fullmatch(name)}
        named: dict[str, list[str]] = {whole: []}
        if (self.path / index).is_file():
            named = named_files(self.path / index)
        elif whole not in there:
            raise UserError(f"{self.path}: got {self._in_place_of_weights(there, index)}")
        others = sorted(there - named.keys())
        if others:
            raise UserError(
                f"{self.path}: got {others[0]} beside {', '.join(sorted(named)[:3])}; expected the "
                "weights of one model. Remove those of another, or copy the folder again."
            )
        return TensorFiles({self.path / file: names for file, names in named.items()}, family)

    def _in_place_of_weights(self, shards: "set[str]", index: str) -> str:
        """What a folder without weights that can be read has, what is expected, and what to do."""
        if shards:
            return f"{min(shards)} without {index}; expected both. Copy the folder again."
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


def read_weights(
    where: Path, family: Family, model: Model, files_of: Callable[[Family], TensorFiles]
) -> Weights:
    """Whole weights by our parameter names, in the table's order: float32, or float16 where the
    file has that. Every tensor of the files is one of them, or known to be no weight.

    Raises:
        UserError: tensors are missing, have another shape or type, or are none of the model's,
            or the head is tied by the configuration alone.
    """
    files, problems = files_of(family), []
    table = _table(where, model, files)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in table.items():
        shapes |= family.shapes(name, parameter)
        if name == WORDS and model.tied_head and family.head_matrix in files.found:
            shapes[family.head_matrix] = shapes[family.names(name)[0]]
    for theirs, expected in shapes.items():
        if theirs not in files.found:
            problems.append(f"{theirs} is missing")
        elif (shape := files.found[theirs].shape) != expected:
            problems.append(f"{theirs} has shape {shown(list(shape))}, not {list(expected)}")
    problems += [
        f"{shown(place.name)} is none of its tensors"
        for theirs, place in files.found.items()
        if theirs not in shapes and not family.is_buffer(theirs)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"{where}: got tensors of another model: {'; '.join(problems[:3])}{more}. "
            f"Use the {CONFIG} of these weights."
        )
    files.check_types(shapes)
    for name, parameter in table.items():
        own_names = family.names(name)
        is_tied = name == WORDS and model.tied_head and family.head_matrix in shapes
        # one of the two at a time
        head = digest(files.read(family.head_matrix)) if is_tied else b""
        array = family.joined(parameter, [files.read(theirs) for theirs in own_names])
        if is_tied and digest(array) != head:
            raise UserError(
                f"{where}: got {family.head_matrix} that is not {own_names[0]}; expected one "
                f"tensor for both, for tie_word_embeddings is true. Use the {CONFIG} of these "
                "weights."
            )
        yield name, array


def _table(where: Path, model: Model, files: TensorFiles) -> Table:
    """The model's parameters. UserError where the files have not the tensors of so many layers."""
    if model.layers > max(len(files.found), 1000):  # a table of so many takes seconds
        raise UserError(
            f"{where}: got {len(files.found)} tensors for {model.layers} layers; expected "
            f"several for each. Use the {CONFIG} of these weights."
        )
    return model_table(model)


def _types(table: Table, family: Family, files: TensorFiles) -> "dict[str, str]":
    """Type of each weight in its file, by our names; the widest of several."""
    found = {}
    for name in table:
        kinds = [files.found[theirs].type for theirs in family.names(name) if theirs in files.found]
        found[name] = next((kind for kind in TYPES if kind in kinds), "F32")
    return {name: TYPES[kind] for name, kind in found.items()}


def write_hugging_face(
    folder: Path,
    model: Model,
    weights: Weights,
    tokenizer: Path | None,
    file_bytes: int,
    special_tokens: "Mapping[str, int | list[int]]" = MappingProxyType({}),
    precision: str | None = None,
    family_name: str | None = None,
    types: "Mapping[str, str]" = MappingProxyType({}),
    kept: Path | None = None,
) -> Family:
    """Fill a folder with a model that transformers loads. Returns what it is there.

    Args:
        weights: whole, by our names, in the table's order.
        tokenizer: a tokenizer.json to put beside them.
        file_bytes: another file of weights is begun after so many.
        special_tokens: that texts begin and end with, as `config.json` names them; those that it
            does not name are the tokenizer's, or the model's.
        precision: type of the weights; none: that of `types`.
        family_name: what the model is to be there, as `config.json` names it; none: the first
            family that it is of.
        types: of each weight, by our names; float32 where it is not said.
        kept: a folder with what lay beside the weights where the model came from.
    Raises:
        UserError: the model is not of that family, or its weights are beyond the precision.
    """
    family = family_of(model, family_name)
    kinds = {name: precision or types.get(name, "float32") for name in model_table(model)}
    _write_tensors(folder, model, family, weights, kinds, file_bytes)
    added = {} if tokenizer is None else _added_tokens(tokenizer)
    beside = {} if tokenizer is None else special_tokens_beside(tokenizer)
    numbers = {text: number for number, text in added.items()}
    begin = special_tokens.get(BEGIN, numbers.get(beside.get("bos_token", END_OF_TEXT)))
    ending = numbers.get(beside.get("eos_token", END_OF_TEXT))
    end = special_tokens.get(END, model.end_of_text or ending)  # 0: the model does not tell
    ((kind, _),) = Counter(kinds.values()).most_common(1)
    values = config_of(model, family, kind, begin, end)
    if family.code is not None:
        write_plain(folder / family.code.name, family.code.read_bytes())
    if tokenizer is not None:
        write_plain(folder / TOKENIZER, tokenizer.read_bytes())
        special: dict[str, Any] = {
            name: added.get(next(iter(as_list(tokens)), None))
            for name, tokens in (("bos_token", begin), ("eos_token", end))
        }
        special |= {name: value for name, value in beside.items() if name != END}
        _write_json(folder / TOKENIZER_CONFIG, _tokenizer_config(model, special))
    if kept is not None and has_tokenizer(kept, tokenizer):
        copy_beside(kept, folder)
    write_plain(folder / CONFIG, config_text(kept, model, family, values))
    return family


def _write_tensors(
    folder: Path,
    model: Model,
    family: Family,
    weights: Weights,
    kinds: "Mapping[str, str]",
    file_bytes: int,
) -> None:
    """Write weights into one file or several, with an index, a tensor at a time.

    Args:
        kinds: types, by our names.
    """
    shards: list[list[str]] = [[]]
    table, sizes = model_table(model), [0]
    for name, parameter in table.items():
        nbytes = BYTES[kinds[name]] * math.prod(parameter.shape)
        if sizes[-1] and sizes[-1] + nbytes > file_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += nbytes
    names = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    where: dict[str, str] = {}
    for file, held in zip(names, shards):
        described = {
            theirs: (SAFETENSORS[kinds[name]], shape)
            for name in held
            for theirs, shape in family.shapes(name, table[name]).items()
        }
        where |= dict.fromkeys(described, file)
        with TensorWriter(folder / file, described, {"format": "pt"}) as writer:
            for name, (told, whole) in zip(held, weights):
                assert told == name, f"{told}, not {name}"
                converted = _converter(name, whole.dtype.name, kinds[name])
                for theirs, array in family.split(name, table[name], whole).items():
                    writer.write(theirs, array, converted)
                del whole, array
    assert next(weights, None) is None  # it tells at its end what was left over
    if len(names) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        _write_json(folder / INDEX, index)


def _converter(name: str, given: str, wanted: str) -> "Callable[[np.ndarray], np.ndarray] | None":
    """What makes weights of one type such of another; none where they are."""
    return None if given == wanted else lambda rows: as_precision(name, rows, wanted)


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

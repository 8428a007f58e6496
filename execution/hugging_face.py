"""Folders of Hugging Face's GPT-2: `config.json`, safetensors in one file or several, and the
tokenizer's files.

Weights pass through memory a tensor at a time. Nothing is unpickled.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from popxl_gpt.config import Model, UserError, from_mapping
from popxl_gpt.config.bounded import read_bounded
from popxl_gpt.config.schema import ARCHITECTURE
from popxl_gpt.execution.checkpoint_folder import TOKENIZER
from popxl_gpt.execution.tensor_files import (
    TensorFileError,
    read_tensor,
    tensor_shapes,
    write_tensors,
)
from popxl_gpt.modelling import model_table
from popxl_gpt.modelling.hugging_face import TIED, hugging_face_name

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PREFIX = "transformer."
"""Of all names but the head's; files of the bare model leave it out."""
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, where there are several."""
TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
LARGEST_JSON = 2**26
"""Bytes of config.json and of an index."""
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh form of GELU."""
FIXED = {
    "model_type": "gpt2",
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""What our model is; the defaults of transformers' `GPT2Config` but for the type."""
SIZES = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
}
"""The sizes of `GPT2Config`, with its defaults."""


SIZES_OF_ANY = ("layers", "hidden_size", "heads", "vocabulary_size")


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face's."""
    return (folder / CONFIG).is_file()


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A GPT-2 as transformers saves it; UserError where it is none, or has no safetensors."""

    path: Path

    @property
    def model(self) -> Model:
        """The model's configuration; `sequence_length` is the number of its positions."""
        file = self.path / CONFIG
        values = _read_json(file)
        for name, expected in FIXED.items():
            found = values.get(name, None if name == "model_type" else expected)
            if found != expected:
                raise UserError(
                    f"{file}: got {name} {json.dumps(found)}; expected {json.dumps(expected)}, "
                    "for GPT-2's architecture is the one that is known here. Convert a GPT-2."
                )
        activation = values.get("activation_function", "gelu_new")
        if activation not in ACTIVATIONS:
            raise UserError(
                f"{file}: got activation_function {json.dumps(activation)}; expected one of "
                f"{', '.join(ACTIVATIONS)}, the tanh form of GELU. Convert a model that has it."
            )
        sizes = {name: values.get(name, default) for name, default in SIZES.items()}
        found = {
            "vocabulary_size": sizes["vocab_size"],
            "sequence_length": sizes["n_positions"],
            "hidden_size": sizes["n_embd"],
            "layers": sizes["n_layer"],
            "heads": sizes["n_head"],
            "feed_forward_size": sizes["n_inner"],
            "layer_norm_eps": sizes["layer_norm_epsilon"],
        }
        try:
            return from_mapping({"model": found}).model
        except UserError as error:
            raise UserError(f"{file}: {error}") from error

    def weights(self) -> "Iterator[tuple[str, np.ndarray]]":
        """Whole weights by our parameter names, in the table's order: float32, or float16 where
        the file has that.

        Raises:
            UserError: tensors are missing, have another shape or type, or the head is untied.
        """
        files, problems = self._files(), []
        table = model_table(self.model)
        for name, parameter in table.items():
            theirs = hugging_face_name(name)
            shape = files.shape(theirs)
            if shape is None:
                problems.append(f"{theirs} is missing")
            elif shape != parameter.shape:
                problems.append(f"{theirs} has shape {list(shape)}, not {list(parameter.shape)}")
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise UserError(
                f"{self.path}: got tensors of another model: {'; '.join(problems[:3])}{more}. "
                f"Use the {CONFIG} of these weights."
            )
        for name in table:
            array = files.read(hugging_face_name(name))
            if name == TIED_PARAMETER and files.shape(TIED) is not None:
                if not np.array_equal(array, files.read(TIED)):
                    raise UserError(
                        f"{self.path}: got {TIED} that is not {hugging_face_name(name)}; expected "
                        "one tensor for both, as in GPT-2. Convert a model with a tied head."
                    )
            yield name, array

    def tokenizer_files(self) -> "list[Path]":
        """Those of the tokenizer's files that are there."""
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def _files(self) -> "_TensorFiles":
        if (self.path / INDEX).is_file():
            names = _read_json(self.path / INDEX).get("weight_map")
            if not isinstance(names, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in names.values()
            ):
                raise UserError(
                    f"{self.path / INDEX}: got no weight_map of files in its folder; expected one. "
                    "Copy the folder again."
                )
            return _TensorFiles(self.path / file for file in sorted(set(names.values())))
        if (self.path / WEIGHTS).is_file():
            return _TensorFiles([self.path / WEIGHTS])
        pickled = sorted(path.name for path in self.path.glob("*.bin"))
        found = f"{pickled[0]}, which is pickled, and" if pickled else ""
        raise UserError(
            f"{self.path}: got {found} no {WEIGHTS}; expected safetensors. Load the model with "
            "transformers where you trust it, and save it with save_pretrained."
        )


TIED_PARAMETER = "embedding.word.weight"
"""The parameter that the head shares with the embedding."""


class _TensorFiles:
    """Tensors by Hugging Face's names, with and without the prefix `transformer.`."""

    def __init__(self, files: "Iterable[Path]"):
        self._found: "dict[str, tuple[Path, str, tuple[int, ...]]]" = {}
        for path in files:
            with _told(path):
                for name, shape in tensor_shapes(path).items():
                    full = name if name == TIED else f"{PREFIX}{name.removeprefix(PREFIX)}"
                    self._found[full] = path, name, shape

    def shape(self, name: str) -> "Optional[tuple[int, ...]]":
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
    tokenizer: Optional[Path],
    file_bytes: int,
) -> None:
    """Fill a folder with a GPT-2 that transformers loads.

    Args:
        weights: whole, by our names.
        tokenizer: a tokenizer.json to put beside them.
        file_bytes: another file of weights is begun after so many.
    Raises:
        UserError: the model is no GPT-2.
    """
    own = [
        f"{name} {getattr(model, name)}"
        for name in ARCHITECTURE
        if name not in SIZES_OF_ANY and getattr(model, name) != getattr(Model(), name)
    ]
    if own:
        raise UserError(
            f"{folder.name}: got a model with {', '.join(own)}; expected GPT-2's architecture, the "
            "one that is known here. Use the model with this program."
        )
    total, where = 0, {}
    shards: "list[dict[str, np.ndarray]]" = [{}]
    names: "list[Path]" = []

    def flush() -> None:
        path = folder / f".weights-{len(names)}"
        write_tensors(shards.pop(), path, {"format": "pt"})
        names.append(path)
        shards.append({})

    for name, array in weights:
        pending = sum(held.nbytes for held in shards[-1].values())
        if pending and pending + array.nbytes > file_bytes:
            flush()
        theirs = hugging_face_name(name)
        shards[-1][theirs], where[theirs] = np.ascontiguousarray(array), len(names)
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
    _write_json(folder / CONFIG, _config_of(model, kind))
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / TOKENIZER)
        _write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.positions},
        )


def _config_of(model: Model, kind: str) -> "dict[str, Any]":
    return {
        "architectures": ["GPT2LMHeadModel"],
        **FIXED,
        "activation_function": "gelu_new",
        "vocab_size": model.vocabulary_size,
        "n_positions": model.positions,
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.feed_forward_size,
        "layer_norm_epsilon": model.layer_norm_eps,
        "attn_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "torch_dtype": kind,
    }


def _write_json(path: Path, values: "dict[str, Any]") -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

"""nanoGPT's checkpoints: `ckpt.pt`, which has the state dict of its GPT, and `model_args`."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from popxl_gpt.config.presets import from_mapping
from popxl_gpt.config.schema import Model
from popxl_gpt.execution.exchange.families.gpt2 import GPT2
from popxl_gpt.execution.exchange.hugging_face import Weights, read_weights
from popxl_gpt.execution.exchange.hugging_face_files import (
    TensorFiles,
    opened_pickled,
    pickled_places,
    told,
)
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.files.bounded import shown

NANOGPT = replace(GPT2, model_type="nanogpt", is_transposed=True, buffers=("h.#.attn.bias",))
"""The names of GPT-2; its linear layers lie as PyTorch's do."""
COMPILED = "_orig_mod."
"""What torch.compile puts before each name."""
SIZES = {
    "n_layer": "layers", "n_head": "heads", "n_embd": "hidden_size",
    "vocab_size": "vocabulary_size", "block_size": "sequence_length",
    "bias": "biases", "dropout": "dropout",
}  # fmt: skip
"""Its `model_args`, and our settings. Source: github.com/karpathy/nanoGPT, train.py and model.py.
"""
DEFAULTS = {"bias": True, "dropout": 0.0}
"""Arguments that older files have not, and what they were."""


@dataclass(frozen=True)
class NanoGPTFile:
    """A model as nanoGPT saves it; UserError where it is none."""

    path: Path

    @property
    def model(self) -> Model:
        """The model's configuration; `sequence_length` is the number of its positions."""
        found = {**DEFAULTS, **self._content["model_args"]}
        unknown = sorted(found.keys() - SIZES.keys())
        missing = sorted(SIZES.keys() - found.keys())
        if unknown or missing:
            what = f"an unknown {shown(unknown[0])}" if unknown else f"no {missing[0]}"
            raise UserError(
                f"{self.path}: got {what} in model_args; expected {', '.join(SIZES)}, as nanoGPT's "
                "GPTConfig has. Convert a model that nanoGPT saved."
            )
        settings = {"activation": "gelu_exact", "tied_head": True}
        settings |= {ours: found[theirs] for theirs, ours in SIZES.items()}
        try:
            return from_mapping({"model": settings}).model
        except UserError as error:
            raise UserError(f"{self.path}: model_args: {error}") from error

    def weights(self) -> Weights:
        """Whole weights by our parameter names, as of `read_weights`."""
        state = self._content["model"]
        bare = {name.removeprefix(COMPILED): tensor for name, tensor in state.items()}
        files = TensorFiles({}, NANOGPT)
        with told(self.path):
            files.add(pickled_places(self.path, bare), NANOGPT)
        yield from read_weights(self.path, NANOGPT, self.model, lambda family: files)

    @cached_property
    def _content(self) -> "dict[str, Any]":
        with told(self.path):
            found = opened_pickled(self.path)
        parts = [found.get(name) if isinstance(found, dict) else None for name in PARTS]
        if not all(isinstance(part, dict) and {*map(type, part)} <= {str} for part in parts):
            raise UserError(
                f"{self.path}: got no {' and '.join(PARTS)}; expected both, as nanoGPT's train.py "
                "saves. Give its ckpt.pt."
            )
        return {name: part for name, part in zip(PARTS, parts)}


PARTS = ("model", "model_args")

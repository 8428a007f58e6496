"""A family of models at Hugging Face: how its state dict holds our parameters, and its
`config.json` our settings.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from popxl_gpt.config.model import ARCHITECTURE, BY_DEFAULT
from popxl_gpt.config.schema import Model
from popxl_gpt.modelling.parameters import Parameter, Role
from popxl_gpt.utils.errors import UserError

Values = dict[str, Any]
_DEFAULTS = Model()
OUTSIDE = "lm_head"
"""The one module outside a family's prefix, as most name it."""


@dataclass(frozen=True)
class TheirConfig:
    """A `config.json` as it was read."""

    file: Path
    values: Values

    def get(self, name: str, default: Any = None) -> Any:
        """A setting, or what transformers takes where it is not there."""
        return self.values.get(name, default)

    def expect(self, name: str, found: Any, expected: "tuple[Any, ...]") -> None:
        """Refuse a setting whose value is none of those that are known."""
        if found not in expected:
            allowed = ", ".join(
                value if isinstance(value, str) else json.dumps(value) for value in expected
            )
            self.refuse(
                f"got {name} {json.dumps(found)}; expected "
                f"{'one of ' if len(expected) > 1 else ''}{allowed}, as models have that are known "
                "here. Convert a model that has it."
            )

    def refuse(self, problem: str) -> NoReturn:
        """Raise UserError of what the file says."""
        raise UserError(f"{self.file}: {problem}")


@dataclass(frozen=True, eq=False)
class Family:
    """A type of models."""

    model_type: str
    architecture: str
    """The class in transformers."""
    prefix: str
    """The prefix of all names but the head's; files of the bare model leave it out."""
    settings: Mapping[str, Any]
    """What our model must be set to. What neither these, `sizes` nor `varied` name must be as it is
    by default.
    """
    modules: "Mapping[str, tuple[str, ...]]"
    """Theirs by ours, without the prefix; # is the block's number. Several stand side by side in
    ours.
    """
    is_transposed: bool
    """Whether linear weights lie [out, in]."""
    sizes: "Mapping[str, tuple[str, Any]]"
    """Our settings, their names for them, and the defaults of transformers."""
    fixed: "Mapping[str, tuple[Any, ...]]"
    """What our model is: of each setting of theirs what it may be, transformers' default first."""
    read: Callable[[TheirConfig], Values]
    """Our settings that take more than a name; refuses what is known to be another model."""
    write: Callable[[Model], Values]
    """Their settings that take more than a name."""
    varied: "tuple[str, ...]" = ()
    """Our settings that `read` finds and `write` gives back."""
    allowed: "Mapping[str, tuple[Any, ...]]" = field(default_factory=dict)
    """The values that some of our settings may have, where a model of the family has not all."""
    buffers: "tuple[str, ...]" = ()
    """Tensors of their files that are no weights, named as in `modules`: the class makes them."""
    is_loaded: Callable[[Model], bool] = lambda model: True
    """Whether the class in transformers takes the sizes of a model with these settings."""
    head: str = OUTSIDE
    """The head's module, the one outside the prefix."""
    is_grouped: bool = False
    """Whether query, key and value of one head lie together, and then those of the next."""
    code: Path | None = None
    """A file to put beside the weights, which has the class; none: transformers has it."""

    @property
    def head_matrix(self) -> str:
        """The head's matrix; of a tied one a second name for the word embedding."""
        return f"{self.head}.weight"

    def is_head(self, name: str) -> bool:
        """Whether a tensor is the head's matrix, be it by the name that most have for it, as
        transformers from 5 on has for all in its classes.
        """
        return name in (self.head_matrix, f"{OUTSIDE}.weight")

    def fits(self, model: Model) -> bool:
        """Whether a model of ours is one of the family."""
        return not self.foreign(model) and self.is_loaded(model)

    def foreign(self, model: Model) -> "dict[str, Any]":
        """Settings of a model of ours that the family has not, and what they would be in it."""
        named = {*self.settings, *self.sizes, *self.varied}
        others = [name for name in (*ARCHITECTURE, *BY_DEFAULT) if name not in named]
        plain = replace(model, **{name: getattr(_DEFAULTS, name) for name in others})
        told = {name: BY_DEFAULT.get(name, name) for name in others}
        expected = {name: getattr(plain, as_told) for name, as_told in told.items()}
        expected |= self.settings
        expected |= {
            name: " or ".join(values)
            for name, values in self.allowed.items()
            if getattr(model, name) not in values
        }
        return {
            name: value
            for name, value in expected.items()
            if getattr(model, told.get(name, name)) != value
        }

    def names(self, name: str) -> "tuple[str, ...]":
        """Their tensors that are one of our parameters."""
        module, _, kind = name.rpartition(".")
        number = re.search(r"\.(\d+)\.", module)
        found = self.modules[re.sub(r"\.\d+\.", ".#.", module)]
        whole = (their if their == self.head else self.prefix + their for their in found)
        return tuple(f"{their.replace('#', number[1] if number else '')}.{kind}" for their in whole)

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of theirs is no weight."""
        return re.sub(r"\.\d+\.", ".#.", name.removeprefix(self.prefix)) in self.buffers

    def shapes(self, name: str, parameter: Parameter) -> "dict[str, tuple[int, ...]]":
        """Shapes of their tensors that are one of our parameters, in order."""
        *before, length = parameter.shape
        shapes = [(*before, size) for size in self._sizes(name, parameter, length)]
        return {
            their: shape[::-1] if self._turns(parameter) else shape
            for their, shape in zip(self.names(name), shapes)
        }

    def joined(self, parameter: Parameter, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One of our parameters from their tensors."""
        ours = [array.T if self._turns(parameter) else array for array in arrays]
        whole = ours[0] if len(ours) == 1 else np.concatenate(ours, axis=-1)
        return _side_by_side(parameter, whole) if self.is_grouped else whole

    def split(self, name: str, parameter: Parameter, array: np.ndarray) -> "dict[str, np.ndarray]":
        """Their tensors from one of our parameters."""
        whole = _by_heads(parameter, array) if self.is_grouped else array
        parts = _cut(whole, self._sizes(name, parameter, array.shape[-1]))
        return {
            their: part.T if self._turns(parameter) else part
            for their, part in zip(self.names(name), parts)
        }

    def _turns(self, parameter: Parameter) -> bool:
        return self.is_transposed and parameter.role is Role.WEIGHT

    def _sizes(self, name: str, parameter: Parameter, length: int) -> "list[int]":
        if len(self.names(name)) == 1:
            return [length]
        return _block_sizes(parameter, length)


def _block_sizes(parameter: Parameter, length: int) -> "list[int]":
    return [length // sum(parameter.blocks) * size for size in parameter.blocks]


def _cut(array: np.ndarray, sizes: "list[int]") -> "list[np.ndarray]":
    return np.split(array, list(accumulate(sizes))[:-1], axis=-1)


def _by_heads(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """Blocks of all heads become heads of all blocks, along the last axis."""
    blocks = _cut(array, _block_sizes(parameter, array.shape[-1]))
    apart = [block.reshape(*block.shape[:-1], parameter.heads, -1) for block in blocks]
    return np.concatenate(apart, axis=-1).reshape(array.shape)


def _side_by_side(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """The inverse of `_by_heads`."""
    heads = array.reshape(*array.shape[:-1], parameter.heads, -1)
    blocks = _cut(heads, _block_sizes(parameter, heads.shape[-1]))
    flat = [block.reshape(*array.shape[:-1], -1) for block in blocks]
    return np.concatenate(flat, axis=-1)

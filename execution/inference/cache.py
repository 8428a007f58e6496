"""What a program that extends texts keeps of the tokens before, for each layer: keys and values,
and what convolutions have before the next.

A batch has so many texts per replica. Their last tokens stand in one column: a shorter text has
padding before it. What is kept of column c stands in row c of a layer's cache, or, where the layer
has a window of fewer tokens, in row c mod window: a ring. Layers of one window share buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import popxl
import popxl_addons as addons
from popxl import Tensor, TensorSpec, ops

from popxl_gpt.config.schema import Config, Model
from popxl_gpt.modelling.decoder import CONVOLUTIONS, DecoderBlock
from popxl_gpt.utils.runtime import data_type

PROMPT_TOKENS = 256
"""Tokens of each text, at most, that a run takes of its prompt: bounds the memory for scores."""


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """What a program is made for."""

    texts: int
    """Texts per data-parallel replica."""
    prompt: int
    """Tokens of each text that a run takes of a prompt."""
    columns: int
    """Tokens of each text whose keys and values are kept, but for those that windows leave out."""

    @classmethod
    def of(cls, config: Config, texts: int, longest: int, tokens: int) -> "CacheSizes":
        """The sizes for prompts of up to so many tokens, and so many tokens more."""
        positions = config.model.positions
        whole = min(longest, positions)
        prompt = -(-whole // -(-whole // PROMPT_TOKENS))
        columns = -(-whole // prompt) * prompt + tokens
        if longest + tokens > positions:  # prompts are read again, and may be as long as that
            most = -(-positions // prompt) * prompt
            columns = min(most + tokens, positions + prompt - 1)  # padding, and all positions
        return cls(
            texts=-(-texts // config.execution.data_parallel), prompt=prompt, columns=columns
        )

    def ring(self, model: Model, kind: str) -> int | None:
        """Rows of the ring of layers of a kind; none: they have a row for each column."""
        window = model.of_kind(kind).window
        return None if window is None or window >= self.columns else window


@dataclass(frozen=True, eq=False)
class LayersCache:
    """What layers with rings of one size, or without, keep."""

    layers: tuple[int, ...]
    """Their numbers."""
    buffers: Mapping[str, popxl.RemoteBuffer]
    """Keys, values, and by the name of each convolution the rows before the next: of each layer a
    row.
    """

    def row_before(self, first: int) -> int:
        """The number to add to those of some layers, one after the other, for their rows."""
        return self.layers.index(first) - first


def kept_specs(config: Config, sizes: CacheSizes, ring: int | None) -> dict[str, TensorSpec]:
    """What one layer keeps on a replica, by name, in the order in which its block takes them."""
    model, execution = config.model, config.execution
    tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
    rows = (model.key_value // tp1, ring or sizes.columns, model.head_width)
    shapes: dict[str, tuple[int, ...]] = {"keys": rows, "values": rows}
    if model.has_convolutions:
        table = DecoderBlock.parameters(model)
        shapes |= {name: table[f"{name}.weight"].shard_shape(tp1, tp2) for name in CONVOLUTIONS}
    dtype = data_type(model.precision)
    return {name: TensorSpec((sizes.texts, *shape), dtype) for name, shape in shapes.items()}


def make_cache(
    config: Config, sizes: CacheSizes
) -> tuple[dict[int | None, LayersCache], addons.NamedTensors]:
    """The cache by the size of rings, and all rows. They are zeros at first: what is hidden has no
    weight, but NaN has.
    """
    rings = [sizes.ring(config.model, kind) for kind in config.model.kinds]
    caches, rows = {}, {}
    for ring in dict.fromkeys(rings):
        layers = tuple(n for n, own in enumerate(rings) if own == ring)
        buffers = {}
        for name, spec in kept_specs(config, sizes, ring).items():
            buffers[name] = addons.create_remote_buffer(spec, len(layers))
            zeros = np.broadcast_to(np.zeros((), spec.dtype.as_numpy()), spec.shape)
            for row, n in enumerate(layers):
                rows[f"{name}.{n}"] = popxl.remote_variable(zeros, buffers[name], row, spec.dtype)
        caches[ring] = LayersCache(layers, buffers)
    return caches, addons.NamedTensors.from_dict(rows)


def seen_keys_and_rows(sizes: CacheSizes, ring: int | None, tokens: int) -> tuple[int, int]:
    """The keys that some tokens of a text get, and the length of the rows of `mask_and_rows`.

    Tokens of a prompt get their own beside those of a ring, in which they would take the place of
    what the first of them sees. Then all rows of the ring are chosen anew.
    """
    if ring is None:
        return sizes.columns, 1
    return (ring, 1) if tokens == 1 else (ring + tokens, ring)


def mask_and_rows(
    sizes: CacheSizes, ring: int | None, own: Tensor, begins: Tensor, dtype: popxl.dtype
) -> tuple[Tensor, Tensor]:
    """What attention adds to scores, [texts, 1, tokens, keys], and where
    keys are kept, as `CachedAttention` takes it; see `seen_keys_and_rows`.

    Args:
        own: columns of the tokens, int32 [tokens].
        begins: the first column that each token sees, but for windows, int32 [texts, tokens]; of
            one of the padding its own, so that its softmax has something to sum.
    """
    (tokens,), one = own.shape, popxl.constant(1, popxl.int32)
    columns, rows, lowest = _range(sizes.columns), own[:1], begins
    if ring is not None:
        size, numbers = popxl.constant(ring, popxl.int32), _range(ring)
        columns, rows = _newest(own[-1:], numbers, size), ops.fmod(own[:1], size)
        if tokens > 1:
            before = own[:1] - one
            rows = ops.where(ops.greater(columns, before), columns - before + size - one, numbers)
            columns = ops.concat([_newest(before, numbers, size), own])
        lowest = ops.maximum(begins, own - size + one)
    shape = (sizes.texts, 1, tokens, 1)
    is_hidden = ops.logical_or(
        ops.greater(columns, own.reshape((1, 1, tokens, 1))),
        ops.greater(lowest.reshape(shape), columns),
    )
    hidden, seen = (popxl.constant(value, dtype) for value in (-np.inf, 0.0))
    return ops.where(is_hidden, hidden, seen), rows


def _newest(last: Tensor, rows: Tensor, size: Tensor) -> Tensor:
    """The column in each row of a ring after so many; below 0 where there is none yet."""
    return last - ops.fmod(last + size - rows, size)


def _range(count: int) -> Tensor:
    return popxl.constant(np.arange(count, dtype=np.int32), popxl.int32)

"""Parameters as whole tensors, and how each is cut over replicas.

One `Parameter` says everything that is particular to a tensor: shape, role, where it is split, how
it starts. Sharding, initialisation, weight decay and the mapping to other formats read it from
here.
"""

import enum
import itertools
import re
import zlib
from dataclasses import dataclass, replace

import numpy as np


class Role(enum.Enum):
    """What a parameter does; decides what updates it."""

    WEIGHT = "weight"
    BIAS = "bias"
    GAIN = "gain"
    EMBEDDING = "embedding"
    HEAD = "head"
    ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter tensor of the model and its layout."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, without padding, in the order that whole-tensor files use."""
    role: Role
    tp1_axis: int | None = None
    """Axis that is split over tp1; none: every replica of a tp1 group holds the same."""
    tp2_axis: int | None = None
    """Axis that is split over tp2; none: every replica of a tp2 group holds the same."""
    blocks: tuple[int, ...] = (1,)
    """Relative sizes of blocks along the tp1 axis, each of which is split by itself: (1, 1, 1) for
    query, key and value side by side.
    """
    heads: int = 1
    """Heads along the tp1 axis; where blocks are of several sizes, those of the smallest."""
    mean: float = 0.0
    """Mean of fresh values."""
    std: float = 0.0
    """Standard deviation of fresh values; 0: all are the mean."""
    rate: float = 1.0
    """Learning rate over that of others of its role."""
    is_in_parts: bool = False
    """Whether `embedding_serialisation` cuts its rows, which are split over tp1, into parts."""

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: matrices alone have it, no gains, factors and biases."""
        return len(self.shape) > 1 and self.role is not Role.GAIN

    def groups(self, tp1: int, tp2: int) -> tuple[int, int]:
        """The number of pieces that the tensor is cut into over (tp1, tp2)."""
        return (1 if self.tp1_axis is None else tp1), (1 if self.tp2_axis is None else tp2)

    def padded_shape(self, tp1: int, tp2: int) -> tuple[int, ...]:
        """The whole shape with the tp1 axis padded to a multiple of tp1; only embeddings need
        that.
        """
        shape = list(self.shape)
        if self.tp1_axis is not None:
            shape[self.tp1_axis] = -(-shape[self.tp1_axis] // tp1) * tp1
        return tuple(shape)

    def shard_shape(self, tp1: int, tp2: int) -> tuple[int, ...]:
        """Shape of the piece that one replica holds."""
        shape, pieces = list(self.padded_shape(tp1, tp2)), self.groups(tp1, tp2)
        for axis, count in zip((self.tp1_axis, self.tp2_axis), pieces):
            if axis is not None:
                shape[axis] //= count
        return tuple(shape)

    def shard(self, whole: np.ndarray, tp1: int, tp2: int) -> np.ndarray:
        """Cut a whole tensor: [*shape] -> [pieces, *shard_shape], tp1 outer; without the first axis
        for one piece.

        Padding is zero.
        """
        assert whole.shape == self.shape, (whole.shape, self.shape)
        count1, count2 = self.groups(tp1, tp2)
        padding = [(0, new - old) for old, new in zip(self.shape, self.padded_shape(tp1, tp2))]
        whole = np.pad(whole, padding) if any(after for _, after in padding) else whole
        pieces = [
            piece
            for row in self._split_tp1(whole, count1)
            for piece in np.split(row, count2, axis=self.tp2_axis or 0)
        ]
        return np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.stack(pieces))

    def unshard(self, pieces: np.ndarray, tp1: int, tp2: int) -> np.ndarray:
        """Inverse of `shard`; padding is dropped."""
        count1, count2 = self.groups(tp1, tp2)
        pieces = pieces.reshape(count1, count2, *self.shard_shape(tp1, tp2))
        rows = [
            np.concatenate(list(row), axis=self.tp2_axis or 0) if count2 > 1 else row[0]
            for row in pieces
        ]
        whole = self._join_tp1(rows)
        return np.ascontiguousarray(whole[tuple(slice(size) for size in self.shape)])

    def initial(self, name: str, seed: int) -> np.ndarray:
        """Fresh float32 values of the whole tensor: a function of the seed and the tensor's name
        alone.
        """
        if self.std == 0.0:
            return np.full(self.shape, self.mean, np.float32)
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = generator.standard_normal(self.shape, dtype=np.float32)
        values *= np.float32(self.std)
        values += np.float32(self.mean)
        return values

    def _in_blocks(self, t: np.ndarray) -> "list[np.ndarray]":
        axis = self.tp1_axis or 0
        unit = t.shape[axis] // sum(self.blocks)
        ends = [unit * total for total in itertools.accumulate(self.blocks)]
        return np.split(t, ends[:-1], axis=axis)

    def _split_tp1(self, whole: np.ndarray, count: int) -> "list[np.ndarray]":
        if count == 1:
            return [whole]
        axis = self.tp1_axis or 0
        blocks = [np.split(block, count, axis=axis) for block in self._in_blocks(whole)]
        return [np.concatenate(parts, axis=axis) for parts in zip(*blocks)]

    def _join_tp1(self, rows: "list[np.ndarray]") -> np.ndarray:
        if len(rows) == 1:
            return rows[0]
        axis = self.tp1_axis or 0
        split = [self._in_blocks(row) for row in rows]
        return np.concatenate([part for parts in zip(*split) for part in parts], axis=axis)


Table = dict[str, Parameter]
"""Parameters of a layer by dotted name."""


_PART = re.compile(r"(?<=\.weight)\.[0-9]+(?=\.|$)")


def whole_name(name: str) -> str:
    """The name of the parameter that a part is of, `word.weight` for `word.weight.3`; other names,
    also those of what is kept for parameters, stay as they are but for that.
    """
    return _PART.sub("", name)


def part_number(name: str) -> int:
    """The number of the part that has this name; 0 where the parameter is in one."""
    found = _PART.search(name)
    return int(found[0][1:]) if found else 0


def in_parts(table: Table, count: int, tp1: int) -> Table:
    """The table of a program, in which parameters are in so many parts. A part has some rows of the
    piece of every tp1 replica: the parts on a replica, one after the other, are its piece.
    """
    found: Table = {}
    for name, parameter in table.items():
        if count == 1 or not parameter.is_in_parts:
            found[name] = parameter
            continue
        for number, rows in enumerate(np.array_split(np.arange(_rows(parameter, tp1)), count)):
            shape = (len(rows) * tp1, *parameter.shape[1:])
            found[f"{name}.{number}"] = replace(parameter, shape=shape, is_in_parts=False)
    return found


def _rows(parameter: Parameter, tp1: int) -> int:
    """Rows of a tp1 replica's piece."""
    return parameter.padded_shape(tp1, 1)[0] // tp1


def cut(parameter: Parameter, whole: np.ndarray, count: int, tp1: int) -> "list[np.ndarray]":
    """A whole tensor as its parts are: those of `in_parts`, in order. Padding is zero."""
    if count == 1 or not parameter.is_in_parts:
        return [whole]
    rows, rest = _rows(parameter, tp1), parameter.shape[1:]
    whole = np.pad(whole, [(0, tp1 * rows - len(whole)), *((0, 0) for _ in rest)])
    parts = np.array_split(whole.reshape(tp1, rows, *rest), count, axis=1)
    return [np.ascontiguousarray(part).reshape(-1, *rest) for part in parts]


def joined(parameter: Parameter, parts: "list[np.ndarray]", tp1: int) -> np.ndarray:
    """The inverse of `cut`; padding is dropped."""
    if len(parts) == 1:
        return parts[0]
    rest = parameter.shape[1:]
    whole = np.concatenate([part.reshape(tp1, -1, *rest) for part in parts], axis=1)
    return np.ascontiguousarray(whole.reshape(-1, *rest)[: parameter.shape[0]])


def trained(table: Table, has_adapters: bool) -> Table:
    """The parameters that training changes: all, or adapters alone where there are some."""
    is_trained = (lambda p: p.role is Role.ADAPTER) if has_adapters else (lambda p: True)
    return {name: parameter for name, parameter in table.items() if is_trained(parameter)}


def nested(**tables: Table) -> Table:
    """One table of several, each under its own name: `nested(up=a, down=b)` holds `up.weight`,
    `down.weight`, ..
    """
    return {
        f"{prefix}.{name}": parameter
        for prefix, table in tables.items()
        for name, parameter in table.items()
    }

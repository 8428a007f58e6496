"""Small helpers that need nothing but PopXL's nouns."""

import collections
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import popxl

E = TypeVar("E")
K = TypeVar("K")
V = TypeVar("V")
_logger = logging.getLogger("popxl_addons")


@contextmanager
def null_context() -> Iterator[None]:
    """Does nothing."""
    yield


def suffix_graph_name(name: str, suffix: str) -> str:
    """``name_suffix``, without the numbered "_subgraph(n)" that made a graph's name unique."""
    return re.sub(r"_subgraph\(\d+\)$", "", name) + f"_{suffix}"


@contextmanager
def timer(title: str | None = None, log_to_wandb: bool = True) -> Iterator[None]:
    """Log how long the block took, in seconds; also to wandb when a run is active there."""
    name = title or "timer"
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    _logger.info("%s: %.3f s", name, seconds)
    wandb = sys.modules.get("wandb")
    if log_to_wandb and wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.summary[name] = seconds


class OrderedDict(collections.OrderedDict[K, V]):
    """`collections.OrderedDict` whose values can be read by position."""

    def idx(self, idx: int) -> V:
        """The idx-th value, in insertion order."""
        return list(self.values())[idx]


class WeightsDict(MutableMapping[popxl.tensor.Variable, np.ndarray]):
    """``{variable: host value}`` that checks dtype and shape on assignment.

    Raises:
        ValueError: a value whose dtype or shape is not the variable's on the host
            (``shape_on_host``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._values: dict[popxl.tensor.Variable, np.ndarray] = {}
        self.update(*args, **kwargs)

    def __setitem__(self, variable: popxl.tensor.Variable, value: np.ndarray) -> None:
        dtype, shape = variable.dtype.as_numpy(), tuple(variable.shape_on_host)
        is_array = isinstance(value, (np.ndarray, np.generic))
        if not is_array or value.dtype != dtype or value.shape != shape:
            given = f"{value.dtype}{list(value.shape)}" if is_array else type(value).__name__
            raise ValueError(
                f"WeightsDict: got {given} for variable '{variable.name}'; expected "
                f"{dtype}{list(shape)}. Convert or reshape the array first."
            )
        self._values[variable] = value

    def __getitem__(self, variable: popxl.tensor.Variable) -> np.ndarray:
        return self._values[variable]

    def __delitem__(self, variable: popxl.tensor.Variable) -> None:
        del self._values[variable]

    def __iter__(self) -> Iterator[popxl.tensor.Variable]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def overrides(cls: type, base_cls: type, method: str) -> bool:
    """Whether a class has its own definition of a base's method."""
    return getattr(cls, method) is not getattr(base_cls, method)


def duplicate_items(iterable: Iterable[E]) -> list[E]:
    """Items that occur more than once, each listed once."""
    return [item for item, count in collections.Counter(iterable).items() if count > 1]


def flat_tensors(values: Any) -> list[popxl.Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(values, popxl.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [t for value in values for t in flat_tensors(value)]

"""Rotary positions: pairs of features turn by angles that grow with the position.

D features of a head that turn, P positions.
"""

import math

import numpy as np
import popxl
from popxl import Tensor

from popxl_gpt.config.schema import Model

Tables = tuple[Tensor, Tensor]
"""Sines and cosines of the angles of positions and pairs, [P, D/2] each."""


def rotary_tables(model: Model, positions: int, dtype: popxl.dtype) -> Tables:
    """The tables of the positions from 0 on, as constants of the current graph; yarn's are
    multiplied by its factor. Positions that the model does not have are there for padding.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.2.
    """
    turns, factor = speeds(model, min(positions, model.positions)), table_factor(model)
    angles = np.outer(np.arange(positions), turns)
    sin, cos = np.sin(angles) * factor, np.cos(angles) * factor
    return popxl.constant(sin, dtype, "sin"), popxl.constant(cos, dtype, "cos")


def speeds(model: Model, positions: int) -> np.ndarray:
    """Radians that pairs turn by per position, float64 [D/2], in a program of so many positions.

    Sources: Chen et al. 2023, arXiv:2306.15595, section 2.3 (linear); bloc97 and emozilla 2023, as
    in Peng et al. 2023, arXiv:2309.00071, section 3.1 and equation 13 (dynamic); section 3.2 of
    the same (yarn); Llama Team 2024, "Llama 3.1", `apply_scaling` (llama3).
    """
    kind, size, base = model.rotary_scaling, model.rotary_size, model.rotary_base
    factor, original = model.rotary_factor, model.rotary_original_positions or positions
    if kind == "dynamic":
        longer = max(positions, original) / original
        base *= (factor * longer - (factor - 1)) ** (size / (size - 2))
    plain = base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if kind in (None, "dynamic"):
        return plain
    kept = {"linear": _none_kept, "llama3": _kept_by_llama3, "yarn": _kept_by_yarn}[kind]
    share = kept(model, plain, original)
    return plain * (share + (1 - share) / factor)


def table_factor(model: Model) -> float:
    """What sines and cosines are multiplied by: 1 but for yarn.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.4, equation 22.
    """
    if model.rotary_scaling != "yarn":
        return 1.0
    given = model.rotary_attention_factor
    return 0.1 * math.log(max(model.rotary_factor, 1.0)) + 1.0 if given is None else given


def _none_kept(model: Model, plain: np.ndarray, original: int) -> np.ndarray:
    """The share of its speed that each pair keeps, [D/2]; others are divided by the factor."""
    return np.zeros(len(plain))


def _kept_by_llama3(model: Model, plain: np.ndarray, original: int) -> np.ndarray:
    """The share grows with the turns that a pair makes in the original positions."""
    slow, fast = model.rotary_slow_turns, model.rotary_fast_turns
    turns = original * plain / (2 * math.pi)
    return np.clip((turns - slow) / (fast - slow), 0.0, 1.0)


def _kept_by_yarn(model: Model, plain: np.ndarray, original: int) -> np.ndarray:
    """The share falls with the number of a pair, between two that turn so many times."""
    size, base = model.rotary_size, model.rotary_base

    def pair_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_of(model.rotary_fast_turns)), 0)
    last: float = min(math.ceil(pair_of(model.rotary_slow_turns)), size - 1)
    if last == first:
        last += 0.001
    return 1.0 - np.clip((np.arange(size // 2) - first) / (last - first), 0.0, 1.0)

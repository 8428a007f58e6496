"""Settings that stand for another one, which programs and files have in their place."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Shorthand:
    """A setting, and the one whose value it gives."""

    name: str
    stands_for: str
    value: Callable[[Values], Any]
    """The other setting's value, from the values of all settings."""
    is_of_steps: bool
    """Whether it needs the number of steps, which `epochs` and `--minutes` leave open."""


def _batch(values: Values) -> Any:
    sizes = ("gradient_accumulation_steps", "micro_batch_size", "data_parallel")
    return math.prod(values[name] for name in sizes)


def _warmup(values: Values) -> Any:
    share = values["warmup_proportion"] * values["steps"]
    return math.ceil(round(share, 6))  # 0.07 * 100 is a little more than 7


SHORTHANDS = (
    Shorthand("gradient_accumulation_steps", "global_batch_size", _batch, False),
    Shorthand("warmup_proportion", "warmup_steps", _warmup, True),
)
EPOCHS = "epochs"
"""The one that takes the training data to replace by `steps`."""
NAMES = (*(shorthand.name for shorthand in SHORTHANDS), EPOCHS)
PAIRS = (*((each.name, each.stands_for) for each in SHORTHANDS), (EPOCHS, "steps"))
"""Each with what it stands for."""


def without_shorthands(values: Values, above: Set[str], below: Set[str]) -> dict[str, Any]:
    """Values with each shorthand replaced by what it stands for, and itself none. `epochs`, and
    what needs the steps that follow from it, stay.

    Args:
        above: names of settings that a command line gives. They win over those below.
        below: names of settings that a file gives. They win over defaults.
    Raises:
        ValueError: a shorthand and what it stands for are given in one place; lists each.
    """
    found, problems = dict(values), []
    for name, stands_for in PAIRS:
        if found[name] is None:
            continue
        for given in (above, below):
            if stands_for in given and name not in given:
                found[name] = None
                break
            if name in given:
                if stands_for in given:
                    problems.append(
                        f"{name}: got it with {stands_for}, in whose place it stands; expected one "
                        "of them. Leave one out."
                    )
                break
    for each in SHORTHANDS:
        is_ready = found[EPOCHS] is None or not each.is_of_steps
        if found[each.name] is not None and found["minutes"] is not None and each.is_of_steps:
            problems.append(_with_minutes(each.name, f"--{each.stands_for}"))
        elif found[each.name] is not None and is_ready:
            found[each.stands_for], found[each.name] = each.value(found), None
    if found[EPOCHS] is not None and found["minutes"] is not None:
        problems.append(_with_minutes(EPOCHS, "one of the two"))
    if problems:
        raise ValueError(problems)
    return found


def without_replaced(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Sections without the settings in whose place those above have a shorthand, or what one stands
    for.
    """
    sections = [section for section in above.values() if isinstance(section, Mapping)]
    given = {name for each in sections for name, value in each.items() if value is not None}
    replaced = {one for pair in PAIRS for one, other in (pair, pair[::-1]) if other in given}
    return {
        key: {name: section[name] for name in section if name not in replaced}
        if isinstance(section, Mapping)
        else section
        for key, section in below.items()
    }


def _with_minutes(name: str, expected: str) -> str:
    return (
        f"{name}: got it with minutes, after which a run ends whatever its steps; expected "
        f"{expected}. Leave --{name} out."
    )

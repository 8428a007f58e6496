"""The check of a whole configuration: values, limits and rules. Problems are reported all at once,
with fixes.
"""

from collections.abc import Mapping, Set
from typing import Any

from popxl_gpt.config.leaves import flatten, leaves
from popxl_gpt.config.schema import RULES, Config
from popxl_gpt.utils.errors import ConfigError


def validate(config: Config, *, replicas: int | None = None) -> None:
    """Check the values and combinations of a configuration.

    Args:
        replicas: number of replicas that were started, where a launcher started them.
    Raises:
        ConfigError: if anything is wrong; lists every problem.
    """
    values, problems, bad = check_values(flatten(config))
    problems += combination_problems(values, bad, replicas)
    if problems:
        raise ConfigError(problems)


def check_values(
    values: Mapping[str, Any], record: type = Config
) -> tuple[dict[str, Any], list[str], frozenset[str]]:
    """Check each leaf by itself.

    Args:
        values: values of leaves of the record, by name.
    Returns:
        the values in their final types, with the default for each that is wrong; the messages about
        those that are wrong; and their names.
    """
    found, problems, bad = {}, [], set()
    for leaf in (leaf for leaf in leaves(record) if leaf.name in values):
        try:
            found[leaf.name] = leaf.check(values[leaf.name])
        except ValueError as error:
            found[leaf.name] = leaf.default
            problems.append(str(error))
            bad.add(leaf.name)
    return found, problems, frozenset(bad)


def checked(
    record: type, values: Mapping[str, Any], where: str = "configuration"
) -> dict[str, Any]:
    """The values of some of a record's settings, by name, in their final types.

    Raises:
        ConfigError: a value is of another type or out of range; lists every problem.
    """
    found, problems, _ = check_values(values, record)
    if problems:
        raise ConfigError(problems, where)
    return found


def combination_problems(
    values: Mapping[str, Any], bad: Set[str], replicas: int | None = None
) -> list[str]:
    """Messages about values that are beyond any run, and about combinations of leaves that are each
    fine by themselves; `bad` ones are not.
    """
    large = [leaf for leaf in leaves() if leaf.is_beyond(values[leaf.name])]
    found: list[str | None] = [
        f"{leaf.name}: got {values[leaf.name]}; expected at most {leaf.largest}. Lower it."
        for leaf in large
        if leaf.name not in bad
    ]
    wrong = {*bad, *(leaf.name for leaf in large)}
    looked_at = {**values, "replicas": replicas}
    found += [rule.problem(looked_at) for rule in RULES if wrong.isdisjoint(rule.settings)]
    return [problem for problem in found if problem is not None]

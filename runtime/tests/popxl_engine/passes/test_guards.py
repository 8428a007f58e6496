"""The guards of passes, without each of which a pass gives wrong programs: guards.json names one
for each.

It gives a program for each guard that is "shown": the name of one in `near_misses`, or a scene of
`pass_programs` as [pattern, type, where it stands, kind, place, which, other]. What no program can
show stands under the reason for that. `PYTHONPATH=runtime python runtime/tests/find_guards.py` finds programs for new
guards.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.guards import MODULES, guards_of, take_out
from helpers.near_misses import NEAR_MISSES
from helpers.pass_checks import Checker, Failure
from helpers.pass_programs import Build, Perturbation, Program, Scene

TABLE = json.loads(Path(__file__).with_name("guards.json").read_text())
SHOWN: dict[tuple[str, str], str | list[Any]] = {
    (module, guard): program
    for module, programs in TABLE["shown"].items()
    for guard, program in programs.items()
}
NOT_SHOWN: dict[str, dict[str, list[str]]] = TABLE["not shown"]


def program_of(given: str | list[Any]) -> Build | Program:
    """A program of the table."""
    if isinstance(given, str):
        return NEAR_MISSES[given]
    name, dtype, wrap, *perturbation = given
    return (Scene(name, dtype, wrap, (Perturbation(*perturbation),) if perturbation else ()),)


@pytest.mark.slow
@pytest.mark.parametrize("module, guard", SHOWN, ids=str)
def test_without_a_guard_a_program_is_wrong(module: str, guard: str, monkeypatch: Any) -> None:
    checker = Checker(program_of(SHOWN[module, guard]))
    checker.check_all()
    take_out(module, guard, monkeypatch.setattr)
    with pytest.raises(Failure):
        checker.check_all()


def test_every_guard_is_shown_or_it_is_said_why_not() -> None:
    said = [(m, g) for guards in NOT_SHOWN.values() for m in guards for g in guards[m]]
    assert len(said) == len(set(said)) and not {*said} & {*SHOWN}
    found = {(module, guard) for module in MODULES for guard in guards_of(module)}
    assert {*said, *SHOWN} == found, (
        "PYTHONPATH=runtime python runtime/tests/find_guards.py looks for programs"
    )

"""Prints a program for guards.json for each guard of a pass that has no line there."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.guards import MODULES, guards_of, take_out
from helpers.near_misses import NEAR_MISSES
from helpers.pass_checks import Checker, Failure
from helpers.pass_programs import random_program

TABLE = Path(__file__).parent / "popxl_engine" / "passes" / "guards.json"
SEEDS = 2000


def candidates() -> Iterator[tuple[Any, Checker]]:
    """(what stands in guards.json for it, a program)."""
    for name, build in NEAR_MISSES.items():
        yield name, Checker(build)
    for seed in range(SEEDS):
        scene, *others = random_program(seed)
        if not others and len(scene.perturbations) < 2:
            disturbed = [v for p in scene.perturbations for v in vars(p).values()]
            yield [scene.name, scene.dtype, scene.wrap, *disturbed], Checker((scene,))


def shows(checker: Checker, module: str, guard: str) -> bool:
    """Whether a program is wrong without a guard."""
    with pytest.MonkeyPatch.context() as patch:
        take_out(module, guard, patch.setattr)
        try:
            checker.check_all()
        except Failure:
            return True
    return False


def main() -> int:
    """1 where no program shows some guard."""
    table = json.loads(TABLE.read_text())
    known = [(m, g) for m, programs in table["shown"].items() for g in programs]
    known += [(m, g) for of in table["not shown"].values() for m, gs in of.items() for g in gs]
    found = {(m, g) for m in MODULES for g in guards_of(m)}
    for module, guard in sorted({*known} - found):
        print(f"{module} has no {guard!r} any more")
    left = sorted(found - {*known})
    for entry, checker in candidates() if left else ():
        for module, guard in [pair for pair in left if shows(checker, *pair)]:
            left.remove((module, guard))
            print(f"{module}: {json.dumps(guard)}: {json.dumps(entry)}", flush=True)
    for module, guard in left:
        print(f"{module}: no program shows {guard!r}: add one to near_misses.py, or delete it")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())

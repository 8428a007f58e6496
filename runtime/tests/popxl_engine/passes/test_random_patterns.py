"""Random programs through passes: with all, with each alone and with each left out they give the
interpreter's numbers.
"""

from collections import Counter
from collections.abc import Callable

import pytest
from helpers.near_misses import NEAR_MISSES
from helpers.pass_checks import NAMES, Checker, Failure, shrink, why_not
from helpers.pass_programs import PATTERNS, Perturbation, Program, Scene, random_program

SEEDS = 60
"""Seeds of each part of the corpus: two or three programs for each pattern."""


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_programs_are_right_with_all_passes_each_alone_and_each_left_out(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    runs = 0
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        checker = Checker(random_program(seed))
        try:
            checker.check()
        except Failure as failure:
            least = shrink(checker.program, lambda each: why_not(each) is not None)
            pytest.fail(f"seed {seed}: {failure}\n{least}")
        runs += checker.ran
    record_property("cases", f"{SEEDS} random programs of passes' patterns in {runs} compilations")


ONCE_WRONG: list[Program] = [
    # two views of one operand had one name
    (
        Scene(
            "bias first",
            "float32",
            "main",
            (Perturbation("permuted twice"), Perturbation("operand twice", which=9)),
        ),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("program", ONCE_WRONG, ids=str)
def test_programs_that_were_wrong_are_right(program: Program) -> None:
    Checker(program).check()


ONCE_TAKEN = (
    "transposed: of a factor that stays",
    "sum: over columns of a square",
    "loop: counted in a loop first",
    "adam: a weight of float64",
    "attention: scaled by an array",
)
"""What passes took for their pattern, and made wrong programs of."""


@pytest.mark.parametrize("name", ONCE_TAKEN)
def test_programs_that_were_taken_for_a_pattern_are_right(name: str) -> None:
    Checker(NEAR_MISSES[name]).check_all()


@pytest.mark.slow
def test_every_pass_changes_some_pattern() -> None:
    fired: Counter[str] = Counter()
    for name, pattern in PATTERNS.items():
        fired += Checker((Scene(name, pattern.dtypes[-1].name, "main"),)).check_all()
    assert NAMES - {*fired} == set()


def test_a_program_that_fails_is_shrunk_to_what_fails() -> None:
    program = random_program(next(s for s in range(99) if len(random_program(s)) == 2))
    name = program[1].name
    least = shrink(program, lambda each: any(scene.name == name for scene in each))
    assert [(s.name, s.wrap, s.perturbations) for s in least] == [(name, "main", ())]

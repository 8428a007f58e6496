"""The programs in examples/ print what the guide shows, each below its name."""

import re
import runpy
from pathlib import Path

import pytest
from helpers.quick import cases

RUNTIME = Path(__file__).parents[2]
EXAMPLES = sorted((RUNTIME / "examples").glob("*.py"))
GUIDE = (RUNTIME.parent / "docs/popxl.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
TRAINED_LONG = dict.fromkeys(
    ("bert_encoder.py", "custom_optimizer.py", "mnist_data_parallel.py", "t5.py"), 0.1
)
"""Relative difference of numbers, where training multiplies the rounding errors of another
machine.
"""

LONG = (
    *TRAINED_LONG,
    "llama.py",
    "phased_execution.py",
    "pipelining.py",
    "tensor_parallel_inference.py",
)
"""Examples that are no quick checks."""


def shown(name: str) -> str:
    """The output in the guide."""
    found = re.findall(
        rf"^`runtime/examples/{name}`\.(?:(?!^`runtime/examples/).)*?^```text\n(.*?)^```$",
        GUIDE,
        re.DOTALL | re.M,
    )
    assert len(found) == 1, (
        f"{name}: got {len(found)} outputs in docs/popxl.md; expected one, below its name"
    )
    return found[0]


def values(line: str) -> "list[float]":
    return [float(number) for number in NUMBER.findall(line)]


@pytest.mark.parametrize(
    "path", cases(EXAMPLES, lambda path: path.name not in LONG, [p.stem for p in EXAMPLES])
)
def test_an_example_prints_what_the_guide_shows(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    for got, expected in zip(printed.splitlines(), shown(path.name).splitlines(), strict=True):
        assert NUMBER.sub("#", got).split() == NUMBER.sub("#", expected).split(), (
            f"printed:\n{printed}"
        )
        decimals = max((len(number.partition(".")[2]) for number in NUMBER.findall(got)), default=0)
        slack = 1.01 * 10.0**-decimals if decimals else 0  # one in the last digit
        wanted = pytest.approx(values(expected), rel=TRAINED_LONG.get(path.name, 1e-12), abs=slack)
        assert values(got) == wanted, f"printed:\n{printed}"


def test_the_guide_shows_every_example_and_no_other():
    named = re.findall(r"^`runtime/examples/(\w+\.py)`\.", GUIDE, re.MULTILINE)
    assert sorted(named) == [path.name for path in EXAMPLES]
    assert set(TRAINED_LONG) <= {path.name for path in EXAMPLES}

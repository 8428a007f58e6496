"""What the parts of this project cost: a table of cases, each timed in rounds, in turn with what it
is compared with.

    python benchmarks/own.py                               # all, as far as there is what they need
    python benchmarks/own.py saving profiling --check      # some groups
    python benchmarks/own.py preparing --workers 1 --rounds 2
    python benchmarks/own.py overhead --cases start

    attention   attention to 16,384 tokens, forward and backward, beside PyTorch's; one with a
                window of 1,024 beside that
    auto        what --auto chooses, beside the best of all ways to execute three small models
    bert        a training step of the runtime's example beside Hugging Face's BERT
    building    building a program, differentiating it, recomputing and compiling, by its size: an
                op of a program beside an op of the next smaller one
    loading     what a program waits for batches of prepared files that takes --rate tokens a
                second
    overhead    an op of a compiled program beside PyTorch; building 96 layers; the first step of
                preset demo from the start of the process, without kernels and with cached ones
    preparing   text to tokens on the disk, beside datasets.map of Hugging Face, with tiktoken in
                both where we use it, and the library tokenizers alone, which keeps nothing
    profiling   a step that --profile records, beside one that it does not
    saving      a checkpoint: what it costs while training goes on, what of that comes before the
                next step, and one that is waited for; the bar is a share of the time in between

Models are on one replica. Each figure is by the processors' time and by the clock. Bars are for one
of them: other work on a machine distorts processor time least.
"""

import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402

from benchmarks import own_attention, own_auto, own_bert, own_data, own_programs, own_steps  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    CHECK,
    Arguments,
    Figures,
    Flags,
    Missing,
    ended,
    flag,
    make_parser,
    one_of,
    outcome,
    script,
    table,
)
from benchmarks.own_cases import Case  # noqa: E402

CASES = (
    *own_attention.CASES,
    *own_auto.CASES,
    *own_bert.CASES,
    *own_programs.CASES,
    *own_data.CASES,
    *own_steps.CASES,
)
GROUPS = sorted({case.name.partition(",")[0] for case in CASES})
CLOCKS = ("clock", "processor")
HEADERS = ("case", "processor", "clock", "beside", "clock", "compared", "clock", "bar", "verdict")
FLAGS: Flags = {
    "groups": {"nargs": "*", "type": one_of(GROUPS), "help": f"some of {', '.join(GROUPS)}"},
    "--cases": flag("", "only those with this in their names"),
    "--rounds": {
        "type": int,
        "help": "measured, none before them; default: as many as a case wants",
    },
    "--folder": {"type": Path, "help": "for what is written; default: a temporary folder"},
    **own_auto.FLAGS,
    **own_data.FLAGS,
    **CHECK,
}


def measured(case: Case, arguments: Arguments) -> Figures:
    """The seconds of a case and of what stands beside it, by the wall and by processors; how they
    compare, in its unit; and the verdict.
    """
    ways = {"timed": case.timed} | ({"beside": case.beside} if case.beside else {})
    rounds: dict[str, list] = {name: [] for name in ways}
    warmup = 0 if arguments.rounds else case.warmup
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        ready = case.ready(arguments, Path(folder))
        for number in range(warmup + (arguments.rounds or case.rounds)):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                gc.collect()  # what others left is not its time
                seconds = np.broadcast_to(ways[name](ready), 2)
                if number >= warmup:
                    rounds[name].append(seconds)
    found = {name: case.kept(values, axis=0) for name, values in rounds.items()}
    if case.compared is not None:
        found["compared"] = case.compared.of(*(case.unit[1] * found[name] for name in ways))
    value = found.get("compared", case.unit[1] * found["timed"])[case.clock]
    figures = {name: list(map(float, clocks)) for name, clocks in found.items()}
    return {**figures, "met": bool(case.bar[0] <= value <= case.bar[1])}


def row(case: Case, figures: Figures) -> list[str]:
    """A line of the table: figures by processor time, and by the clock."""
    unit, count = case.unit
    cells = [case.name]
    for name, factor in (("timed", count), ("beside", count), ("compared", 1.0)):
        cells += [f"{factor * value:,.4g}" for value in reversed(figures.get(name, []))] or ["", ""]
    cells[1] += f" {unit}"
    cells[-1] += f" {case.compared.name}" if case.compared else ""
    low, high = case.bar
    bound = f">= {low:g}" if low > -np.inf else f"<= {high:,g}" if high < np.inf else ""
    verdict = (f"{bound} by the {CLOCKS[case.clock]}", outcome(figures["met"]))
    return [*cells, *(verdict if bound else ("", ""))]


def chosen(arguments: Arguments) -> Iterator[Case]:
    """The cases that are asked for."""
    for case in CASES:
        group, _, name = case.name.partition(", ")
        if group in (arguments.groups or GROUPS) and arguments.cases in name:
            yield case


def main() -> int:
    """Measure and print; exit code 0, with `--check` 1 when a bar is missed or nothing was
    measured, 2 where a group that was asked for misses what it needs.
    """
    arguments = make_parser(__doc__, FLAGS).parse_args()
    found, missing = {}, set()
    for case in chosen(arguments):
        try:
            found[case.name] = measured(case, arguments)
        except Missing as error:
            missing.add(str(error))
    print(table(HEADERS, [row(case, found[case.name]) for case in CASES if case.name in found]))
    print("".join(f"\n{words}" for words in sorted(missing)), file=sys.stderr)
    met = bool(found) and all(figures["met"] for figures in found.values())
    code = ended("own", arguments, met=met, cases=found)
    return 2 if missing and arguments.groups else code


if __name__ == "__main__":
    script(main)

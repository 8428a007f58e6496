"""Spends time on tortures, evenly, and tells what came out."""

import itertools
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.application import Workshop
from tests.torture.judge import Broken
from tests.torture.torture import Torture


@dataclass
class Tally:
    """What came out of the trials of one kind."""

    torture: Torture
    is_verbose: bool = False
    """Whether trials that break nothing are told, too."""
    cases: "int | None" = None
    trials: int = 0
    seconds: float = 0.0
    broken: "list[dict[str, object]]" = field(default_factory=list)

    def record(self) -> "dict[str, object]":
        """As JSON has it."""
        return {
            "name": self.torture.name, "promise": self.torture.promise, "trials": self.trials, "cases": self.cases,
            "seconds": round(self.seconds, 1), "broken": self.broken,
        }  # fmt: skip


def one_trial(tally: Tally, case: int, shop: Workshop) -> None:
    """Do the trial of a case, count it, and print a line where a promise was broken."""
    begin, name = time.monotonic(), tally.torture.name
    try:
        told, reason = tally.torture.trial(case, shop), None
    except Broken as error:
        reason = str(error)
    # of the torture itself, or of the product in this process: both are to be looked at
    except Exception as error:
        reason = f"unexpected {error!r}"
        traceback.print_exc()
    finally:
        shop.sweep()
    seconds = time.monotonic() - begin
    tally.trials += 1
    tally.seconds += seconds
    if reason is None:
        if tally.is_verbose:
            print(f"  {name} {case}: {told} ({seconds:.1f} s)", flush=True)
        return
    again = f"python -m tests.torture --kind {name} --case {case}"
    tally.broken.append({"case": case, "reason": reason, "again": again})
    print(f"BROKEN {name} {case}: {reason}\n    again: {again}", flush=True)


def order(tally: Tally, shop: Workshop, choice: random.Random) -> Iterator[int]:
    """The cases of a kind in the order of their trials: each once where they are limited, else
    without end.
    """
    if tally.torture.cases is None:
        while True:
            yield choice.randrange(2**32)
    tally.cases = tally.torture.cases(shop)
    yield from choice.sample(range(tally.cases), tally.cases)


def spend(
    minutes: float,
    kinds: "Sequence[Torture]",
    seed: int,
    shop: Workshop,
    *,
    is_full: bool,
    is_verbose: bool = False,
    trials: int | None = None,
) -> "list[Tally]":
    """Try kinds in turn, the one with the least time first, until the time is spent or Ctrl-C.

    Args:
        is_full: afterwards try what is left of the kinds whose cases are limited.
        trials: try so many cases of each kind, however long it takes.
    """
    tallies = [Tally(kind, is_verbose) for kind in kinds]
    left = {
        tally.torture.name: order(tally, shop, random.Random(f"{seed} {tally.torture.name}"))
        for tally in tallies
    }
    if trials is not None:
        left = {name: itertools.islice(cases, trials) for name, cases in left.items()}
    seconds = 60 * minutes if trials is None else math.inf
    until, stopped = time.monotonic() + seconds, False
    while left and not stopped:
        if time.monotonic() > until:
            for tally in tallies:
                if tally.torture.name in left and (not is_full or tally.torture.cases is None):
                    del left[tally.torture.name]
            if not left:
                break
        tally = min(
            (tally for tally in tallies if tally.torture.name in left),
            key=lambda tally: tally.seconds,
        )
        begin = time.monotonic()
        try:
            case = next(left[tally.torture.name])
            tally.seconds += time.monotonic() - begin
            one_trial(tally, case, shop)
        except StopIteration:
            del left[tally.torture.name]
        except KeyboardInterrupt:
            stopped = True
    return tallies


def table(tallies: "Sequence[Tally]") -> str:
    """What came out, a line for each kind."""
    lines = [f"{'torture':<14}{'trials':>8}{'of':>9}{'broken':>8}{'time':>9}  promise"]
    for tally in tallies:
        share = "-" if tally.cases is None else f"{tally.cases}"
        numbers = f"{tally.trials:>8}{share:>9}{len(tally.broken):>8}{tally.seconds:>7.0f} s"
        lines.append(f"{tally.torture.name:<14}{numbers}  {tally.torture.promise}")
    return "\n".join(lines)


def report(tallies: "Sequence[Tally]", seed: int | None, path: Path | None) -> int:
    """Print the table, write JSON, and return the exit code: 1 where a promise was broken."""
    broken = sum(len(tally.broken) for tally in tallies)
    print(f"\n{table(tallies)}\n")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"seed": seed, "broken": broken, "tortures": [tally.record() for tally in tallies]}
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"written to {path}")
    for tally in tallies:
        for found in tally.broken:
            print(
                f"BROKEN {tally.torture.name} {found['case']}: {found['reason']}", file=sys.stderr
            )
    return 1 if broken else 0

"""`make fuzz`: random programs of passes' patterns, by the interpreter and by the compiler with every
choice of passes, for some minutes.
"""

import argparse
import sys
import time
from collections import Counter

from helpers.near_misses import NEAR_MISSES
from helpers.pass_checks import NAMES, Checker, Failure, shrink, why_not
from helpers.pass_programs import random_program


def main() -> int:
    """1 where a program has other numbers, which is printed as small as it gets."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time to spend")
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() // 10**6 % 10**9, help="of the first program"
    )
    given = parser.parse_args()
    seed, runs = given.seed, 0
    fired: Counter[str] = Counter()
    for name, build in NEAR_MISSES.items():
        try:
            Checker(build).check(is_thorough=True)
        except Failure as failure:
            print(f"{name}: {failure}", flush=True)
            return 1
    print(f"{len(NEAR_MISSES)} near misses are right.")
    end = time.monotonic() + 60 * given.minutes
    print(f"{given.minutes:g} minutes of random programs; --seed {seed}", flush=True)
    while time.monotonic() < end:
        checker = Checker(random_program(seed))
        try:
            fired += checker.check(is_thorough=True)
        except Failure as failure:
            print(f"--seed {seed} fails: {failure}", flush=True)
            least = shrink(checker.program, lambda each: why_not(each) is not None)
            print(f"The smallest program that fails, {why_not(least)}:\n{least}")
            return 1
        runs += checker.ran
        seed += 1
    print(f"{seed - given.seed} programs, {runs} compilations; all are right. Passes changed:")
    for name in sorted(NAMES):
        print(f"  {fired[name]:6d} times {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

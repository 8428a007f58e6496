"""`python -m tests.torture --minutes 10`: tortures for a while. `--kind NAME --case N` repeats one
trial.
"""

import argparse
import os
import random
import signal
import sys
from pathlib import Path

from tests.torture.application import Workshop
from tests.torture.kinds import KINDS
from tests.torture.runner import Tally, one_trial, report, spend

LONG_MINUTES = 120
"""From this budget on trials whose length is a choice are the long ones."""


def main() -> int:
    names = [kind.name for kind in KINDS]
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time to spend, over all kinds")
    parser.add_argument(
        "--trials", type=int, help="so many trials of each kind, however long it takes"
    )
    parser.add_argument(
        "--seed", type=int, help="decides the cases that are tried; a random one by default"
    )
    parser.add_argument(
        "--kind", choices=names, action="append", help="only this kind; may be given again"
    )
    parser.add_argument("--case", type=int, help="only this case, of one kind")
    parser.add_argument("--json", type=Path, help="file for what came out")
    parser.add_argument(
        "--full", action="store_true", default=os.environ.get("FULL") == "1",
        help="every case where their number is limited, however long it takes (also with FULL=1)",
    )  # fmt: skip
    parser.add_argument(
        "--verbose", action="store_true", help="a line for each trial, not only for broken promises"
    )
    given = parser.parse_args()
    kinds = [kind for kind in KINDS if given.kind is None or kind.name in given.kind]
    if given.case is not None and len(kinds) != 1:
        parser.error("--case: give one --kind, too")
    # so that no process and no file system stays behind
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # which runs would ignore as well
    with Workshop(is_long=given.full or given.minutes >= LONG_MINUTES) as shop:
        if given.case is not None:
            tally = Tally(kinds[0], is_verbose=True)
            one_trial(tally, given.case, shop)
            return report([tally], None, given.json)
        seed = random.randrange(2**32) if given.seed is None else given.seed
        length = f"{given.minutes:g} minutes" if given.trials is None else f"{given.trials} trials"
        names = ", ".join(kind.name for kind in kinds)
        print(f"{length} of torture: {names}; --seed {seed}", flush=True)
        tallies = spend(
            given.minutes, kinds, seed, shop, is_full=given.full, is_verbose=given.verbose, trials=given.trials
        )  # fmt: skip
        return report(tallies, seed, given.json)


if __name__ == "__main__":
    sys.exit(main())

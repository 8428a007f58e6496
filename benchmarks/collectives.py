"""Collectives between machines: the runtime's, and the same by Gloo, at shaped links.

    python benchmarks/collectives.py           # two and four machines, 1 and 10 Gb/s; needs root

Network namespaces play the machines (`played_machines.py`), each with one process of one thread.
The sizes are those of a layer of gpt3_2.7B_pod64, and small ones.

Gloo does what keeps the bits: it gathers, and each process adds by the fixed tree; large sums
exchange their pieces all to all, each process adds one, and the sums are gathered. The quicker way
counts, for each size. Results are compared, bit for bit. Ours and Gloo's take turns in the same
processes, and the least time of several rounds counts.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    CHECK,
    Arguments,
    Columns,
    Figures,
    Flags,
    ended,
    flag,
    make_parser,
    script,
    show,
)
from benchmarks.played_machines import can_play_machines, machines, outputs  # noqa: E402

BAR = 1.1
"""Our time over Gloo's, at most."""
INSTANCE = """import json, sys
from benchmarks.timed_collectives import run_instance
run_instance(json.loads(sys.argv[1]))"""
FLAGS: Flags = {
    "--processes": flag((2, 4), "machines, one process each", type=int, nargs="+"),
    "--gigabits": flag((1.0, 10.0), "of a link, each way", type=float, nargs="+"),
    "--rounds": flag(7, "of each, in turn; the least time counts"),
    "--seconds": flag(0.15, "of a round, at least"),
    **CHECK,
}


def measured(processes: int, gigabits: float, arguments: Arguments) -> list[Figures]:
    """Lines of the table: every case, beside the quickest way of Gloo."""
    options = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    with machines(processes, gigabits) as names, tempfile.TemporaryDirectory() as folder:
        options["store"] = f"{folder}/gloo"
        printed = outputs(names, ["-c", INSTANCE, json.dumps(options)])
    common = {"processes": processes, "gigabits": gigabits}
    return [common | json.loads(line) for line in printed[0].splitlines()]


COLUMNS: Columns = {
    "processes": "{processes}".format_map,
    "Gb/s": "{gigabits:g}".format_map,
    "collective": "{case}".format_map,
    "ours, ms": lambda figures: f"{1e3 * figures['seconds']:.2f}",
    "Gloo, ms": lambda figures: f"{1e3 * figures['gloo_seconds']:.2f}",
    "its way": "{gloo_way}".format_map,
    "ratio": "{ratio:.2f}x".format_map,
}


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed; 2 where this
    machine cannot play others.
    """
    arguments = make_parser(__doc__, FLAGS).parse_args()
    if not can_play_machines("collectives"):
        return 2
    found = [
        figures
        for gigabits in arguments.gigabits
        for processes in arguments.processes
        for figures in measured(processes, gigabits, arguments)
    ]
    show(COLUMNS, found)
    met = max(figures["ratio"] for figures in found) <= BAR
    bar = f"bar: at most {BAR}x Gloo's time"
    return ended("collectives", arguments, met=met, bar_text=bar, collectives=found)


if __name__ == "__main__":
    script(main)

"""Collectives between machines: the runtime's, and the same by Gloo, at shaped links.

    python benchmarks/collectives.py           # two and four machines, 1 and 10 Gb/s; needs root

Network namespaces play the machines. Each has one process of one thread, and a link to a switch
that lets so many bits a second through, either way (`tc qdisc ... tbf`). The sizes are those of a
layer of gpt3_2.7B_pod64, and small ones.

Gloo does what keeps the bits: it gathers, and each process adds by the fixed tree; large sums
exchange their pieces all to all, each process adds one, and the sums are gathered. The quicker way
counts, for each size. Results are compared, bit for bit. Ours and Gloo's take turns in the same
processes, and the least time of several rounds counts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (  # noqa: E402
    CHECK,
    ROOT,
    BenchmarkError,
    Figures,
    Flags,
    ended,
    flag,
    make_parser,
    outcome,
    script,
    table,
)

BAR = 1.1
"""Our time over Gloo's, at most."""
CABLE, SWITCH = "cable", "popxlswitch"
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
BURST = 128 * 1024
"""Bytes that a link lets through at once: two of the largest packets."""


def ip(*words: str) -> None:
    """A command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def can_play_machines(script: str) -> bool:
    """Whether namespaces and shaped links can be made here; if not, print what a script needs."""
    can = os.geteuid() == 0 and shutil.which("tc") is not None
    if not can:
        print(f"{script}: expected root, ip and tc. sudo apt install iproute2", file=sys.stderr)
    return can


@contextmanager
def machines(count: int, gigabits: float) -> Iterator[list[str]]:
    """Network namespaces 10.98.9.1 and on, each with a link to a switch, shaped at both ends."""
    names = [f"popxl{os.getpid()}_{n}" for n in range(count)]
    switch = f"popxl{os.getpid()}_switch"
    burst = str(max(BURST, int(gigabits * 1e9 / 8 * 1e-3)))  # bytes: of a millisecond
    limit = ["tbf", "rate", f"{gigabits:g}gbit", "burst", burst, "latency", "50ms"]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", SWITCH, "type", "bridge")
        ip("-n", switch, "link", "set", SWITCH, "up")
        for n, name in enumerate(names):
            port = f"port{n}"
            cable = ["link", "add", CABLE, "netns", name, "type", "veth"]
            ip(*cable, "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", SWITCH, "up")
            ip("-n", name, "addr", "add", f"10.98.9.{n + 1}/24", "dev", CABLE)
            for device in (CABLE, "lo"):
                ip("-n", name, "link", "set", device, "up")
            for at, device in ((name, CABLE), (switch, port)):
                shape = ["tc", "-n", at, "qdisc", "add", "dev", device, "root", *limit]
                subprocess.run(shape, check=True, capture_output=True, timeout=20)
        yield names
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"{' '.join(error.cmd)}: {error.stderr.decode()}") from None
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def outputs(names: Sequence[str], program: Sequence[str], **variables: str) -> list[str]:
    """What a program prints in each machine, as one run of as many processes of one thread."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(len(names)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.98.9.1",
        "MASTER_PORT": "29500",
        "POPDIST_SECRET": "of machines that are played",
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *program],
            cwd=ROOT,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(names)
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise BenchmarkError(f"{len(names)} processes of {' '.join(program)[:200]}: one failed")
    return printed


def measured(processes: int, gigabits: float, arguments: argparse.Namespace) -> list[Figures]:
    """Seconds of every case by every way."""
    with machines(processes, gigabits) as names, tempfile.TemporaryDirectory() as folder:
        options = {"store": f"{folder}/gloo", "rounds": arguments.rounds}
        options["seconds"] = arguments.seconds
        printed = outputs(names, ["-c", INSTANCE, json.dumps(options)])
    return [json.loads(line) for line in printed[0].splitlines()]


def figures_of(told: Mapping[str, Any], processes: int, gigabits: float) -> Figures:
    """One line of the table."""
    theirs = {name: told[name] for name in told if name not in ("case", "ours")}
    way = min(theirs, key=lambda name: theirs[name])
    return {
        "processes": processes,
        "gigabits": gigabits,
        "case": told["case"],
        "seconds": told["ours"],
        "gloo_seconds": theirs[way],
        "gloo_way": way,
        "ratio": told["ours"] / theirs[way],
    }


def row(figures: Figures) -> list[str]:
    """The same as text."""
    return [
        str(figures["processes"]),
        f"{figures['gigabits']:g}",
        figures["case"],
        f"{1e3 * figures['seconds']:.2f}",
        f"{1e3 * figures['gloo_seconds']:.2f}",
        figures["gloo_way"],
        f"{figures['ratio']:.2f}x",
    ]


HEADERS = ("processes", "Gb/s", "collective", "ours, ms", "Gloo, ms", "its way", "ratio")


def main() -> int:
    """Measure and print; exit code 0, or with `--check` 1 when the bar is missed; 2 where this
    machine cannot play others.
    """
    arguments = make_parser(__doc__, FLAGS).parse_args()
    if not can_play_machines("collectives"):
        return 2
    found: Sequence[Figures] = [
        figures_of(told, processes, gigabits)
        for gigabits in arguments.gigabits
        for processes in arguments.processes
        for told in measured(processes, gigabits, arguments)
    ]
    print(table(HEADERS, list(map(row, found))))
    met = max(figures["ratio"] for figures in found) <= BAR
    print(f"\nbar: at most {BAR}x Gloo's time: {outcome(met)}")
    return ended("collectives", arguments, met=met, collectives=found)


if __name__ == "__main__":
    script(main)

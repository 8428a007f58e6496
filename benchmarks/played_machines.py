"""Machines that network namespaces play, each with a link to a switch. A link lets so many bits a
second through, either way (`tc qdisc ... tbf`). Needs root.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.harness import ROOT, BenchmarkError

CABLE, SWITCH = "cable", "popxlswitch"
BURST = 128 * 1024
"""Bytes that a link lets through at once: two of the largest packets."""


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
    burst = max(BURST, int(gigabits * 1e9 / 8 * 1e-3))  # bytes: of a millisecond
    shape = f"root tbf rate {gigabits:g}gbit burst {burst} latency 50ms"
    commands = [f"ip netns add {name}" for name in (switch, *names)]
    commands.append(f"ip -n {switch} link add {SWITCH} up type bridge")
    for n, name in enumerate(names):
        port = f"port{n}"
        commands += [
            f"ip link add {CABLE} netns {name} type veth peer name {port} netns {switch}",
            f"ip -n {switch} link set {port} master {SWITCH} up",
            f"ip -n {name} addr add 10.98.9.{n + 1}/24 dev {CABLE}",
            *(f"ip -n {name} link set {device} up" for device in (CABLE, "lo")),
            f"tc -n {name} qdisc add dev {CABLE} {shape}",
            f"tc -n {switch} qdisc add dev {port} {shape}",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, timeout=20)
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

"""``poprun``: the command line that starts the instances of a run on this machine, by torchrun's
agent.

    poprun --num-replicas 8 --num-instances 4 python demo/pretraining.py --config tiny

An instance is a process; it holds replicas / instances replicas. Instances get torchrun's
environment, and the number of replicas, so that programs run under either launcher. On several
machines: the same command on each, with ``--nnodes``, ``--node-rank`` and the address of the first.
With ``--restarts N`` a failure starts all instances again, up to N times.
The agent is loaded, and torch with it, once the command line is right.
"""

import argparse
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from types import ModuleType

from poprun.cores import usable_cores
from poprun.environment import INTERFACE, IPUS, REPLICAS, SECONDS, TIMEOUT, USAGE_ERROR
from poprun.interfaces import interface_towards
from poprun.tasks import TaskError, several

GRACE_SECONDS = 60.0
"""Default of how long instances may take to finish when this process is asked to end."""
CPP_LOG = "TORCH_CPP_LOG_LEVEL"
LEAST = {
    "num_instances": 1,
    "nnodes": 1,
    "ipus_per_replica": 1,
    "timeout": 1,
    "num_replicas": 1,
    "restarts": 0,
    "grace": 0,
}
"""The least that options may be."""


class LaunchError(ValueError):
    """The command line asks for what cannot be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start, watch, and end the instances. Returns the exit code: that of the first that failed;
    128 + a signal.
    """
    options = parser().parse_args(arguments)
    try:
        check(options)
    except LaunchError as error:
        print(f"poprun: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    os.environ.update(environment(options))
    # Ctrl-C ends this process at once, until the agent starts instances
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    agent = _load_agent()
    machines = agent.Machines(
        options.nnodes,
        options.node_rank,
        local_instances(options),
        options.master_addr,
        options.master_port,
        options.num_replicas,
        options.restarts,
    )
    return int(agent.run(options.program, machines, options.grace))


def _load_agent() -> ModuleType:
    """Load the agent, and torch with it, which reads there that it is to keep its C++ stack
    traces.
    """
    is_ours = CPP_LOG not in os.environ and "LOGLEVEL" not in os.environ
    if is_ours:
        os.environ[CPP_LOG] = "FATAL"
    try:
        from poprun import agent  # a wrong command line is answered without torch

        return agent
    finally:
        if is_ours:
            del os.environ[CPP_LOG]  # of this process alone, not of instances


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        "poprun",
        description="Start a program in several processes that together run one Ir's replicas.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = found.add_argument
    add(
        "--num-replicas",
        type=int,
        metavar="N",
        help="replicas over all instances; default: one each",
    )
    add("--num-instances", type=int, default=1, metavar="N", help="processes over all machines")
    add(
        "--ipus-per-replica",
        type=int,
        default=1,
        metavar="N",
        help="virtual devices of each replica",
    )
    add("--nnodes", type=int, default=1, metavar="N", help="machines")
    add("--node-rank", type=int, default=0, metavar="I", help="which machine this is, from 0")
    add("--master-addr", metavar="HOST", help="address of machine 0; default: this machine")
    add(
        "--master-port",
        type=int,
        metavar="PORT",
        help="a free port there; default on one machine: found",
    )
    add("--rdzv-endpoint", metavar="HOST:PORT", help="both in one")
    add(
        "--timeout",
        type=int,
        metavar="S",
        help=f"seconds that a collective waits; default: {TIMEOUT} or {SECONDS}",
    )
    add(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="S",
        help="seconds to finish after Ctrl-C or SIGTERM",
    )
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often to start all instances again after one fails",
    )
    add(
        "program",
        nargs=argparse.REMAINDER,
        help="what to run, with its arguments: python script.py ...",
    )
    return found


def check(options: argparse.Namespace) -> None:
    """Fill in what follows from other options. LaunchError with what to change."""
    if options.program[:1] == ["--"]:
        options.program = options.program[1:]
    if not options.program:
        raise LaunchError(
            "got no program; expected one after the options: poprun --num-instances 2 python "
            "script.py."
        )
    if shutil.which(options.program[0]) is None:
        raise LaunchError(
            f"got program {options.program[0]!r}, which is not found; expected a command on "
            "the PATH."
        )
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value is not None and not value >= least:
            expected = "at least 1" if least else "0 or more"
            raise LaunchError(f"--{name.replace('_', '-')}: got {value}; expected {expected}.")
    instances = options.num_instances
    options.num_replicas = options.num_replicas or instances
    if options.num_replicas % instances:
        raise LaunchError(
            f"--num-replicas: got {options.num_replicas} for {instances} instances; expected a "
            "multiple of the instances. Use --num-replicas "
            f"{-(-options.num_replicas // instances) * instances}, or another number of instances."
        )
    if instances % options.nnodes:
        raise LaunchError(
            f"--num-instances: got {instances} on {options.nnodes} machines; expected a "
            "multiple of them."
        )
    if not 0 <= options.node_rank < options.nnodes:
        raise LaunchError(
            f"--node-rank: got {options.node_rank}; expected 0 to {options.nnodes - 1}."
        )
    try:
        task = several()
    except TaskError as error:
        raise LaunchError(str(error).removeprefix("popdist: ")) from None
    if task is not None and options.nnodes == 1:
        raise LaunchError(
            f"got {task}, each of which would start a run by itself; expected one poprun on a "
            f"machine. Leave poprun out, as {task.launcher} starts one run, or {task.launcher}; on "
            "several machines, give --nnodes, --node-rank and --rdzv-endpoint."
        )
    _check_address(options)


def _check_address(options: argparse.Namespace) -> None:
    if options.rdzv_endpoint:
        host, _, port = options.rdzv_endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise LaunchError(
                f"--rdzv-endpoint: got {options.rdzv_endpoint!r}; expected HOST:PORT."
            )
        options.master_addr, options.master_port = host, int(port)
    if options.nnodes > 1 and (options.master_addr is None or options.master_port is None):
        raise LaunchError(
            f"got {options.nnodes} machines without the first one's address; expected "
            "--rdzv-endpoint HOST:PORT, the same on all."
        )
    options.master_addr = (options.master_addr or "127.0.0.1").strip("[]")  # those of IPv6
    if options.master_port is None:
        options.master_port = _free_port()
    elif not 0 < options.master_port < 2**16:
        raise LaunchError(f"--master-port: got {options.master_port}; expected 1 to {2**16 - 1}.")
    elif options.node_rank == 0 and not _is_free(options.master_port):
        raise LaunchError(
            f"--master-port: got {options.master_port}, which is in use; expected a free port. "
            "Choose another, or leave it out on a single machine."
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # a port that was just closed is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def local_instances(options: argparse.Namespace) -> int:
    """Instances on this machine."""
    return int(options.num_instances // options.nnodes)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What all instances get beside what torchrun sets. Threads are divided evenly unless their
    number is set.
    """
    found = {REPLICAS: str(options.num_replicas), IPUS: str(options.ipus_per_replica)}
    if options.timeout is not None:
        found[TIMEOUT] = str(options.timeout)
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, usable_cores() // local_instances(options)))
    if (
        INTERFACE not in os.environ
        and (interface := interface_towards(options.master_addr)) is not None
    ):
        found[INTERFACE] = interface
    return found

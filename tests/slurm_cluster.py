"""A cluster of Debian's Slurm on this machine: two nodes that are two daemons, for the time of a
block. Everything that it writes is in one folder; its ports are free ones of the loopback.
"""

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
"""Names of nodes are addresses, which need no one to resolve them."""
PACKAGES = "slurm-wlm munge"
SECONDS = 60.0
CREDENTIAL_SECONDS = 6
"""After which a job that is queued again may begin: those of its first start are over then."""
END_SECONDS = 15.0
"""For jobs to end that a test has left."""
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_seconds}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
# no control groups, which a container has not
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
FirstJobId={first_job}
ReturnToService=2
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={first} NodeAddr={first} NodeHostname=localhost Port={port_of_first} CPUs=16
NodeName={second} NodeAddr={second} NodeHostname=localhost Port={port_of_second} CPUs=16
PartitionName=plain Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""


class SlurmCluster:
    """Commands of Slurm for a cluster that runs."""

    def __init__(self, folder: Path, environment: "dict[str, str]"):
        self.folder, self.environment = folder, environment

    def run(
        self, *words: object, cwd: Path | None = None, check: bool = True, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        """A command, with further variables of the environment, to its end."""
        process = self.start(*words, cwd=cwd, **more)
        try:
            output, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert not check or process.returncode == 0, (words, output, errors)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(
        self, *words: object, cwd: Path | None = None, **more: str
    ) -> "subprocess.Popen[str]":
        """The same, begun."""
        return subprocess.Popen(
            [str(word) for word in words],
            env={**self.environment, **more},
            cwd=cwd or self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def submit(self, *words: object, cwd: Path | None = None, **more: str) -> int:
        """The number of a new job."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd, **more).stdout)

    def job(self, number: int) -> "dict[str, str]":
        """What Slurm says of a job, by name."""
        said = self.run("scontrol", "show", "job", number).stdout
        return dict(re.findall(r"(\w+)=(\S+)", said))

    def wait(self, number: int, *states: str, seconds: float = SECONDS) -> "dict[str, str]":
        """What Slurm says of a job once it is in one of these states."""
        until = time.monotonic() + seconds
        while (found := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, found
            time.sleep(0.05)
        return found


@contextmanager
def slurm_cluster(folder: Path, kill_wait: int = 30) -> Iterator[SlurmCluster]:
    """A cluster for the time of a block.

    Args:
        folder: its own, of this user alone, with a path of less than 80 characters.
        kill_wait: seconds that Slurm leaves a job that has to end.
    Raises:
        RuntimeError: its programs are missing or do not start; the message has what they said.
    """
    daemons = {name: _found(name) for name in ("munged", "slurmctld", "slurmd")}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    ports, configuration = _free_ports(3), folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder,
            user=getpass.getuser(),
            kill_wait=kill_wait,
            credential_seconds=CREDENTIAL_SECONDS,
            first_job=secrets.randbelow(9000) + 1,  # of which jobs make their ports
            controller=ports[0],
            first=NODES[0],
            second=NODES[1],
            port_of_first=ports[1],
            port_of_second=ports[2],
        )
    )
    given = ("SLURM", "SBATCH", "POPDIST_", "OMPI_", "PMI", "RANK", "WORLD_SIZE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    environment = {**plain, "SLURM_CONF": str(configuration)}
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    commands = [
        [daemons["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        [daemons["slurmctld"], "-D"],
        *([daemons["slurmd"], "-D", "-N", node] for node in NODES),
    ]
    cluster, running = SlurmCluster(folder, environment), []
    log = folder / "log"
    try:
        for command in commands:
            with log.open("a") as output:
                running.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )  # fmt: skip
                )
            if len(running) == 1:
                _wait(lambda: (folder / "munge.socket").exists(), running, log)
        _wait(lambda: _is_idle(cluster), running, log)
        yield cluster
    finally:
        if len(running) == len(commands):
            _cancel_all(cluster)
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number in processes_with("SLURM_CONF", str(configuration)):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _cancel_all(cluster: SlurmCluster) -> None:
    """Let no job be there, or go on for long."""
    cluster.run("scancel", "--user", getpass.getuser(), check=False)
    until = time.monotonic() + END_SECONDS
    while cluster.run("squeue", "-h", check=False).stdout.strip() and time.monotonic() < until:
        time.sleep(0.05)


def processes_with(name: str, value: str) -> "list[int]":
    """Those that were started with a variable of the environment."""
    mark, found = f"{name}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _found(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise RuntimeError(f"Slurm: got no {name}; expected it. Run: sudo apt install {PACKAGES}")
    return found


def _free_ports(count: int) -> "list[int]":
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return found


def _is_idle(cluster: SlurmCluster) -> bool:
    done = cluster.run("sinfo", "-h", "-p", "plain", "-t", "idle", "-o", "%D", check=False)
    return done.stdout.strip() == str(len(NODES))


def _wait(is_there, running: "list[subprocess.Popen[bytes]]", log: Path) -> None:
    until = time.monotonic() + SECONDS
    while not is_there():
        ended = [process.args for process in running if process.poll() is not None]
        if ended or time.monotonic() > until:
            raise RuntimeError(
                f"Slurm: got {'the end of ' + str(ended) if ended else 'no answer'}; expected two "
                f"idle nodes. Its daemons said:\n{log.read_text()}"
            )
        time.sleep(0.05)

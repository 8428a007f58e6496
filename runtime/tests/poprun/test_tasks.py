"""What a process takes itself for, by the variables that mpirun, srun and torchrun set, and programs
that mpirun starts on one machine and on two. Slurm's own part is tested under Slurm, in the
application's tests.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from shlex import join, quote

import popdist
import pytest
from helpers.processes import environment, free_port
from poprun import cores, launcher, rendezvous, tasks

GIVEN = ("OMPI_", "PMI", "MPI_", "SLURM_", "POPDIST_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
STEP = {
    "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_PROCID": 2, "SLURM_LOCALID": 0, "SLURM_NODEID": 1,
    "SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "rack[1-2]node[03-04,7],other", "SLURM_JOB_NODELIST": "first[1-4]",
}  # fmt: skip
ALL_ON_ONE = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "3", "SLURM_NODEID": 0}
IN_SCRIPT = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4, "SLURM_TASKS_PER_NODE": 4, "SLURM_PROCID": 0}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_RANK": 3, "OMPI_COMM_WORLD_LOCAL_SIZE": 4,
    "OMPI_COMM_WORLD_LOCAL_RANK": 3, "PMIX_RANK": 3, "PMIX_NAMESPACE": "9",
    "OMPI_MCA_orte_hnp_uri": "8.0;tcp://203.0.113.7,10.0.0.2:43;tcp6://[fd00::2]:58",
}  # fmt: skip
ON_TWO = {"OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": 1}
HYDRA = {"PMI_SIZE": 2, "PMI_RANK": 1, "MPI_LOCALNRANKS": 2, "MPI_LOCALRANKID": 1}
BY_HAND = {"MASTER_ADDR": "h", "MASTER_PORT": 1}
IS = {  # index, number, index here, number here; the first machine where they are several
    "Open MPI": (OPEN_MPI, (3, 4, 3, 4)),
    "Open MPI on two machines": ({**OPEN_MPI, **ON_TWO}, (3, 4, 1, 2, "203.0.113.7")),
    "Open MPI in a job": ({**STEP, **OPEN_MPI, **ON_TWO}, (3, 4, 1, 2, "first1")),
    "MPICH": (HYDRA, (1, 2, 1, 2)),
    "MPICH in a job": ({**IN_SCRIPT, **HYDRA}, (1, 2, 1, 2)),
    "MPICH in a step": ({**STEP, **HYDRA, "MPI_LOCALNRANKS": 1}, (1, 2, 1, 1, "first1")),
    "Slurm": ({**STEP, **ALL_ON_ONE}, (2, 3, 0, 3)),
    "Slurm on two nodes": (STEP, (2, 3, 0, 1, "rack1node03")),
    "Slurm with PMI": ({**STEP, "PMI_SIZE": 3, "PMI_JOBID": "7.0"}, (2, 3, 0, 1, "rack1node03")),
    "an address is given": ({**STEP, "MASTER_ADDR": "mine"}, (2, 3, 0, 1, "mine")),
    "an address of IPv6 is given": ({**STEP, "MASTER_ADDR": "[fd00::1]"}, (2, 3, 0, 1, "fd00::1")),
    "torchrun in a step": (
        {**STEP, **BY_HAND, "RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4},
        (5, 8, 1, 1, "h"),
    ),
    "what is set by hand, as the step says": (
        {**STEP, **BY_HAND, "RANK": 2, "WORLD_SIZE": 3}, (2, 3, 0, 1, "h")
    ),
}  # fmt: skip
ALONE = {
    "nothing": {},
    "Open MPI, one task": {"OMPI_COMM_WORLD_SIZE": 1, "OMPI_COMM_WORLD_LOCAL_SIZE": 1},
    "one of Open MPI's, whose daemons are several": {**STEP, "OMPI_COMM_WORLD_SIZE": 1},
    "MPICH, one task": {"PMI_SIZE": 1},
    "a script of Slurm": IN_SCRIPT,
    "one that was sent from within a step": {**STEP, **IN_SCRIPT},
    "and had PMI there": {**STEP, **IN_SCRIPT, "PMI_SIZE": 3, "PMI_JOBID": "6.0"},
    "a step of one task": {
        **STEP, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_TASKS_PER_NODE": 1, "SLURM_TASKS_PER_NODE": 1
    },
    "tasks that are to be runs of their own": {**OPEN_MPI, "RANK": 0, "WORLD_SIZE": 1},
}  # fmt: skip
REFUSED = {
    "two launchers": (
        {**OPEN_MPI, **HYDRA},
        r"got task 3 of 4 tasks of mpirun \(OMPI_COMM_WORLD_SIZE\) and task 1 of 2 tasks of mpirun "
        r"\(PMI_SIZE\); expected one launcher's. Unset",
    ),
    "all tasks with one number, by hand": (
        {**STEP, "RANK": 0, "WORLD_SIZE": 3},
        "got RANK=0 and WORLD_SIZE=3 in task 2 of 3 tasks of srun .* expected those of the task. Un",
    ),
    "PMIx alone": ({"PMIX_RANK": 1}, "got PMIX_RANK=1 without a number of tasks; expected both. S"),
    "half of Open MPI's": (
        {"OMPI_COMM_WORLD_SIZE": 4},
        "_WORLD_SIZE without OMPI_COMM_WORLD_RANK;",
    ),
    "half of MPICH's": ({"PMI_SIZE": 4}, "got PMI_SIZE without PMI_RANK; expected both"),
}
UNMET = {
    "MPICH on two machines": (
        {**HYDRA, "MPI_LOCALNRANKS": 1}, "those of other runs; .* Set MASTER_PORT .*, and MASTER_ADDR to",
    ),
    "MPICH on two machines, whose first is told": (
        {**HYDRA, "MPI_LOCALNRANKS": 1, "MASTER_ADDR": "h"}, "those of other runs; .* Set MASTER_PORT to one",
    ),
    "MPICH on two machines, with a port": (
        {**HYDRA, "MPI_LOCALNRANKS": 1, "MASTER_PORT": 1}, "no variable tells the first; .* Set MASTER_A",
    ),
    "MPICH on other nodes than the first of a job": (
        {**STEP, **HYDRA, "MPI_LOCALNRANKS": 1, "PMI_RANK": 0}, "task 0 is not on first1; .* Set MASTER_A",
    ),
    "mpirun where the first task is not": (
        {**OPEN_MPI, **ON_TWO, "OMPI_COMM_WORLD_RANK": 0}, "task 0 is not on 203.0.113.7; .* Set MASTER_A"
    ),
    "mpirun on other nodes than the first of a job": (
        {**STEP, **OPEN_MPI, **ON_TWO, "OMPI_COMM_WORLD_RANK": 0}, "task 0 is not on first1; .* Set MASTER_A"
    ),
}  # fmt: skip


@pytest.fixture
def variables(monkeypatch):
    """Sets an environment that has these of launchers, and no others."""
    monkeypatch.setattr(cores, "quotas", lambda: iter(()))  # whatever this machine has
    for name in [name for name in os.environ if name.startswith(GIVEN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("POPDIST_SECRET", "that of these tests")
    return lambda values: [monkeypatch.setenv(name, str(value)) for name, value in values.items()]


@pytest.mark.parametrize(("values", "expected"), IS.values(), ids=IS)
def test_a_task_is_found_by_its_launchers_variables(values, expected, variables):
    variables(values)
    index, count, index_here, here, *host = expected
    assert popdist.isPopdistEnvSet()
    assert (popdist.getInstanceIndex(), popdist.getNumInstances()) == (index, count)
    assert popdist.getNumTotalReplicas() == count
    assert (tasks.index_here(), tasks.count_here()) == (index_here, here)
    place = rendezvous.find(index)
    assert ([] if place.folder is not None else [place.address[0]]) == host
    assert rendezvous.is_on_one_machine() == (not host)


@pytest.mark.parametrize("values", ALONE.values(), ids=ALONE)
def test_a_process_that_is_the_only_one_is_no_task(values, variables):
    variables(values)
    popdist.init()
    assert (popdist.getInstanceIndex(), popdist.getNumInstances()) == (0, 1)
    assert tasks.several() is None and tasks.threads() is None


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED)
def test_variables_that_contradict_each_other_are_named(values, says, variables, capsys):
    variables(values)
    for ask in (popdist.isPopdistEnvSet, popdist.getNumInstances, popdist.init):
        with pytest.raises(RuntimeError, match=says):
            ask()
    assert launcher.main(["--num-instances", "2", sys.executable, "x.py"]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert (tasks.index_here(), tasks.threads()) == (0, None)


@pytest.mark.parametrize(("values", "says"), UNMET.values(), ids=UNMET)
def test_what_no_variable_tells_is_asked_for(values, says, variables):
    variables(values)
    with pytest.raises(RuntimeError, match=says):
        popdist.init()


@pytest.mark.parametrize(
    "launched", [{}, {**HYDRA, "MPI_LOCALNRANKS": 1}], ids=["srun", "MPICH in a step"]
)
def test_runs_have_ports_and_secrets_of_their_own(launched, variables):
    variables({**STEP, **launched})
    first = rendezvous.find(2)
    assert first == rendezvous.find(2) and first.secret != os.environ["POPDIST_SECRET"].encode()
    variables({"SLURM_STEP_ID": 1})
    second = rendezvous.find(2)
    assert first.address[1] != second.address[1] and first.secret != second.secret


def test_replicas_are_those_of_the_launcher_else_the_programs_else_one_each(variables, monkeypatch):
    monkeypatch.setattr(popdist.environment, "_expected", [])
    variables(HYDRA)
    popdist.environment.expect_replicas(6)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (6, 3)
    popdist.environment.expect_replicas(3)
    assert popdist.getNumTotalReplicas() == 2
    variables({"POPDIST_NUM_TOTAL_REPLICAS": 4})
    assert popdist.getNumTotalReplicas() == 4


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [
        ({"SLURM_CPUS_PER_TASK": 3}, 16, 3),
        ({"SLURM_CPUS_ON_NODE": 12}, 16, 4),
        ({"SLURM_CPUS_ON_NODE": 2}, 16, 1),
        ({"SLURM_CPUS_ON_NODE": 12}, 2, 2),
        ({"SLURM_CPUS_ON_NODE": 12, "OMP_NUM_THREADS": 5}, 16, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_TASKS_PER_NODE": "1(x3)"}, 16, None),
    ],
    ids=["told", "divided", "at least one", "bound to fewer", "set by hand", "one on each node"],
)
def test_tasks_of_srun_share_the_cores_of_their_node(given, own, expected, variables, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(own)))
    variables({**STEP, **ALL_ON_ONE, **given})
    assert tasks.threads() == expected


def test_tasks_of_srun_share_a_quota(variables, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(16)))
    variables({**STEP, **ALL_ON_ONE, "SLURM_CPUS_PER_TASK": 4})
    assert tasks.threads() == 4
    monkeypatch.setattr(cores, "quotas", lambda: iter([6]))
    assert tasks.threads() == 2


def test_tasks_of_mpirun_share_the_cores_of_what_started_them(variables, monkeypatch):
    bound = {0: set(range(8)), os.getppid(): set(range(8))}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda number: bound[number])
    variables(HYDRA)
    assert tasks.threads() == 4
    monkeypatch.setattr(cores, "quotas", lambda: iter([6]))
    assert tasks.threads() == 3
    bound[0] = {3}  # bound to it
    assert tasks.threads() == 1


def test_a_process_alone_has_threads_for_its_quota(variables, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(8)))
    variables({})
    assert tasks.threads() is None
    monkeypatch.setattr(cores, "quotas", lambda: iter([3]))
    assert tasks.threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert tasks.threads() is None


def test_one_poprun_on_each_machine_may_be_a_task_of_another_launcher(variables, capsys):
    variables(STEP)
    words = ["--nnodes", "3", "--num-instances", "3", "--rdzv-endpoint", "h:1", sys.executable]
    launcher.check(launcher.parser().parse_args([*words[:2], "--node-rank", "1", *words[2:]]))
    assert launcher.main(["--num-instances", "2", sys.executable, "x.py"]) == 2
    assert (
        "each of which would start a run by itself; expected one poprun" in capsys.readouterr().err
    )


MEETS = """import os, sys, popdist
from popdist import exchange
popdist.init()
with open(f"{sys.argv[1]}/{os.getpid()}", "w") as answer:  # mpirun splits and joins what is printed
    print(exchange.gather(popdist.getInstanceIndex()), end="", file=answer)
"""
OPEN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
NO_SSH = ["--mca", "plm", "isolated"]
"""Open MPI looks for it, on one machine, too."""
MPIRUN = {"Open MPI": [*OPEN, *NO_SSH], "MPICH": ["mpirun.mpich"]}


def answers(folder: Path) -> "list[str]":
    return [file.read_text() for file in folder.iterdir()]


def found(words: "list[str]") -> "list[str]":
    assert shutil.which(words[0]), "expected it. Run: sudo apt install openmpi-bin mpich"
    return words


@pytest.mark.multi
@pytest.mark.parametrize("mpirun", MPIRUN.values(), ids=MPIRUN)
def test_runs_of_mpirun_beside_each_other_meet_each_by_itself(mpirun, tmp_path):
    folders = [tmp_path / name for name in ("task", "task_of_a_shell")]
    asks = [[sys.executable, "-c", MEETS, folder] for folder in folders]
    in_shell = ["sh", "-c", f"{join(map(str, asks[1]))}; exit"]
    commands = [["-np", "2", *asks[0]], ["-np", "3", *in_shell]]
    for folder in folders:
        folder.mkdir()
    started = [subprocess.Popen([*found(mpirun), *words], env=environment()) for words in commands]
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    assert answers(folders[0]) == ["[0, 1]"] * 2
    assert answers(folders[1]) == ["[0, 1, 2]"] * 3


CLONE_NEWNET = 0x40000000
AGENT = """#!{python} -IS
import ctypes, os, sys
host = next(word for word in sys.argv[1:] if not word.startswith("-"))
name = {names}.get(host)
if name is not None:
    file = os.open("/run/netns/" + name, os.O_RDONLY)
    assert ctypes.CDLL(None).setns(file, {kind}) == 0
os.execvp("sh", ["sh", "-c", " ".join(sys.argv[sys.argv.index(host) + 1:])])
"""
"""A program in the place of ssh: HOST COMMAND, in the network namespace that is that host."""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_hosts(tmp_path):
    """Addresses of two network namespaces with a cable, and what runs a command in each; where those
    are not permitted, addresses of this machine.
    """
    names = {f"10.98.8.{n}": f"popdist{os.getpid()}{n}" for n in (1, 2)}
    try:
        for name in names.values():
            ip("netns", "add", name)
        first, second = names.values()
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for address, name in names.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("cable", "lo"):
                ip("-n", name, "link", "set", link, "up")
        hosts = list(names)
    except (OSError, subprocess.CalledProcessError):
        hosts = ["127.0.0.1", "127.0.0.2"]
    agent = tmp_path / "agent"
    agent.write_text(AGENT.format(python=sys.executable, names=names, kind=CLONE_NEWNET))
    agent.chmod(0o755)
    try:
        yield str(agent), hosts
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.mark.multi
@pytest.mark.parametrize("name", MPIRUN)
def test_mpirun_on_two_hosts_starts_processes_that_meet(name, two_hosts, tmp_path):
    agent, (first, second) = two_hosts
    words = {
        "Open MPI": [*found(OPEN), "--mca", "plm_rsh_agent", agent, "-x", "PYTHONPATH", "-x",
                     "POPDIST_SECRET", "-H"],
        "MPICH": [*found(["mpirun.mpich"]), "-launcher", "ssh", "-launcher-exec", agent,
                  "-genv", "MASTER_ADDR", first, "-genv", "MASTER_PORT", str(free_port()), "-hosts"],
    }[name]  # fmt: skip
    folder = tmp_path / "answers"
    folder.mkdir()
    words += [f"{first},{second}", "-np", "2", sys.executable, "-c", MEETS, str(folder)]
    done = subprocess.run(
        [agent, first, *map(quote, words)], env=environment(), capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert answers(folder) == ["[0, 1]"] * 2, done.stderr

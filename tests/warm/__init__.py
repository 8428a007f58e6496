"""A Python that has the large packages imported already, for tests that start programs.

`python()` names a command in place of `sys.executable`. Importing torch is half of what a short
program costs; this command has a server that did it once and forks for each program (`server.py`).
The fork gets the command's words, environment, folder, files and limits, signals to the command
go on to it, and the command ends as it does (`client.py`): `test_warm.py` compares both.
`launcher()` is one for `-m poprun`, and `python` takes other packages and fewer rights.

Our own modules are there, too, unless the program would find others of their names; and a program
that is at its end ends, without taking apart what it has.

Not for what a fork has from its server: its parent, group and terminal, memory, time to start, and
that its end is its own. So tests of Ctrl-C, of memory and of starts take `sys.executable`, as do
those of what a launcher does to its instances: to it, the command is the instance.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What the environment of a program must have."""
ROOT = HERE.parents[1]
OURS = (str(ROOT), str(ROOT / "runtime"))
PACKAGES = (
    "numpy", "torch", "torch._meta_registrations", "torch.export", "tokenizers", "yaml",
    *OURS, "popxl_engine.engine", "popxl_gpt.demo.pretraining",
)  # fmt: skip
"""What programs import, and where ours is."""
OF_LAUNCHER = (
    *(
        f"torch.distributed.elastic.{name}"
        for name in ("agent.server.local_elastic_agent", "multiprocessing", "rendezvous")
    ),
    *OURS,
    "poprun.agent",
    "poprun.launcher",
)
_servers: "dict[str, int]" = {}
"""The process of each command's server."""


def launcher() -> str:
    """The command for `-m poprun`, which gives torch this variable while it loads it."""
    return python(OF_LAUNCHER, variables=("TORCH_CPP_LOG_LEVEL=FATAL",))


def python(
    packages: "tuple[str, ...]" = PACKAGES,
    variables: "tuple[str, ...]" = (),
    before: "Callable[[], None] | None" = None,
) -> str:
    """The command. Its server starts with the first use, and ends with this process.

    Args:
        packages: what programs find imported; folders among them are where that is.
        variables: NAME=VALUE, set while these are imported and no longer.
        before: what the server's process does first, such as to give up rights. The command needs
            the same rights, or it runs an interpreter of its own.
    """
    return _started(packages, variables, before)


@functools.cache
def _started(
    packages: "tuple[str, ...]",
    variables: "tuple[str, ...]",
    before: "Callable[[], None] | None",
) -> str:
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address, command = Path(folder.name, "socket"), Path(folder.name, "python")
    call = f"import sys\nmain({sys.executable!r}, {str(address)!r}, sys.argv[1:])\n"
    command.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}\n\n{call}")
    command.chmod(0o755)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(address), *variables, *packages],
        stdin=subprocess.PIPE,  # whose end is the server's
        stdout=subprocess.PIPE,
        env={**environment, **ONE_THREAD},
        cwd=folder.name,
        preexec_fn=before,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    _servers[str(command)] = server.pid

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return str(command)


def seconds(command: str) -> "tuple[float, float]":
    """Processor time of a command's server itself, which is that of its imports and forks, and of
    the programs that it has run.
    """
    stat = Path(f"/proc/{_servers[command]}/stat").read_text().rpartition(")")[2].split()
    user, system, of_children, in_children = (
        int(n) / os.sysconf("SC_CLK_TCK") for n in stat[11:15]
    )
    return user + system, of_children + in_children


def with_children() -> "dict[str, str]":
    """An environment in which the command is what its programs take for `sys.executable`, too."""
    return {**os.environ, **ONE_THREAD, "WARM_PYTHON": python()}

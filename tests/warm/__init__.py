"""A Python that has the large packages imported already, for tests that start programs.

`python()` names a command in place of `sys.executable`. Importing torch is half of what a short
program costs; this command has a server that did it once and forks for each program (`server.py`).
The fork gets the command's words, environment, folder, files and limits, signals to the command
go on to it, and the command ends as it does (`client.py`): `test_warm.py` compares both.

Not for what a fork has from its server: its parent, group and terminal, memory, time to start. So
instances of a launcher, and tests of Ctrl-C, of memory and of starts take `sys.executable`.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What the environment of a program must have."""


@functools.cache
def python() -> str:
    """The command. Its server starts with the first use, and ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    address, command = Path(folder.name, "socket"), Path(folder.name, "python")
    call = f"import sys\nmain({sys.executable!r}, {str(address)!r}, sys.argv[1:])\n"
    command.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}\n\n{call}")
    command.chmod(0o755)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, str(HERE / "server.py"), str(address)],
        stdin=subprocess.PIPE,  # whose end is the server's
        stdout=subprocess.PIPE,
        env={**environment, **ONE_THREAD},
        cwd=folder.name,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.communicate()
        folder.cleanup()

    atexit.register(end)
    return str(command)


def with_children() -> "dict[str, str]":
    """An environment in which the command is what its programs take for `sys.executable`, too."""
    return {**os.environ, **ONE_THREAD, "WARM_PYTHON": python()}

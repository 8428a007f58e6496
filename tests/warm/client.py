"""What the command does: `main(PYTHON, ADDRESS, WORDS)`. Few imports, as each program pays for them."""

import marshal
import os
import resource
import signal
import socket

READ_AT_START = (
    "PYTHON", "LANG", "LC_", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TORCH_", "CUDA_", "TZ"
)  # fmt: skip
"""Variables that an interpreter and the packages read when they start. (How threads wait is nothing
to one thread.)
"""
READ_LATER = ("PYTHONPATH", "PYTHONFAULTHANDLER", "TORCH_NCCL_")
"""Those of them that the server sees to, and that nothing on processors reads."""
SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip


def rights() -> "list[str]":
    """What this process may do: users, groups and capabilities."""
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith(("Uid", "Gid", "Groups", "Cap"))]


def needs_its_own(words: "list[str]", server: "dict[str, str]", of_server: "list[str]") -> bool:
    """Whether these are not just a program, or environment or rights are not the server's."""

    def read(environment: "dict[str, str]") -> "dict[str, str]":
        found = {n: v for n, v in environment.items() if n.startswith(READ_AT_START)}
        return {n: v for n, v in found.items() if not n.startswith(READ_LATER)}

    is_program = bool(words) and (words[0] in ("-c", "-m") or os.path.isfile(words[0]))
    return not is_program or read(dict(os.environ)) != read(server) or rights() != of_server


def main(python: str, address: str, words: "list[str]") -> None:
    with open(f"{address}.server", "rb") as file:
        if needs_its_own(words, *marshal.load(file)):
            os.execv(python, [python, *words])
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {
        number: resource.getrlimit(number) for number in (getattr(resource, n) for n in names)
    }
    umask = os.umask(0)
    os.umask(umask)
    ignored = {int(n) for n in SIGNALS if signal.getsignal(n) == signal.SIG_IGN}
    request = marshal.dumps((words, dict(os.environ), os.getcwd(), umask, limits, ignored))
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(request)
    for number in SIGNALS:  # those that are ignored, too: the program may come to hear them
        signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
    answer = server.recv(4, socket.MSG_WAITALL)
    assert len(answer) == 4, "the server has ended before the program"
    status = int.from_bytes(answer, "big")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))

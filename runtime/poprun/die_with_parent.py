"""What `poprun` starts in a program's place: a process that ends with the launcher, and becomes the
program.

    python -I -S die_with_parent.py LAUNCHER PROGRAM [ARGUMENT ...]

LAUNCHER is the number of the process that starts this one. What the program starts ends with the
launcher, too: a process beside it sees to that, as the system does for the program alone.
"""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2), Linux: the signal that this process gets when its parent ends, however that ends."""
FOR_THE_PROGRAM = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
"""Signals that do not end what ends the program."""
PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Signals that the launcher passes on, and that a program ignores until it wants to hear them. They
are blocked when this process starts.
"""
IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")
CANNOT_START, NOT_FOUND = 126, 127
"""Exit codes, as of a shell: the system does not run the program; it, or what its first line names,
is not there.
"""


def main() -> None:
    """Become the program, or end where it does not start."""
    launcher, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        leave_watch(launcher)
    if os.getppid() != launcher:
        os._exit(1)  # it has ended already
    for name in PASSED_ON:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {getattr(signal, name) for name in PASSED_ON})
    for name in IGNORED_BY_PYTHON:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(
            f"poprun: got program {program[0]!r}, which does not start ({error.strerror}); "
            "expected one that the system can run. Check its first line (#!), and what that names.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_START)


def leave_watch(launcher: int) -> None:
    """Start a process that ends this one's group when the launcher ends. It is no child of the
    program.
    """
    try:
        end = os.pidfd_open(launcher)
    except OSError:
        return  # an old kernel, or the launcher has ended already
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    elif os.fork():
        os._exit(0)
    else:
        for name in FOR_THE_PROGRAM:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        os.closerange(0, end)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.poll()
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

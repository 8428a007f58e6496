"""What `poprun` starts in a program's place: a process that ends with the launcher, and becomes the program.

    python -I -S tether.py LAUNCHER PROGRAM [ARGUMENT ...]

LAUNCHER is the number of the process that starts this one.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2), Linux: the signal that this process gets when its parent ends, however that ends."""
IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")


def main() -> None:
    """Does not return."""
    launcher, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # it has ended already
    for name in IGNORED_BY_PYTHON:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()

"""Errors that are the user's to fix, and how an entry point reports them."""

import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2
SHOWN = 50
"""Problems that a message lists."""
DIVERGED_EXIT_CODE = 3
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing says where there is no more space."""


class UserError(ValueError):
    """Something the user gave is wrong: told in one message, without a traceback, with exit code 2."""


class DivergedError(ArithmeticError):
    """Training has come to numbers that are not finite: told in one message, without a traceback, with exit code 3."""


class ConfigError(UserError):
    """One or more problems in a configuration.

    Attributes:
        problems: one sentence each, in the order in which they were found.
    """

    def __init__(self, problems: Sequence[str], where: str = "configuration"):
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems[:SHOWN], start=1))
            more = "" if len(self.problems) <= SHOWN else f"\n  ... and {len(self.problems) - SHOWN} more."
            message = f"{where}: {len(self.problems)} problems.\n{lines}{more}"
        super().__init__(message)


def hear_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which scripts keep from it while they load their modules."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End an entry point without a traceback where the user can tell what happened.

    A `UserError` in the body becomes its message on stderr and exit code 2, as does a disk that is full where nothing
    nearer has said so. A `DivergedError` becomes exit code 3. Ctrl-C becomes exit code 130, and a reader of the output
    that went away (`... | head`) exit code 141, as shells report them. Every other error travels on.
    """
    hear_ctrl_c()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except UserError as error:
        _end(f"error: {error}", USER_ERROR_EXIT_CODE)
    except DivergedError as error:
        _end(f"diverged: {error}", DIVERGED_EXIT_CODE)
    except KeyboardInterrupt:
        _end("stopped.", 128 + signal.SIGINT)
    except BrokenPipeError:
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        where = error.filename or "output"
        _end(f"error: {where}: got '{error.strerror}'; expected space to write. Free some.", USER_ERROR_EXIT_CODE)


def _end(message: str, code: int) -> None:
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)


def _drop_output() -> None:
    """Give up what is still to be printed, or Python complains about it once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

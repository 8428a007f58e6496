"""Errors that are the user's to fix, and how an entry point reports them."""

import errno
import io
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

from popxl_gpt.utils.escaping import escaped, escaped_streams, one_line

USER_ERROR_EXIT_CODE = 2
SHOWN = 50
"""Problems that a message lists."""
DIVERGED_EXIT_CODE = 3
CORRUPTED_EXIT_CODE = 4
SPIKE_EXIT_CODE = 6
NOT_FINITE_EXIT_CODE = 1
LOST_EXIT_CODE = 1
INTERNAL_ERROR_EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h: the program's own mistake, never the user's."""
IO_ERROR_EXIT_CODE = 74
"""EX_IOERR of sysexits.h: a disk or a network has failed, which another start may not meet."""
OUT_OF_MEMORY = (
    "array is too big",
    "Maximum allowed size exceeded",
    "can't allocate memory",
    "out of memory",
)
"""What numpy and PyTorch say, in errors of several types, of what no memory holds."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing says where there is no more space."""
IO_FAILURES = frozenset(
    (
        *(errno.EIO, errno.ENXIO, errno.ENODEV, errno.ENODATA, errno.EREMOTEIO),
        *(errno.EUCLEAN, errno.EBADMSG),  # file systems that are damaged
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOLINK, errno.ENOTCONN, errno.ESHUTDOWN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    )
)
"""What the system says of disks, and of file systems over a network, that fail."""

HOLD_SECONDS = 5.0
"""Seconds for which other processes leave the word to the first, where torchrun, mpirun or srun has
started them. `poprun` does that by itself.
"""
NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables by which mpirun and srun number their processes."""


class UserError(ValueError):
    """Something the user gave is wrong: told in one message, without a traceback, with exit code
    2; or 74 where it was raised from a failure of input or output.

    Args:
        lines: of the message. What they quote, such as names that files hold, makes no more lines.
    """

    def __init__(self, *lines: object):
        super().__init__("\n".join(one_line(str(line)) for line in lines))


class DataError(UserError):
    """Data that cannot be used. The message says where, what was found, what was expected and what
    to do.
    """


class EndedError(DataError):
    """Work that something outside of it has ended: what is done of it is good."""


class PointerError(OSError):
    """A pointer of Git LFS in place of a file, which was not fetched."""


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that the operating system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: got no such file; expected a readable one. Check the path.")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if isinstance(error, PointerError):
        return DataError(
            f"{path}: got a pointer of Git LFS; expected the file that it stands for. Fetch it: "
            "git lfs pull."
        )
    if io_failure(error) is not None:
        return DataError(
            f"{path}: got '{reason}' while reading; expected a disk, or a network, that works. "
            "Start again; if it fails again, restore the file from a copy."
        )
    return DataError(
        f"{path}: got '{reason}'; expected a readable file. Check what it is and its permissions."
    )


def io_failure(error: BaseException) -> OSError | None:
    """The failure of a disk or a network that an error was raised from, if it was from one."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in IO_FAILURES):
        cause = cause.__cause__
    return cause


def failure_number(error: BaseException) -> int:
    """The number of `io_failure`, by which processes tell each other of it; 0 where there is
    none.
    """
    failure = io_failure(error)
    return 0 if failure is None or failure.errno is None else failure.errno


def numbered(number: int) -> OSError:
    """What an error is raised from whose `failure_number` another process has told."""
    return OSError(number, os.strerror(number))


class DivergedError(ArithmeticError):
    """Training has come to numbers that are not finite: told in one message, without a traceback,
    with exit code 3.
    """


class CorruptedError(RuntimeError):
    """The state of a run is not what it computed: told in one message, without a traceback, with
    exit code 4.
    """


class SpikeError(ArithmeticError):
    """A gradient norm is far above those before, and the run was to stop at one: told in one
    message, without a traceback, with exit code 6.
    """


class NotFiniteError(ArithmeticError):
    """A trained model has numbers that are not finite, or comes to them: told in one message,
    without a traceback, with exit code 1.
    """


class LostError(RuntimeError):
    """Another process of the run is gone, or does not answer: told in one message, without a
    traceback, with exit code 1.
    """


class ConfigError(UserError):
    """One or more problems in a configuration.

    Attributes:
        problems: one sentence each, in the order in which they were found.
    """

    def __init__(self, problems: Sequence[str], where: str = "configuration"):
        self.problems = tuple(problems)
        shown = self.problems[:SHOWN]
        lines: tuple[str, ...] = self.problems
        if len(self.problems) != 1:
            lines = (
                f"{where}: {len(self.problems)} problems.",
                *(f"  {number}. {problem}" for number, problem in enumerate(shown, start=1)),
            )
            if len(self.problems) > SHOWN:
                lines = (*lines, f"  ... and {len(self.problems) - SHOWN} more.")
        super().__init__(*lines)


def hear_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which scripts keep from it while they load their
    modules.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


TOLD: "dict[type[BaseException], tuple[str, int]]" = {
    UserError: ("error", USER_ERROR_EXIT_CODE),
    DivergedError: ("diverged", DIVERGED_EXIT_CODE),
    CorruptedError: ("corrupted", CORRUPTED_EXIT_CODE),
    SpikeError: ("spike", SPIKE_EXIT_CODE),
    NotFiniteError: ("not finite", NOT_FINITE_EXIT_CODE),
    LostError: ("error", LOST_EXIT_CODE),
}
"""Errors that are told in one message: how it begins, and the exit code."""


@contextmanager
def exit_on_user_error(stopped: str = "stopped.") -> Iterator[None]:
    """End an entry point without a traceback, whatever happens, see `_told`, and let nothing that
    it prints command a terminal.

    Args:
        stopped: what to say after Ctrl-C.
    """
    repair_standard_streams()
    with escaped_streams(), _told(stopped):
        yield


@contextmanager
def _told(stopped: str) -> Iterator[None]:
    """End an entry point without a traceback, whatever happens: the one place that turns failures
    into messages.

    A `UserError` in the body becomes its message on stderr and exit code 2, as do files that the
    system refuses, disks that are full and memory that ran out where nothing nearer has said so.
    Where a disk or a network failed, the code is 74. A `DivergedError` becomes exit code 3, a
    `CorruptedError` 4, a `SpikeError` 6, a `NotFiniteError` 1. Ctrl-C becomes exit code 130, and a
    reader of the output that went away (`... | head`) exit code 141, as shells do. Every other
    error is the program's own: one line, exit code 70, and the traceback in a file that the line
    names.
    """
    hear_ctrl_c()
    hook, threading.excepthook = threading.excepthook, _told_of_thread
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except tuple(TOLD) as error:
        name, code = next(TOLD[kind] for kind in TOLD if isinstance(error, kind))
        _end(f"{name}: {error}", _user_error_code(error) if isinstance(error, UserError) else code)
    except KeyboardInterrupt:
        _end(stopped, 128 + signal.SIGINT)
    except BrokenPipeError:
        _drop(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except SystemExit:
        raise
    except BaseException as error:  # among them panics of libraries in Rust, which are no Exception
        message = outside_message(error)
        if isinstance(error, OSError) and error.errno in FULL:
            _drop(sys.stdout)
        if message is None:
            _end(_internal_message(error), INTERNAL_ERROR_EXIT_CODE)
        _end(one_line(f"error: {message}"), _user_error_code(error))
    finally:
        threading.excepthook = hook


def _user_error_code(error: BaseException) -> int:
    """Whether what an error tells is the user's to change."""
    return USER_ERROR_EXIT_CODE if io_failure(error) is None else IO_ERROR_EXIT_CODE


def outside_message(error: BaseException) -> str | None:
    """What to say of an error that the system around the program has caused; None for one of the
    program's own.
    """
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        reason = first_line(error) or "no more"
        return (
            f"memory: got '{reason}'; expected enough. Choose a smaller model or batch; --plan "
            "shows what it takes."
        )
    if not isinstance(error, OSError) or error.strerror is None:
        return None
    if error.errno in FULL:
        return (
            f"{error.filename or 'output'}: got '{error.strerror}'; expected space to write. Free "
            "some."
        )
    if error.errno in IO_FAILURES:
        return (
            f"{text_of(error.filename or 'input or output')}: got '{error.strerror}'; expected a "
            "disk, or a network, that works. Start again; if it fails again, see what the system "
            "logs."
        )
    if error.filename is None:
        return None
    where = text_of(error.filename)
    return (
        f"{where}: got '{error.strerror}'; expected a path that can be used. Check what it is and "
        "its permissions."
    )


def _internal_message(error: BaseException) -> str:
    """One line on an error of the program's own, whose traceback goes into a file."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {Path(where[0].filename).name}:{where[0].lineno}" if where else ""
    try:
        descriptor, name = tempfile.mkstemp(prefix="traceback-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(map(escaped, traceback.format_exception(error)))
        told = f"its traceback is in {name}"
    except OSError as problem:
        told = f"its traceback could not be written: {problem.strerror}"
    return (
        f"internal error: {type(error).__name__}{place}: {first_line(error)}; expected none. "
        f"This is a mistake of the program: please report it; {told}."
    )


def _told_of_thread(failure: threading.ExceptHookArgs) -> None:
    """What a thread says that ends by an error which nobody asks for."""
    if failure.exc_value is not None and not isinstance(failure.exc_value, SystemExit):
        _say(_internal_message(failure.exc_value))


def reason_of(error: BaseException) -> str:
    """Why the system refused something, without the path; of memory that ran out, that."""
    if isinstance(error, MemoryError):
        return "no memory is left"
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """The beginning of an error's message."""
    lines = text_of(str(error)).splitlines()
    return lines[0][:300] if lines else ""


def text_of(name: str | bytes | int) -> str:
    """A file's name as any output takes it, whatever bytes it has."""
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return text.encode("utf-8", "backslashreplace").decode()


def repair_standard_streams() -> None:
    """Make writing to stdout and stderr safe: closed ones (`>&-`) lead nowhere, what their encoding
    lacks is escaped.

    A closed descriptor is taken up again at once, or the next file that is opened gets what is
    printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            try:
                os.fstat(number)
            except OSError:
                os.dup2(descriptor, number, inheritable=True)
            if descriptor > 2:
                os.close(descriptor)
            stream = open(os.devnull, mode, encoding="utf-8")
            setattr(sys, name, stream)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end(message: str, code: int) -> NoReturn:
    _leave_word_to_first()
    _say(message)
    sys.exit(code)


def _leave_word_to_first() -> None:
    """Let the first process, of a machine where torchrun has started it, tell what all of them fail
    by: the launcher then ends this one. Where it does not, the failure is of this process alone.
    """
    names: tuple[str, ...] = NUMBERS
    if "TORCHELASTIC_RUN_ID" in os.environ:
        names = ("LOCAL_RANK",)
    elif "RANK" in os.environ:
        return  # processes that somebody started by hand
    number = next((os.environ[name] for name in names if name in os.environ), "0")
    if number != "0" and "POPDIST_RENDEZVOUS" not in os.environ:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to be saved
        time.sleep(HOLD_SECONDS)


def _say(message: str) -> None:
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:  # a stderr that is full or gone hears nothing
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Give up what is still to be printed, or Python tries once more at its exit, and changes the
    exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

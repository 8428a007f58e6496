"""How a program starts: its command line is answered before anything slow is loaded."""

import gc
import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from popxl_gpt import __version__
from popxl_gpt.utils.errors import exit_on_user_error
from popxl_gpt.utils.texts import did_you_mean, shown_text


def start(module: str, read: "Callable[[Sequence[str]], object]") -> NoReturn:
    """Answer the command line, or load a program and run it.

    Help, and flags that are wrong, need little code; the program needs numpy, PyTorch and much of
    ours. It is imported by name, so that it is one module however it is run.

    Args:
        module: the program, whose `run` takes what was read and gives the exit code. Its `STOPPED`,
            if it has one, is said after Ctrl-C.
        read: reads the words of the command line; prints the help and exits, or raises ConfigError
            where they are wrong.
    """
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"popxl-gpt {__version__}")
        sys.exit(0)
    with exit_on_user_error():
        given = read(arguments)
    _end_by_ctrl_c()  # while modules load, too
    gc.disable()  # modules are many objects that stay, and none of them is garbage
    program = importlib.import_module(module)
    gc.enable()
    try:
        with exit_on_user_error(getattr(program, "STOPPED", "stopped.")):
            sys.exit(program.run(given))
    finally:
        _end_by_ctrl_c()  # while the interpreter ends, it would be told with a traceback


def _end_by_ctrl_c() -> None:
    """Let Ctrl-C end the process without a word, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def unknown_command(name: str, known: "Iterable[str]", program: str) -> str:
    """The problem of a program that has commands, and was given another first word or none."""
    hint = did_you_mean(name, dict.fromkeys(known)) if name else ""
    return (
        f"command: got {shown_text(name) if name else 'none'}; expected one of {', '.join(known)}. "
        f"{hint or f'{program} --help says what each does.'}"
    )


def typed_as(command: str, script: str) -> str:
    """What starts a program, in words for its user: its console command where this process was
    started by a console command, or else its script.
    """
    return command if Path(sys.argv[0]).name.startswith("popxl-gpt-") else script

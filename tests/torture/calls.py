"""System calls that are counted, fail or end the process: the library of calls.c, and its
settings.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.torture.application import Workshop

SOURCE = Path(__file__).with_name("calls.c")


@dataclass(frozen=True)
class Call:
    """A call that changes something below the folder."""

    name: str
    path: str


def settings(
    shop: Workshop,
    below: Path,
    *,
    at: int = 0,
    action: "str | int" = "",
    onward: bool = False,
    log: str = "",
):
    """Environment of a process in which the call number `at`, from 1, on files below a folder meets
    an action.
    """
    return {
        "LD_PRELOAD": str(shop.shared("calls.so", lambda: build(shop.folder))),
        "TORTURE_FOLDER": str(below),
        "TORTURE_AT": str(at),
        "TORTURE_ACTION": str(action),
        "TORTURE_ONWARD": str(int(onward)),
        **({"TORTURE_LOG": log} if log else {}),
    }


def build(folder: Path) -> Path:
    """Compile the library into a folder."""
    library = folder / "calls.so"
    subprocess.run(
        [
            "cc",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
            library,
            SOURCE,
            "-ldl",
        ],
        check=True,
    )
    return library


def read_log(path: Path) -> "list[Call]":
    """The calls of one process, in order."""
    return [Call(*line.split(" ", 2)[1:]) for line in path.read_text().splitlines()]

"""The side of a process with limits that answers: `limited_process` starts one, and asks it.

A request is JSON; an answer a letter and bytes. Each has its length before it, 8 bytes.
"""

import json
import os
import re
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any

FAILED, GREW = b"f", b"g"
"""What an answer holds: why there is none; or nothing, for it has more than the request allows."""
Answer = Callable[["dict[str, Any]"], "tuple[bytes, bytes]"]


def serve(answers: "Mapping[str, Answer]") -> None:
    """Answer until nobody asks.

    Args:
        answers: what is done for each kind of request.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever asks decides when that is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(0, "rb") as requests, os.fdopen(1, "wb") as output:
        while len(head := requests.read(8)) == 8:
            asked = json.loads(requests.read(int.from_bytes(head, "little")))
            _limit(asked["seconds"], asked["memory"])
            try:
                kind, content = answers[asked["do"]](asked)
            except MemoryError:
                os.abort()  # as where a library finds none
            # the tokenizers package raises nothing narrower, and panics are no Exception
            except BaseException as error:
                kind, content = FAILED, str(error).encode("utf-8", "replace")
            output.write(len(kind + content).to_bytes(8, "little") + kind + content)
            output.flush()


def _limit(seconds: int, memory: int) -> None:
    """Let this process work so many seconds more, and have so many bytes more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            found = re.search(r"VmData:\s*(\d+) kB", file.read())
    except FileNotFoundError:  # only Linux counts what is asked of the system as data
        return
    if found is not None:
        _lower(resource.RLIMIT_DATA, int(found[1]) * 1024 + memory)


def _lower(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

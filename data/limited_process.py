"""A process that does work for which a file of somebody else's decides, with limits of time and
memory for each request. `serving` is what runs in it.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGXCPU
from typing import Any

from popxl_gpt.utils.errors import EndedError
from popxl_gpt.utils.units import bytes_text

_START = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
_START += "runpy.run_path(sys.argv[2], run_name='__main__')"


class LimitError(Exception):
    """A request took more than it may; says what it did not end within."""


class LimitedProcess:
    """A process that answers. It ends with this one.

    Args:
        program: the file that runs in it.
        name: names in errors what it works with.
    """

    def __init__(self, program: str | None, name: str):
        assert program is not None
        self.name = name
        words = [json.dumps(sys.path), str(Path(program))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # panics write there
        )
        self.end: Callable[[], Any] = weakref.finalize(self, _end, self._process)

    def ask(
        self, asked: "dict[str, Any]", what: str, seconds: int, memory: int
    ) -> "tuple[bytes, bytes]":
        """What an answer is, and its content.

        Args:
            what: is made.
            seconds, memory: time of a core, and bytes, that it may take.
        Raises:
            LimitError: it takes more, and the process has ended.
            EndedError: somebody has ended the process.
        """
        kind, content = self._answer({**asked, "seconds": seconds, "memory": memory})
        if kind:
            return kind, content
        code = self._process.wait()
        self.end()
        if code == -SIGKILL:  # which none of its limits does
            raise EndedError(
                f"{self.name}: got no {what}, for the process that makes them was killed; "
                "expected it to go on. Perhaps the machine's memory ran out. Start again."
            )
        is_late = code == -SIGXCPU
        raise LimitError(f"{seconds} s" if is_late else f"{bytes_text(memory)} of memory")

    def _answer(self, asked: "dict[str, Any]") -> "tuple[bytes, bytes]":
        """An answer; nothing where the process has ended."""
        request = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(len(request).to_bytes(8, "little") + request)
            requests.flush()
        except BrokenPipeError:
            return b"", b""
        size = int.from_bytes(answers.read(8), "little")
        content = answers.read(size)
        if not size or len(content) < size:
            return b"", b""
        return content[:1], content[1:]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        try:
            stream.close()
        except BrokenPipeError:  # what was not written is not wanted any more
            pass

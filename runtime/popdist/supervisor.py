"""Processes that end together: the first that fails ends all, and its error is the last on the screen.

Failing is: an exit code other than 0, death by a signal, and being stopped (SIGSTOP) for `STOPPED_SECONDS`. Where one
hangs without being stopped, those fail that have waited for it at a collective as long as ``--timeout`` says. The
others then get SIGTERM, and SIGKILL `END_SECONDS` later. No process outlives this one, however it ends.

These rules are why ``poprun`` does not leave it to ``torchrun``, whose own report comes last, which does not notice
stopped processes, and whose processes outlive it where it is killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from types import FrameType
from typing import IO, Any, Callable, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

TICK_SECONDS = 0.05
SETTLE_SECONDS = 0.5
"""After the first failure: others that fail by themselves meanwhile may be the cause."""
HOLD_SECONDS = 5.0
"""How long text of instances other than 0 is held back: what all of them say when they fail alike is then said once."""
STOPPED_SECONDS = 5.0
END_SECONDS = 5.0
GRACE_SECONDS = 60.0
"""Default of how long instances may take to finish when this process is asked to end."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
"""prctl(2), Linux."""


class Instance:
    """One process, in a session of its own, with its text on stderr read line by line."""

    def __init__(self, index: int, program: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None]):
        self.index = index
        self.process = subprocess.Popen(
            list(program), env=dict(environment), stderr=subprocess.PIPE, start_new_session=True, preexec_fn=prepare
        )
        self.has_spoken = False
        self.stopped_since: Optional[float] = None
        self._lines: Deque[Tuple[float, bytes]] = deque()
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)

    def start_reading(self) -> None:
        """Start the thread that reads what it says. No process is started after that: a fork knows one thread only."""
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        while text := os.read(stream.fileno(), 2**16) if self.index == 0 else stream.readline():
            self._lines.append((time.monotonic(), text))

    def tell(self, held: float) -> None:
        """Pass on what was said longer than ``held`` seconds ago."""
        while self._lines and self._lines[0][0] <= time.monotonic() - held:
            text = self._lines.popleft()[1]
            self.has_spoken = True
            sys.stderr.buffer.write(text if self.index == 0 else b"[%d] %s" % (self.index, text))
            sys.stderr.buffer.flush()

    def finish_reading(self) -> None:
        """Wait until all that it said has been read."""
        self._reader.join(1.0)

    def has_failed(self) -> bool:
        """Whether it ended badly, or is stopped for long."""
        if self.process.poll() is not None:
            return self.process.returncode != 0
        self._watch_stops()
        return self.stopped_since is not None and time.monotonic() - self.stopped_since > STOPPED_SECONDS

    def _watch_stops(self) -> None:
        try:
            news = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:
            return
        if news is not None:
            self.stopped_since = time.monotonic() if news.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED) else None

    def send(self, number: int) -> None:
        """Send a signal to the process and to those that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # all of them have ended

    def describe_end(self) -> str:
        """How it failed."""
        code = self.process.returncode
        who = f"instance {self.index} (process {self.process.pid})"
        if self.stopped_since is not None:
            return f"{who} was stopped, and did not go on for {STOPPED_SECONDS:g} s."
        if code is not None and code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}."
        return f"{who} ended with exit code {code}, without a message."


class Supervisor:
    """Starts instances, watches them, and ends them together.

    Args:
        program: the command line.
        environments: one for each instance; they hold its index as RANK.
        grace: seconds that instances get to finish when this process gets SIGINT or SIGTERM; a second signal ends them.
    """

    def __init__(self, program: Sequence[str], environments: Sequence[Mapping[str, str]], grace: float = GRACE_SECONDS):
        self.program, self.environments, self.grace = program, environments, grace
        self.instances: List[Instance] = []
        self._signals: List[int] = []

    def run(self) -> int:
        """Run them to their end. Returns the exit code."""
        before: Dict[int, Any] = {number: signal.signal(number, self._note) for number in FORWARDED}
        prepare = _end_with_parent()
        try:
            for environment in self.environments:
                self.instances.append(Instance(int(environment["RANK"]), self.program, environment, prepare))
            for instance in self.instances:
                instance.start_reading()
            return self._watch()
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self._signals.append(number)

    def _watch(self) -> int:
        failed_at: Optional[float] = None
        while True:
            time.sleep(TICK_SECONDS)
            for instance in self.instances:
                instance.tell(0.0 if instance.index == 0 else HOLD_SECONDS)
            if self._signals:
                return self._finish_on_signal()
            failed = [i for i in self.instances if i.has_failed()]
            if failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > SETTLE_SECONDS:
                    return self._report(failed)
            elif all(i.process.poll() == 0 for i in self.instances):
                for instance in self.instances:
                    instance.finish_reading()
                    instance.tell(0.0)
                return 0

    def _report(self, failed: Sequence[Instance]) -> int:
        """End the others silently, then let the first that failed have the last word.

        Death by a signal comes before exit codes: those may follow from it.
        """
        culprit = min(failed, key=lambda i: ((i.process.returncode or -1) > 0, i.index))
        self._end_all()
        culprit.finish_reading()
        culprit.tell(0.0)
        code = culprit.process.returncode
        if culprit.stopped_since is not None or code < 0 or not culprit.has_spoken:
            print(f"poprun: {culprit.describe_end()} The others were ended.", file=sys.stderr, flush=True)
        return int(code if code > 0 else 128 - code)

    def _finish_on_signal(self) -> int:
        """Pass a signal on and wait for the end; a second one, or too long a wait, ends everything."""
        first = self._signals[0]
        for instance in self.instances:
            instance.send(first)
        until = time.monotonic() + self.grace
        while any(i.process.poll() is None for i in self.instances):
            time.sleep(TICK_SECONDS)
            for instance in self.instances:
                instance.tell(0.0)
            if len(self._signals) > 1 or time.monotonic() > until:
                break
        self._end_all(signal.SIGKILL)
        for instance in self.instances:
            instance.finish_reading()
            instance.tell(0.0)
        return 128 + first

    def _end_all(self, number: int = signal.SIGTERM) -> None:
        """No process is left when this returns."""
        for instance in self.instances:
            if instance.process.poll() is None:
                instance.send(number)
        until = time.monotonic() + END_SECONDS
        while any(i.process.poll() is None and i.stopped_since is None for i in self.instances):
            if time.monotonic() > until:
                break
            time.sleep(TICK_SECONDS)
        for instance in self.instances:
            instance.send(signal.SIGKILL)  # also what an ended one has started and left
            instance.process.wait()


def _end_with_parent() -> Callable[[], None]:
    """What a new process runs first, so that it is killed where this one dies."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare

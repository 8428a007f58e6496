"""The places of the instances of a run, asked by one that has waited for others in vain.

Each instance has a thread that looks every second whether one asks. So an instance whose program
hangs answers, too, with the place where it is; one that is stopped, or gone, does not.

Questions are numbered: what an instance said to an earlier one is not where it is now. It counts
only where the instance has asked itself: it waited in vain, too, and may have ended since.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from poprun.deadline import Deadline, join
from poprun.store import Client, StoreError

BEAT_SECONDS = 1.0
ANSWER_SECONDS = 4.0
"""How long an instance that asks waits for answers."""
LAST_SECONDS = 3.0
"""How long the end of a process waits for the thread."""
FRAMES = 3
"""Calls, the innermost first, that tell where an instance is."""
SHOWN = 3
"""Instances that are named of those that wait, and of those that do not."""
ASKED = "hang report"
"""Key of the store: the number of the newest question."""

_waits: dict[object, Callable[[], str]] = {}
"""What this process waits for, where it does."""


@contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
    """A block in which this process waits for others. ``what`` says at what; another thread may
    call it.
    """
    key = object()
    _waits[key] = what
    try:
        yield
    finally:
        del _waits[key]


def own_name() -> str:
    """What this instance is called beside its number."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True)
class Answer:
    """The place of an instance."""

    number: int
    """The newest question that it is an answer to."""
    waits: bool
    where: str
    """What it waits for, or the place of its program."""
    has_asked: bool
    """Whether the instance has asked the others itself."""


class HangReport:
    """This process's part in it.

    Args:
        store: that all instances see, over a connection of its own: others may be in use for long.
        names: of all instances, see `own_name`.
    """

    def __init__(self, store: Client, index: int, names: Sequence[str]):
        self._store, self._index, self._names = store, index, names
        self._has_asked = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="hang report", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._leaving.set()
        join(self._thread, LAST_SECONDS)

    def ask(self) -> str:
        """Ask the other instances where they are. Returns sentences, the last of those that do not
        wait.
        """
        answers: dict[int, Answer] = {}
        # In a thread that is left behind where it gets stuck: the link to the process that keeps
        # the store may be cut.
        asking = threading.Thread(target=self._collect, args=(answers,), daemon=True)
        asking.start()
        join(asking, ANSWER_SECONDS)
        return self._in_words(dict(answers))

    def _collect(self, answers: "dict[int, Answer]") -> None:
        deadline = Deadline(ANSWER_SECONDS)
        missing = set(range(len(self._names))) - {self._index}
        try:
            number = self._store.add(ASKED, 1)
            self._has_asked = True
            self._answer(number)  # this process may have ended when another asks
            while missing and deadline.left() > 0:
                for other in sorted(missing):
                    if self._store.has(_key(other)):
                        answer = Answer(*json.loads(self._store.get(_key(other))))
                        if answer.number >= number:
                            missing.remove(other)
                        if answer.number >= number or answer.has_asked:
                            answers[other] = answer
                time.sleep(BEAT_SECONDS / 20)
        except StoreError:
            return  # nobody keeps the store any more

    def _listen(self) -> None:
        answered = 0
        try:
            while not self._leaving.wait(BEAT_SECONDS):
                number = int(self._store.get(ASKED)) if self._store.has(ASKED) else 0
                if number > answered:
                    self._answer(number)
                    answered = number
        except StoreError:
            return

    def _answer(self, number: int) -> None:
        waits = [what() for what in list(_waits.values())]
        where = waits[0] if waits else _position()
        answer = Answer(number, bool(waits), where, self._has_asked)
        self._store.set(_key(self._index), json.dumps(astuple(answer)))

    def _in_words(self, answers: "dict[int, Answer]") -> str:
        waiting, others = [], []
        for other, name in enumerate(self._names):
            answer = answers.get(other)
            if answer is not None and answer.waits:
                waiting.append(f"Instance {other} waits, too: {answer.where}.")
            elif other != self._index:
                does = (
                    "does not answer"
                    if answer is None
                    else f"does not wait: it is at {answer.where}"
                )
                others.append(f"Instance {other} ({name}) {does}.")
        return " ".join(
            [*_shortened(waiting), *_shortened(others)]
            if others
            else [*_shortened(waiting), "So all do."]
        )


def _shortened(sentences: list[str]) -> list[str]:
    more = len(sentences) - SHOWN
    return sentences if more <= 0 else [f"{more} more like these:", *sentences[:SHOWN]]


def _position() -> str:
    """The place of the main thread of this process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places: list[str] = []
    while frame is not None and len(places) < FRAMES:
        file = "/".join(frame.f_code.co_filename.split("/")[-2:])
        places.append(f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return ", called at ".join(places) or "its end"


def _key(instance: int) -> str:
    return f"is at/{instance}"

"""How the instances of each machine are, as the launchers tell each other.

Each keeps a post in the store where they have met, which is machine 0's, and reads those of the
others. A thread does so: a link that is cut keeps only that waiting.
"""

import json
import threading
import time
from dataclasses import astuple, dataclass, replace
from typing import Dict, Optional, Tuple

from popdist.store import Client, StoreError

TICK_SECONDS = 0.5
SILENT_SECONDS = 60.0
"""A machine whose post stays the same for so long is gone."""
LEAVE_SECONDS = 10.0
"""How long machine 0, at the end, waits for the others to have read that it is."""


@dataclass(frozen=True)
class Post:
    """What a launcher says of its machine."""

    count: int = 0
    """Of its posts."""
    code: Optional[int] = None
    """0: all instances have succeeded; others: the exit code that its launcher ends with."""
    problem: str = ""
    """What happened, where the code is not 0."""
    has_left: bool = False
    """It will read no more."""


class Posts:
    """Those of all machines of a run.

    Args:
        store: that all machines see.
        index: of this machine.
        count: of machines.
    """

    def __init__(self, store: Client, index: int, count: int):
        self._store, self._index = store, index
        self._own = Post()
        self._others: Dict[int, Tuple[Post, float]] = {
            other: (Post(), time.monotonic()) for other in range(count) if other != index
        }
        """Posts, and when they last changed."""
        self._thread = threading.Thread(target=self._keep_up, name="posts", daemon=True)
        if self._others:
            self._thread.start()

    def tell(self, code: int, problem: str = "") -> None:
        """Say how the instances of this machine have ended. What was said first stays."""
        if self._own.code is None:
            self._own = Post(code=code, problem=problem)

    def failure(self) -> Optional[Tuple[int, str]]:
        """The exit code and the problem of the first other machine that has one."""
        for other, (post, _) in self._others.items():
            if post.code:
                return post.code, f"machine {other}: {post.problem}"
        return None

    def wait(self) -> Optional[Tuple[int, str]]:
        """Wait for the instances of all other machines to succeed. As `failure`; a machine that is
        gone has failed.
        """
        while (found := self.failure()) is None:
            waited_for = {
                other: changed
                for other, (post, changed) in self._others.items()
                if post.code is None
            }
            if not waited_for:
                return None
            for other, changed in waited_for.items():
                if time.monotonic() - changed > SILENT_SECONDS:
                    return (
                        1,
                        (
                            f"machine {other} has said nothing for {SILENT_SECONDS:g} s; it is "
                            "gone, or the link is."
                        ),
                    )
            time.sleep(TICK_SECONDS)
        return found

    def leave(self) -> None:
        """Say goodbye, and give the others time to have read all."""
        self._own = replace(self._own, has_left=True)
        until = time.monotonic() + LEAVE_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            time.sleep(TICK_SECONDS / 5)

    def _keep_up(self) -> None:
        count = 0
        try:
            while True:
                count, own = count + 1, self._own
                self._store.set(_key(self._index), json.dumps(astuple(replace(own, count=count))))
                self._read()
                if own.has_left and (
                    self._index > 0 or all(post.has_left for post, _ in self._others.values())
                ):
                    return
                time.sleep(TICK_SECONDS)
        except StoreError:  # nobody keeps the store any more
            post, _ = self._others.get(0, (Post(code=0), 0.0))
            if post.code is None:
                self._others[0] = Post(code=1, problem="its poprun is gone."), time.monotonic()

    def _read(self) -> None:
        for other, (before, _) in list(self._others.items()):
            if self._store.has(_key(other)):
                post = Post(*json.loads(self._store.get(_key(other))))
                if post != before:
                    self._others[other] = post, time.monotonic()


def _key(machine: int) -> str:
    return f"post/{machine}"

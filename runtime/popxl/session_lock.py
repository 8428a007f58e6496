"""The lock of a program: one thread at a time works with its sessions."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


class SessionLock:
    """Lets one thread at a time work with the sessions of a program, of the process that made the
    first of them; other threads wait.

    A thread that works with one already cannot begin anew, as signal handlers would: what it does
    is half done.
    """

    def __init__(self) -> None:
        # C's own: no signal is handled between taking it and being able to give it back
        self._lock, self._outer_lock = threading.RLock(), threading.RLock()
        self._process: int | None = None
        self._openers: list[int] = []
        """Threads with a block of `around_runs` that is open, one for each block."""

    @property
    def is_of_a_parent(self) -> bool:
        """Whether this process is a fork of the one that made the first session."""
        return self._process not in (None, os.getpid())

    def __call__(self, where: str) -> AbstractContextManager[bool]:
        """A block that works with a session.

        Raises:
            RuntimeError: the thread is inside such a block, or the process is a fork; begins with
                ``where``.
        """
        self._check(where)
        self._process = os.getpid()
        return self._lock

    def together(self, where: str) -> AbstractContextManager[bool]:
        """A block of several such blocks, between which come no other ones of this kind.
        RuntimeError as above.
        """
        self._check(where)  # else a handler may wait here for a thread that waits for its own
        return self._outer_lock

    def _check(self, where: str) -> None:
        if self.is_of_a_parent:  # which may have had a lock that nobody gives back
            raise RuntimeError(
                f"{where}: got a fork of the process that made the program's session; expected "
                "that process. Read there what a fork needs, or start processes afresh: "
                "multiprocessing.get_context('spawn')."
            )
        if self._lock._is_owned():  # type: ignore[attr-defined] # as threading.Condition asks
            raise RuntimeError(
                f"{where}: got a call in the middle of another one of the same thread, from a "
                "signal handler or what a run calls; expected it before or after. Note there what "
                "is to be done, and do it between runs."
            )

    @contextmanager
    def around_runs(self, where: str, block: AbstractContextManager[T]) -> Iterator[T]:
        """A block that changes what runs do. It begins and ends between those of all threads, which
        do not wait for it.

        Raises:
            RuntimeError: as above, or another thread has one open: it would end in its middle.
        """
        thread = threading.get_ident()
        with self(where):
            if any(opener != thread for opener in self._openers):
                raise RuntimeError(
                    f"{where}: got a block while another thread has one of this session's open; "
                    "expected one thread to open them. Leave the other one first."
                )
            entered = block.__enter__()
            self._openers.append(thread)
        try:
            yield entered
        finally:
            if not self.is_of_a_parent:  # a fork leaves the block as well, of what is not its own
                with self(where):
                    self._openers.pop()
                    block.__exit__(None, None, None)

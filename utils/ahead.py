"""Work that is done before its results are asked for."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

Result = TypeVar("Result")


@contextmanager
def made_ahead(
    calls: "Sequence[tuple[int, Callable[[], Result]]]", room: int, threads: int
) -> "Iterator[Iterator[Result]]":
    """What functions return, in order; threads call them while the block does something else.

    An exception of one is raised where its result is asked for. Leaving the block ends the threads
    after the call that they are in; nobody waits for them.

    Args:
        calls: bytes of the result, and a function.
        room: bytes of results that there may be, in work, waiting and in the caller's hands. A
            larger one is made when it is asked for.
    """
    ahead = _Ahead(calls, room)
    for _ in range(min(threads, len(calls))):
        threading.Thread(target=ahead.work, daemon=True).start()
    try:
        yield ahead.results()
    finally:
        ahead.close()


class _Ahead(Generic[Result]):
    def __init__(self, calls: "Sequence[tuple[int, Callable[[], Result]]]", room: int) -> None:
        self.calls, self.room = calls, room
        self._next = self._waiting = 0
        self._asked = -1
        """Number of the result that the caller waits for."""
        self._made: dict[int, Future[Result]] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def work(self) -> None:
        """Make one result after the other."""
        while (number := self._taken()) is not None:
            made: Future[Result] = Future()
            try:
                made.set_result(self.calls[number][1]())
            except BaseException as error:  # raised where the result is asked for
                made.set_exception(error)
            with self._changed:
                self._made[number] = made
                self._changed.notify_all()

    def _taken(self) -> "int | None":
        """The next call, once there is room for its result; None when there is no more to do.

        Calls are taken in order, so that the room is never full of results after one that is
        missing.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._next == len(self.calls) or self._has_room()
            )
            if self._is_closed or self._next == len(self.calls):
                return None
            number, self._next = self._next, self._next + 1
            self._waiting += self.calls[number][0]
            return number

    def _has_room(self) -> bool:
        return self._next == self._asked or self._waiting + self.calls[self._next][0] <= self.room

    def results(self) -> "Iterator[Result]":
        """The results in order; the caller has one until it asks for the next."""
        for number, (nbytes, _) in enumerate(self.calls):
            with self._changed:
                self._asked = number
                self._changed.notify_all()
                self._changed.wait_for(lambda: number in self._made)
                made = self._made.pop(number)
            yield made.result()
            del made
            with self._changed:
                self._waiting -= nbytes
                self._changed.notify_all()

    def close(self) -> None:
        """Tell the threads to end."""
        with self._changed:
            self._is_closed = True
            self._made.clear()
            self._changed.notify_all()

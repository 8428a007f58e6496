"""A thread that moves messages while the program's thread computes."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from popdist import exchange
from popdist.messages import TransferError

Next = Callable[[], Any]
"""What is done once messages have moved; returns the messages that follow from it, or None."""


class Mover:
    """Messages under way, and the thread that moves them. It sleeps while there are none."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Next | None]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="mover", daemon=True).start()

    def move(self, mail: Any, then: Next | None = None) -> None:
        """Move messages, and then do what follows."""
        with self._changed:
            self._open.append((mail, then))
            self._changed.notify()

    def _run(self) -> None:
        messages = exchange.connect().messages
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
            messages.move(lambda: any(mail.has_moved for mail, _ in self._open))
            for each in [each for each in self._open if each[0].has_moved]:
                self._open.remove(each)
                self._go_on(each[1])

    def _go_on(self, then: Next | None) -> None:
        if then is None:
            return
        try:
            following = then()
        except TransferError:
            return  # the program's thread finds the same where it waits, and says so
        if following is not None:
            self.move(following)


@cache
def mover() -> Mover:
    """The mover of this process."""
    return Mover()

"""The store of a run in the form in which torch asks for one.

torch's own would listen for everyone; this one lets nobody in who does not know the run's secret.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from poprun.deadline import Deadline
from poprun.rendezvous import Rendezvous
from poprun.store import connect


class SharedStore(distributed.Store):
    """A run's keys and values, as torch asks for them.

    Args:
        rendezvous: where they are kept.
        seconds: that `get` waits.
    """

    def __init__(self, rendezvous: Rendezvous, seconds: float):
        super().__init__()
        self._rendezvous, self._seconds = rendezvous, seconds
        self._client = connect(rendezvous.address, rendezvous.secret, Deadline(seconds))
        self._clones: list[SharedStore] = []
        """torch holds these by what is not theirs alone in Python."""

    def clone(self) -> "SharedStore":
        """The same over another connection, for another thread."""
        self._clones.append(SharedStore(self._rendezvous, self._seconds))
        return self._clones[-1]

    def close(self) -> None:
        """Ask no more, clones neither."""
        for clone in self._clones:
            clone.close()
        self._client.close()

    def set(self, key: str, value: Any) -> None:
        """See `torch.distributed.Store`, here and below."""
        self._client.set(key, value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for it."""
        return self._client.get(key, Deadline(self._seconds))

    def add(self, key: str, amount: int) -> int:
        """Returns the sum."""
        return self._client.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Returns the value that the key has then."""
        given = [
            each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired)
        ]
        return self._client.replace(key, *given)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have values."""
        return all(self._client.has(key) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all have values."""
        deadline = Deadline(self._seconds if timeout is None else timeout.total_seconds())
        for key in keys:
            self._client.get(key, deadline)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all."""
        deadline = Deadline(self._seconds)
        return [self._client.get(key, deadline) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """One after the other."""
        for key, value in zip(keys, values):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Returns whether there was one."""
        return self._client.delete(key)

    def num_keys(self) -> int:
        """How many there are."""
        return self._client.count()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - what torch calls them from C++

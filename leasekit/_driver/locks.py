"""Locks that users' threads take: no exception out of a signal handler leaves one of them held.

`with lock:` is not enough in Python 3.14: it runs signal handlers also between the call of `__enter__` and the block,
and an exception out of a handler skips `__exit__` (python/cpython#148874). No Python runs a handler after a step of an
iterator in C, and `try` is no instruction; so nothing comes between the two here, and `release` is one call into C:

    for _ in taken(lock):
        try:
            ...
        finally:
            lock.release()
"""

from collections.abc import Iterator
from typing import Protocol


class Lock(Protocol):
    """A `threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True) -> bool: ...  # noqa: FBT001, FBT002 - the signature of `threading`


def taken(lock: Lock) -> Iterator[bool]:
    """Take the lock with the first step of this iterator, which has no second step."""
    return map(lock.acquire, (True,))

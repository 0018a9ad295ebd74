"""One engine for one file: a lock that the kernel drops when its process dies, however it dies."""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from leasekit.errors import StoreLocked

__all__ = ["FileLock"]


class FileLock:
    """An flock on a file beside the store.

    Not on the store's own file: closing any descriptor of that would drop SQLite's locks on it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Take the lock. Raises `StoreLocked` where another engine has it, in this process or another."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            store = self._path.name.removesuffix(".lock")
            raise StoreLocked(
                f"another server has the store {store!r} open (process {holder or 'unknown'}): "
                "stop it, or let this one connect to it over HTTP"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it up."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked child shares the lock with its parent, and would keep it after the parent was killed.
    for lock in list(_locks):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)

"""One engine for one store, and no other file in the place of the store: locks, and what is known of it beside it.

Rule 1: the lock on the store's own inode keeps out a server that comes by another path. Every descriptor of the file
stays open as long as SQLite may have the file open in this process: closing one would drop SQLite's own locks (POSIX
locks belong to the process). So a second engine of this process is refused before it opens the file.
Rule 2: the lock on the file beside it, `<store>.id`, keeps out a server that finds another file under the same path.
Rule 3: `<store>.id` never knows of more transactions than are synced in the store.
Rule 4: each start has a name. The store has that of the last start that wrote to it; `<store>.id` has the same, and
that of the start which may write next, noted before. A copy that was served elsewhere has the name of another start.

The kernel drops both locks when the process dies, however it dies.
"""

import contextlib
import fcntl
import os
import re
import stat
import weakref
from pathlib import Path
from typing import NamedTuple

from leasekit.errors import ConfigError, StoreDamaged, StoreLocked

__all__ = ["FileLock", "Identity"]


class Identity(NamedTuple):
    """Which store it is, how many transactions have changed it, and in which start the last of them was."""

    id: str
    commits: int
    start: str | None  # None: it was written to by an earlier version only


class FileLock:
    """The locks of one store, and the identity that was noted beside it. `path` is without symbolic links."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(path.name + ".id")
        self._descriptors: list[int] = []
        self._inode: tuple[int, int] | None = None
        self._noted: Identity | None = None
        self._next: str | None = None  # the start that may write next; None: an earlier version has noted none
        self._is_cut = False  # a note that was made and is empty
        _locks.add(self)

    def acquire(self) -> None:
        """Take both locks; make the file where there was none.

        Raises `StoreLocked` where another engine has the store open, in this process or another, `StoreDamaged` where
        the file is missing or empty and was not, `ConfigError` where it has more than one name, and `OSError`.
        """
        is_new = not self._beside.exists()
        beside = self._lock(self._beside)
        if is_new:
            self._write(os.getpid())
        self._read(beside)
        self._look_at_file()
        inode = _inode(os.fstat(self._lock(self._path)))
        _open_here.add(inode)
        self._inode = inode
        if not self._is_cut:  # which `check` has still to see
            self._write(os.getpid())

    def check(self, found: Identity | None) -> None:
        """Raise `StoreDamaged` where the store is not, or no longer, what was noted beside it."""
        noted, name = self._noted, self._path.name
        if self._is_cut and found is not None and found.commits:
            raise self._damaged()
        if noted is None:
            return
        if found is None or found.id != noted.id:
            raise StoreDamaged(
                f"{name!r} is another store than the one that {self._beside.name} belongs to: put that one back; "
                f"if this one is meant, delete {self._beside.name}"
            )
        if found.commits < noted.commits:
            raise StoreDamaged(
                f"the store {name!r} has lost its last {noted.commits - found.commits} transactions: its write-ahead "
                f"log {name}-wal is missing, or an older copy is in its place. Put the log back beside it; to go on "
                f"without what is lost, as with a backup, delete {self._beside.name}"
            )
        if self._next is not None and found.start not in (noted.start, self._next):
            raise StoreDamaged(
                f"in the place of the store {name!r} is a copy of it that was served elsewhere: put the one back that "
                f"was served here; if the copy is meant, delete {self._beside.name}"
            )

    def begin(self, identity: Identity, start: str) -> None:
        """Note what is synced in the store now, and that this start may write to it. Raises `OSError`."""
        self._noted, self._next = identity, start
        self._write(os.getpid())
        os.fsync(self._descriptors[0])
        _sync_directory(self._path.parent)

    def note(self, identity: Identity) -> None:
        """Note what is synced in the store now. No error: then less is known, which is safe."""
        self._noted = identity
        with contextlib.suppress(OSError):
            self._write(os.getpid())

    def release(self) -> None:
        """Give the locks up. Call it once SQLite has closed the store."""
        _open_here.discard(self._inode)
        self._inode = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _read(self, beside: int) -> None:
        line = os.pread(beside, 200, 0)
        self._is_cut = not line
        note = _parsed(line) if line else (None, None)
        if note is None:
            raise self._damaged()
        self._noted, self._next = note

    def _damaged(self) -> StoreDamaged:
        return StoreDamaged(
            f"{self._beside.name} is damaged, and nobody can tell whether {self._path.name!r} is the store that was "
            f"served here last: if it is, delete {self._beside.name}; if not, put that store back first"
        )

    def _lock(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise self._locked() from None
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors.append(descriptor)
        return descriptor

    def _look_at_file(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            status = None
        if self._noted is not None and (status is None or not status.st_size):
            raise StoreDamaged(
                f"the store {self._path.name!r} is empty or missing, and {self._beside.name} says that it was not: put "
                f"it back, or a backup, and delete {self._beside.name}; to begin with an empty store, only delete that"
            )
        if status is None:
            return
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise ConfigError(
                f"the store {str(self._path)!r} has {status.st_nlink} names (hard links), and SQLite would keep a "
                "write-ahead log for each: remove the others"
            )
        if _inode(status) in _open_here:
            raise self._locked()

    def _locked(self) -> StoreLocked:
        try:
            holder = self._beside.read_text(errors="replace").partition("\n")[0].split()[-1:]
        except OSError:
            holder = []
        return StoreLocked(
            f"another server has the store {self._path.name!r} open (process {holder[0] if holder else 'unknown'}): "
            "stop it, or let this one connect to it over HTTP"
        )

    def _write(self, holder: int) -> None:
        # Of one length, in one call: no reader and no crash finds half of it.
        store, commits, start = self._noted or Identity("-", 0, None)
        line = f"{store:<32} {commits:>20} {start or '-':<32} {self._next or '-':<32} {holder:>10}\n"
        os.pwrite(self._descriptors[0], line.encode(), 0)


# Those of earlier versions know of no starts.
_NOTE = re.compile(rb"([0-9a-f]{32}|-) +(\d+) +(?:([0-9a-f]{32}|-) +([0-9a-f]{32}|-) +)?\d+\n")


def _parsed(line: bytes) -> tuple[Identity | None, str | None] | None:
    """The store that is noted, and the start that may write to it next; None: the note is damaged."""
    found = _NOTE.match(line)
    if found is None:
        return None
    store, commits, start, following = (None if field in (None, b"-") else field.decode() for field in found.groups())
    return (None if store is None else Identity(store, int(commits or 0), start)), following


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_open_here: set[tuple[int, int] | None] = set()  # inodes of the stores that engines of this process have open
_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked child shares the locks with its parent, and would keep them after the parent was killed.
    for lock in list(_locks):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)

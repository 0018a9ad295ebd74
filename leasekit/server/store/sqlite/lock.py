"""Locks: keep a store to one engine, and detect another file in its place by the note in `<store>.id`.

Rule 1: the lock on the store's own inode keeps out a server that opens it by another path. Every descriptor of the file
stays open as long as SQLite may have the file open in this process: closing one would drop SQLite's own locks (POSIX
locks belong to the process). So a second engine of this process is refused before it opens the file.
Rule 2: the lock on `<store>.id`, beside the store, keeps out a server that finds another file under the same path.
Rule 3: `<store>.id` never counts more transactions than are synced in the store.
Rule 4: each start has a name. The store contains the name of the last start that wrote to it; `<store>.id` contains it
too, and in advance that of the start that may write next. A copy that was served elsewhere contains another name.
Rule 5: a `leasekit serve` has a lock on `<store>.serve` from before it opens the store until after it has closed it.
Meanwhile other processes of its user leave the store to it; so it gets the store from one that has it open.

The kernel drops all locks when the process dies, however it dies.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from leasekit.errors import ConfigError, StoreDamaged, StoreLocked, Unavailable

_TRIES = 10  # to reserve a store
_PAUSE = 0.05  # seconds between two of them


def one_user(path: Path) -> str:
    """Say what to do if this process may not open the store, or not join the process that has it open."""
    owner = "its owner"
    with contextlib.suppress(OSError, KeyError):  # the user has no name
        owner += f", {(path if path.exists() else path.parent).owner()}"
    return (
        "all processes that share this file must run as one user, who may write to its directory: run this one as "
        f"{owner}, or chown the file and those beside it; processes of other users connect to the URL of a server, "
        "'leasekit serve'"
    )


class Identity(NamedTuple):
    """The identity of a store, and the point in its history that it has reached."""

    id: str
    commits: int  # the number of transactions that have changed the store
    start: str | None
    """The start in which the last of these was written; None: only an earlier version has written to the store."""


class FileLock:
    """The locks of one store, and the identity in `<store>.id`. `path` must not contain symbolic links."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(path.name + ".id")
        self._descriptors: list[int] = []
        self._inode: tuple[int, int] | None = None
        self._noted: Identity | None = None
        self._next: str | None = None  # the start that may write next; None: noted by an earlier version
        self._is_cut = False  # `<store>.id` exists and is empty
        _locks.add(self)

    def acquire(self) -> None:
        """Take both locks; create the file if it does not exist.

        Raises `StoreLocked` if another engine has the store open, in any process, `StoreDamaged` if the file was there
        before and is missing or empty now, `ConfigError` if it has more than one name, and `OSError`.
        """
        is_new = not self._beside.exists()
        beside = self._lock(self._beside)
        if is_new:
            self._write_note(os.getpid())
        self._read_note(beside)
        self._check_file()
        inode = _inode(os.fstat(self._lock(self._path)))
        _open_here.add(inode)
        self._inode = inode
        if not self._is_cut:  # else `check` must still judge the empty note
            self._write_note(os.getpid())

    def check(self, identity: Identity | None) -> None:
        """Raise `StoreDamaged` if the store differs from the note in `<store>.id`; `identity` is its identity."""
        noted, name = self._noted, self._path.name
        if self._is_cut and identity is not None and identity.commits:
            raise self._damaged()
        if noted is None:
            return
        if identity is None or identity.id != noted.id:
            raise StoreDamaged(
                f"{name!r} is another store than the one that {self._beside.name} belongs to: put that one back, or "
                f"delete {self._beside.name} to use this one"
            )
        if identity.commits < noted.commits:
            raise StoreDamaged(
                f"the store {name!r} has lost its last {noted.commits - identity.commits} transactions: the "
                f"log {name}-wal is missing, or an older copy is in its place. Put the log back beside it; to continue "
                f"without the lost transactions, as with a backup, delete {self._beside.name}"
            )
        if self._next is not None and identity.start not in (noted.start, self._next):
            raise StoreDamaged(
                f"the file {name!r} is a copy of the store that was served elsewhere: put back the store that was "
                f"served here, or delete {self._beside.name} to use the copy"
            )

    def begin(self, identity: Identity, start: str) -> None:
        """Note the synced identity of the store, and that this start may write to it. Raises `OSError`."""
        self._noted, self._next = identity, start
        self._write_note(os.getpid())
        os.fsync(self._descriptors[0])
        _sync_directory(self._path.parent)

    def note(self, identity: Identity) -> None:
        """Note the synced identity of the store. Errors are ignored: an older note is safe."""
        self._noted = identity
        with contextlib.suppress(OSError):
            self._write_note(os.getpid())

    def check_place(self) -> None:
        """Raise `Unavailable` if another file, or none, is at the path: what is written would be lost."""
        with contextlib.suppress(OSError):
            if _inode(self._path.stat()) == self._inode:
                return
        raise Unavailable(
            f"the store {str(self._path)!r} was moved, deleted or replaced while this process served it: put it back "
            "together with its -wal, or restart this process"
        )

    def release(self) -> None:
        """Release both locks; call this method after SQLite has closed the store."""
        _open_here.discard(self._inode)
        self._inode = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _read_note(self, beside: int) -> None:
        line = os.pread(beside, 200, 0)
        self._is_cut = not line
        note = _parsed(line) if line else (None, None)
        if note is None:
            raise self._damaged()
        self._noted, self._next = note

    def _damaged(self) -> StoreDamaged:
        return StoreDamaged(
            f"{self._beside.name} is damaged, so it is unknown whether {self._path.name!r} is the store that was "
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

    def _check_file(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            status = None
        if self._noted is not None and (status is None or not status.st_size):
            raise StoreDamaged(
                f"the store {self._path.name!r} is empty or missing, but was not before: put it back, or put a backup "
                f"back and delete {self._beside.name}; to begin with an empty store, delete {self._beside.name}"
            )
        if status is None:
            return
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            raise ConfigError(
                f"the store {str(self._path)!r} has {status.st_nlink} names (hard links), and SQLite would keep a "
                "write-ahead log for each name: remove the others"
            )
        if _inode(status) in _open_here:
            raise self._locked()

    def _locked(self) -> StoreLocked:
        try:
            holder = self._beside.read_text(errors="replace").partition("\n")[0].split()[-1:]
        except OSError:
            holder = []
        return StoreLocked(
            f"another process has the store {self._path.name!r} open (process {holder[0] if holder else 'unknown'}): "
            "stop it, or connect to the store, which joins it"
        )

    def _write_note(self, holder: int) -> None:
        # Of constant length, in one call: no reader and no crash can find half a note.
        store, commits, start = self._noted or Identity("-", 0, None)
        line = f"{store:<32} {commits:>20} {start or '-':<32} {self._next or '-':<32} {holder:>10}\n"
        os.pwrite(self._descriptors[0], line.encode(), 0)


# Notes of earlier versions contain no starts.
_NOTE = re.compile(rb"([0-9a-f]{32}|-) +(\d+) +(?:([0-9a-f]{32}|-) +([0-9a-f]{32}|-) +)?\d+\n")


def _parsed(line: bytes) -> tuple[Identity | None, str | None] | None:
    """Parse a note into the store and the start that may write to it next; None: the note is damaged."""
    note = _NOTE.match(line)
    if note is None:
        return None
    store, commits, start, following = (None if field in (None, b"-") else field.decode() for field in note.groups())
    return (None if store is None else Identity(store, int(commits or 0), start)), following


def is_open_here(path: Path) -> bool:
    """Return whether this process has the store at this path open."""
    with contextlib.suppress(OSError):
        return _inode(path.stat()) in _open_here
    return False


@contextlib.contextmanager
def reserved(path: Path) -> Generator[bool]:
    """Reserve the store at this path for a server until the block ends.

    False: another server has reserved it, or it is of another user, whose processes could not join this server.
    """
    descriptor: int | None = None
    with contextlib.suppress(OSError):  # the store itself cannot be opened then, which has a message
        if not path.exists() or path.stat().st_uid == os.geteuid():
            descriptor = os.open(_reservation(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if descriptor is None:
        yield False
        return
    try:
        yield any(_has_locked(descriptor) for _ in range(_TRIES))
    finally:
        os.close(descriptor)


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_PAUSE)  # a process that looks has the lock for a moment
        return False
    return True


def is_reserved(path: Path) -> bool:
    """Return whether a server of this user has reserved the store at this path."""
    try:
        descriptor = os.open(_reservation(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile shares the lock
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _reservation(path: Path) -> Path:
    return path.with_name(path.name + ".serve")


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_open_here: set[tuple[int, int] | None] = set()  # inodes of the stores that this process has open
_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # A forked child shares the locks with its parent, and would keep them after the parent was killed.
    for lock in list(_locks):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)

"""Spool: settlements that could not be reported, on disk, so that they survive the process.

Only settlements that were not accepted at the first try are written, so that the spool costs nothing on good days. A
process has one file, created when it is first needed, locked (flock) as long as the process lives, and removed when all
in it is answered. The next process that serves the same service adopts the files of dead processes: it locks them, and
reports their content. If a file has lines that this version cannot read, it is not removed, but renamed.

Rule 1: a settlement stays in its file until it is answered. Adopting a file moves nothing, so a reader of all files
(`unanswered`) misses no result of a dead process, even if the process that adopts a file dies meanwhile.
Rule 2: a process rewrites only the file that it created, not the files of other processes.

    {"kept": {…a settlement…}}       synced to the disk before `keep` returns
    {"answered": ["id", "token"]}    not synced: to report a settlement twice does no harm

All methods block, and may be called from any thread. They raise `OSError` if the disk fails.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, UnsetType

from leasekit._driver.reporting.encoding import RawSettlement
from leasekit._driver.reporting.service_key import key_of
from leasekit.task import Settlement

logger = logging.getLogger("leasekit")

Key = tuple[str, str]

_SUFFIX = ".jsonl"
_ASIDE = ".unread"
_LONGEST_LINE = 64 * 1024 * 1024  # bytes, eight times the limit of a request: no settlement is longer
_MOST_ADOPTED = 200  # files, each of which is kept open
_ROLL_AT = 1024 * 1024  # bytes: rewriting a shorter file is not worth it


class _Line(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    kept: RawSettlement | UnsetType = UNSET
    answered: Key | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(slots=True, eq=False)
class _Adopted:
    """A file that a dead process has left, locked by this one."""

    path: Path
    fd: int
    kept: dict[Key, Settlement]
    unread: int  # lines that cannot be read

    def mark(self, answered: Sequence[Key]) -> None:
        size = os.fstat(self.fd).st_size
        is_torn = os.pread(self.fd, 1, size - 1) != b"\n"  # its process was killed in the middle of a line
        lines = [msgspec.json.encode({"answered": key}) + b"\n" for key in answered]
        _append(self.fd, b"\n" * is_torn + b"".join(lines), size)

    def end(self) -> None:
        """Close and remove a file whose settlements are all answered. Rename it if it has lines that cannot be read."""
        try:
            if self.unread:
                _set_aside(self.path, self.unread)
            else:
                self.path.unlink(missing_ok=True)  # before the lock is released, or another process would adopt it
        finally:
            os.close(self.fd)


class Spool:
    """The file of this process, in a directory that all workers of a user may share."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory.absolute()
        self._key = key_of(url)
        self._lock = threading.Lock()
        self._file: tuple[Path, int] | None = None
        self._size = 0
        self._kept: dict[Key, tuple[Settlement, int]] = {}  # with their sizes in the file …
        self._live = 0  # … and the sum of these sizes
        self._adopted: list[_Adopted] = []
        _spools.add(self)

    @property
    def directory(self) -> Path:
        return self._directory

    def keep(self, settlements: Sequence[Settlement]) -> None:
        """Write settlements and sync them to the disk. If the disk takes only the first ones, these are kept."""
        with self._lock:
            self._keep(settlements)

    def has(self, settlement: Settlement) -> bool:
        """Return whether this settlement was kept, and is not yet answered. Does not block."""
        return _key(settlement) in self._kept

    def answered(self, settlements: Iterable[Settlement]) -> None:
        """Record that these settlements need not be reported any longer."""
        keys = list(map(_key, settlements))
        with self._lock:
            self._mark_adopted(keys)
            done = [key for key in keys if key in self._kept]
            self._live -= sum(self._kept.pop(key)[1] for key in done)
            if self._file is None or not done:
                return
            if not self._kept:
                os.ftruncate(self._file[1], 0)
                self._size = 0
                return
            for key in done:
                self._write({"answered": key})
            if self._size > max(_ROLL_AT, 4 * self._live):
                self._roll()

    def _mark_adopted(self, keys: Sequence[Key]) -> None:
        """Mark answered settlements in adopted files, and end the files of which all is answered."""
        marks = [(file, [key for key in keys if file.kept.pop(key, None) is not None]) for file in self._adopted]
        while over := next((file for file in self._adopted if not file.kept), None):
            self._adopted.remove(over)  # first: `end` closes the file even if it raises
            over.end()
        for file, answered in marks:
            if answered and file.kept:
                file.mark(answered)

    def adopt(self) -> list[Settlement]:
        """Adopt the files of dead processes. Return their settlements, which this process must report and mark."""
        with self._lock:
            adopted: dict[Key, Settlement] = {}
            for path in self._paths():
                if len(self._adopted) >= _MOST_ADOPTED:
                    logger.warning("%s and the files after it are left to the next process: there are too many", path)
                    break
                try:
                    file = _open_left_behind(path)
                except OSError as error:
                    logger.warning("%s cannot be taken over, and stays: %s", path, error)
                    continue
                if file is not None:
                    adopted |= file.kept
                    self._adopted.append(file)
            return list(adopted.values())

    def unanswered(self) -> set[Key]:
        """Return the keys of settlements without an answer, in the files of all processes. Raises `OSError`."""
        found: set[Key] = set()
        for path in self._paths():
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, PermissionError):  # all was answered meanwhile, or it is another user's
                continue
            try:
                found |= _read(fd)[0].keys()
            finally:
                os.close(fd)
        return found

    def _paths(self) -> list[Path]:
        """Return the files of all processes that serve the same service, sorted; none if there is no directory."""
        try:
            # Not glob, which treats a directory that cannot be read as empty.
            return sorted(
                path
                for path in self._directory.iterdir()
                if path.name.startswith(f"{self._key}.") and path.name.endswith(_SUFFIX)
            )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def close(self) -> None:
        """Close all files. Files with settlements stay, for the next process."""
        with self._lock:
            for file in self._adopted:
                os.close(file.fd)
            self._adopted = []
            if self._file is None:
                return
            path, fd = self._file
            self._file = None
            if self._kept:
                os.close(fd)
            else:
                _remove_and_close(path, fd)

    def forget(self) -> None:
        """Close all files in a forked child: a lock that the child shared would outlive the parent."""
        for file in self._adopted:
            os.close(file.fd)
        self._adopted = []
        if self._file is not None:
            os.close(self._file[1])
            self._file = None

    def _keep(self, settlements: Iterable[Settlement]) -> None:
        fresh = {_key(settlement): settlement for settlement in settlements if _key(settlement) not in self._kept}
        if not fresh:
            return
        written: dict[Key, tuple[Settlement, int]] = {}
        try:
            for key, settlement in fresh.items():
                written[key] = settlement, self._write({"kept": settlement})
        finally:  # if the disk is full, what it took is not written again with the next try
            if written and self._file is not None:
                os.fsync(self._file[1])
                self._kept |= written
                self._live += sum(size for _, size in written.values())

    def _write(self, line: Mapping[str, object]) -> int:
        if self._file is None:
            self._file = self._create_file()
        # JSON needs no newlines, but users' values are kept byte by byte and may contain line breaks between tokens.
        data = msgspec.json.encode(line).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
        _append(self._file[1], data, self._size)
        self._size += len(data)
        return len(data)

    def _roll(self) -> None:
        """Move the settlements without an answer into a new file, because most of the old one is answered."""
        assert self._file is not None  # noqa: S101 - this file is too long
        before, file = (self._file, self._size, self._kept, self._live), self._create_file()
        self._file, self._size, self._kept, self._live = file, 0, {}, 0
        try:
            self._keep([settlement for settlement, _ in before[2].values()])
        except OSError:  # the old file still has all of it
            self._file, self._size, self._kept, self._live = before
            _remove_and_close(*file)
            raise
        _remove_and_close(*before[0])

    def _create_file(self) -> tuple[Path, int]:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            path = self._directory / f"{self._key}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(fd).st_nlink:  # else another process adopted the file before it was locked
                        _sync_directory(self._directory)
                        return path, fd
            except OSError:  # a file system without locks, for example
                _remove_and_close(path, fd)
                raise
            os.close(fd)


def _append(fd: int, data: bytes, size: int) -> None:
    """Append all of `data` to a file of `size` bytes, or nothing."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, size)  # the next line must not begin in the middle of this one
        raise


def _open_left_behind(path: Path) -> _Adopted | None:
    """Return the file at `path`, locked; None if it is no spool file, a living process has it, or all is answered."""
    try:
        # NFS locks only files opened for writing. O_NONBLOCK: reading a pipe of that name would wait for ever.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        file = _Adopted(path, fd, *_read(fd)) if _lock_if_left_behind(fd) else None
    except BaseException:
        os.close(fd)
        raise
    if file is None:
        os.close(fd)
        return None
    if not file.kept:
        file.end()
        return None
    return file


def _lock_if_left_behind(fd: int) -> bool:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a living process has it, or the file system has no locks
        return False
    status = os.fstat(fd)
    return bool(status.st_nlink) and status.st_uid == os.geteuid()


def _read(fd: int) -> tuple[dict[Key, Settlement], int]:
    """Return the settlements without an answer, and the number of torn, damaged or unknown lines."""
    kept: dict[Key, Settlement] = {}
    unread = 0
    with open(fd, "rb", closefd=False) as file:
        while data := file.readline(_LONGEST_LINE):
            line = _parsed_line(data)
            if line is None:
                unread += 1
                if len(data) == _LONGEST_LINE:  # this file has no lines, and perhaps no end
                    break
            elif isinstance(line.kept, Settlement):
                kept[_key(line.kept)] = line.kept
            elif isinstance(line.answered, tuple):
                kept.pop(line.answered, None)
    return kept, unread


def _parsed_line(data: bytes) -> _Line | None:
    try:
        line = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if line.kept is UNSET and line.answered is UNSET else line


def _set_aside(path: Path, unread: int) -> None:
    """Rename a file with lines that this version cannot read. The caller holds its lock."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_ASIDE}")
    path.rename(aside)
    logger.warning(
        "%d lines of %s cannot be read: a write was cut short, or another version of leasekit wrote them. The others "
        "are reported, and the file is kept as %s: for the rest, rename it back for a worker of that version",
        unread,
        path,
        aside.name,
    )


def _key(settlement: Settlement) -> Key:
    return settlement.id, settlement.token


def _remove_and_close(path: Path, fd: int) -> None:
    try:
        path.unlink(missing_ok=True)  # first: as long as the file is locked, no other process adopts it
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_spools: weakref.WeakSet[Spool] = weakref.WeakSet()


def _forget_in_child() -> None:
    for spool in list(_spools):
        spool.forget()


os.register_at_fork(after_in_child=_forget_in_child)

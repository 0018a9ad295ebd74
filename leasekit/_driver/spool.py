"""Settlements that could not be reported, on disk: they survive the process that could not report them.

Only what was not accepted at the first try comes here, so that good days cost nothing. A spool is one file of its
process, made when it is first needed, locked (flock) as long as the process lives, and gone when all is answered. The
files of dead processes are adopted by the next process that serves the same service: it locks them, and reports what
they hold. A file of which this version cannot read all is kept aside at the end, under another name.

Rule 1: what was kept stays in the file where its process left it until it is answered. Adopting a file moves nothing,
so that a look at all files (`unanswered`) misses no result of a dead process, whoever adopts and dies meanwhile.
Rule 2: only the process that made a file writes it anew, and not what other processes have left.

    {"kept": {…a settlement…}}       synced to the disk before `keep` returns
    {"answered": ["id", "token"]}    not synced: to report a settlement twice does no harm

All methods block, and may be called from any thread. Raises `OSError` where the disk does not take it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from leasekit.task import NewTask, Settlement

__all__ = ["Spool", "key_of"]

logger = logging.getLogger("leasekit")

Key = tuple[str, str]

_SUFFIX = ".jsonl"
_ASIDE = ".unread"
_LONGEST_LINE = 64 * 1024 * 1024  # bytes, eight times what a request may have: no settlement is longer
_MOST_ADOPTED = 200  # files, each of which is an open one of this process
_ROLL_AT = 1024 * 1024  # bytes: a shorter file is not worth being written anew


class _Successor(NewTask, frozen=True, kw_only=True, omit_defaults=True):
    payload: Raw = field(default_factory=lambda: Raw(b"null"))


class _Kept(Settlement, frozen=True, kw_only=True, omit_defaults=True):
    """Users' values stay the bytes that were to be sent: a repeat must be the same to the byte."""

    result: Raw = field(default_factory=lambda: Raw(b"null"))
    error: Raw = field(default_factory=lambda: Raw(b"null"))
    progress: Raw | UnsetType = UNSET
    then: list[_Successor] = []  # type: ignore[assignment]


class _Line(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    kept: _Kept | UnsetType = UNSET
    answered: Key | UnsetType = UNSET


_decode = msgspec.json.Decoder(_Line).decode


def key_of(url: str) -> str:
    """Which files belong to the service at this URL. Who asks there, and with which password, is no part of it."""
    url = re.sub(r"(?<=//)[^/?#]*@", "", url, count=1)
    if re.match(r"sqlite:///[^/]", url):  # a path from where we are
        url = f"{url} {Path.cwd()}"
    return hashlib.sha256(url.encode()).hexdigest()[:16]


@dataclass(slots=True, eq=False)
class _Adopted:
    """A file that a dead process has left, locked by this one."""

    path: Path
    fd: int
    kept: dict[Key, Settlement]
    unread: int  # lines that make no sense

    def mark(self, answered: Sequence[Key]) -> None:
        """Note that these need not be reported any more."""
        size = os.fstat(self.fd).st_size
        is_torn = os.pread(self.fd, 1, size - 1) != b"\n"  # its process was killed in the middle of a line
        lines = [msgspec.json.encode({"answered": key}) + b"\n" for key in answered]
        _append(self.fd, b"\n" * is_torn + b"".join(lines), size)

    def end(self) -> None:
        """Let go of a file of which all was answered: it goes, unless it has what another version can read."""
        try:
            if self.unread:
                _set_aside(self.path, self.unread)
            else:
                self.path.unlink(missing_ok=True)  # before the lock goes, or somebody else takes it up
        finally:
            os.close(self.fd)


class Spool:
    """The file of this process, in a directory that all of a user's workers may share."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory.absolute()
        self._key = key_of(url)
        self._lock = threading.Lock()
        self._file: tuple[Path, int] | None = None
        self._size = 0
        self._kept: dict[Key, tuple[Settlement, int]] = {}  # with their sizes in the file …
        self._live = 0  # … and the sum of them
        self._adopted: list[_Adopted] = []
        _spools.add(self)

    @property
    def directory(self) -> Path:
        """Where it is."""
        return self._directory

    def keep(self, settlements: Sequence[Settlement]) -> None:
        """When this returns, they are on the disk."""
        with self._lock:
            self._keep(settlements)

    def answered(self, settlements: Iterable[Settlement]) -> None:
        """These need not be reported any more."""
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
        marks = [(file, [key for key in keys if file.kept.pop(key, None) is not None]) for file in self._adopted]
        while over := next((file for file in self._adopted if not file.kept), None):
            self._adopted.remove(over)  # first: it is closed whatever happens
            over.end()
        for file, answered in marks:
            if answered and file.kept:
                file.mark(answered)

    def adopt(self) -> list[Settlement]:
        """What dead processes have left behind: this process's to report from now on, and to note as answered."""
        with self._lock:
            adopted: dict[Key, Settlement] = {}
            for path in self._files():
                if len(self._adopted) >= _MOST_ADOPTED:
                    logger.warning("%s and what follows it are left to the next process: there is too much", path)
                    break
                try:
                    file = _left_behind(path)
                except OSError as error:
                    logger.warning("%s stays where it is: %s", path, error)
                    continue
                if file is not None:
                    adopted |= file.kept
                    self._adopted.append(file)
            return list(adopted.values())

    def unanswered(self) -> set[Key]:
        """What all files hold that is not answered, whichever process has them.

        Raises `OSError` where one cannot be read: then nobody can say what is in it.
        """
        found: set[Key] = set()
        for path in self._files():
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, PermissionError):  # all of it was answered meanwhile; or it is another user's
                continue
            try:
                found |= _read(fd)[0].keys()
            finally:
                os.close(fd)
        return found

    def _files(self) -> list[Path]:
        try:
            # Not glob, which takes a directory that cannot be read for an empty one.
            return sorted(
                path
                for path in self._directory.iterdir()
                if path.name.startswith(f"{self._key}.") and path.name.endswith(_SUFFIX)
            )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def close(self) -> None:
        """Let go of all files. They stay where there is something in them, for the next process."""
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
                _remove(path, fd)

    def forget(self) -> None:
        """In a forked child: a lock that it shared would outlive the parent."""
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
        sizes = [self._write({"kept": settlement}) for settlement in fresh.values()]
        assert self._file is not None  # noqa: S101 - it was written to
        os.fsync(self._file[1])
        self._kept |= dict(zip(fresh, zip(fresh.values(), sizes, strict=True), strict=True))
        self._live += sum(sizes)

    def _write(self, line: Mapping[str, object]) -> int:
        """Append it; returns its size."""
        if self._file is None:
            self._file = self._made()
        # JSON has no bare newline, but the bytes that users' values came in may be laid out over lines.
        data = msgspec.json.encode(line).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n"
        _append(self._file[1], data, self._size)
        self._size += len(data)
        return len(data)

    def _roll(self) -> None:
        """Most of the file has been answered: what has not goes into a new one, which takes its place."""
        assert self._file is not None  # noqa: S101 - that is what is long
        before, file = (self._file, self._size, self._kept, self._live), self._made()
        self._file, self._size, self._kept, self._live = file, 0, {}, 0
        try:
            self._keep([settlement for settlement, _ in before[2].values()])
        except OSError:  # the old one has all of it
            self._file, self._size, self._kept, self._live = before
            _remove(*file)
            raise
        _remove(*before[0])

    def _made(self) -> tuple[Path, int]:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            path = self._directory / f"{self._key}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(fd).st_nlink:  # else somebody took it for left behind before it was locked
                        _sync_directory(self._directory)
                        return path, fd
            except OSError:  # a file system that locks nothing, say
                _remove(path, fd)
                raise
            os.close(fd)


def _append(fd: int, data: bytes, size: int) -> None:
    """Write all of it at the end of a file of this size, or nothing."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, size)  # what comes next must not begin in the middle of a line
        raise


def _left_behind(path: Path) -> _Adopted | None:
    """The file at `path`, locked; None where it is no file of ours, a living process has it, or nothing is in it."""
    try:
        # NFS locks nothing that is only read; and whoever reads a pipe of that name waits for ever.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        file = _Adopted(path, fd, *_read(fd)) if _is_left_behind(fd) else None
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


def _is_left_behind(fd: int) -> bool:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a living process has it, or nothing can be locked there
        return False
    status = os.fstat(fd)
    return bool(status.st_nlink) and status.st_uid == os.geteuid()


def _read(fd: int) -> tuple[dict[Key, Settlement], int]:
    """What is in it and not answered, and how many lines make no sense: torn, damaged, or of another version."""
    kept: dict[Key, Settlement] = {}
    unread = 0
    with open(fd, "rb", closefd=False) as file:
        while data := file.readline(_LONGEST_LINE):
            line = _line(data)
            if line is None:
                unread += 1
                if len(data) == _LONGEST_LINE:  # whatever this file is, it has no lines, and perhaps no end
                    break
            elif isinstance(line.kept, Settlement):
                kept[_key(line.kept)] = line.kept
            elif isinstance(line.answered, tuple):
                kept.pop(line.answered, None)
    return kept, unread


def _line(data: bytes) -> _Line | None:
    try:
        line = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if line.kept is UNSET and line.answered is UNSET else line


def _set_aside(path: Path, unread: int) -> None:
    """Keep a file that holds what this version cannot read. Its lock is held."""
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


def _remove(path: Path, fd: int) -> None:
    try:
        path.unlink(missing_ok=True)  # first: as long as it is locked, nobody else takes it up
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_spools: weakref.WeakSet[Spool] = weakref.WeakSet()


def _forget() -> None:
    for spool in list(_spools):
        spool.forget()


os.register_at_fork(after_in_child=_forget)

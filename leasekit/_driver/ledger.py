"""What this process holds, written where it outlives the process: for the supervisor that sees it end.

The ledger is memory that both share. The worker notes a lease there when it is granted, when its body begins, and takes
it out when it is over: some hundred nanoseconds each, without a system call, and a supervisor that is stopped or slow
holds nothing up. Who is killed between two bytes leaves a ledger that says the truth about all leases but that one. The
supervisor reads it only when the worker has been reaped.

    header   who held, of which service: written once, when there is a connection
    entries  one for each lease, of fixed room, used again: state, room, length and length, id and token;
             and one for each claim that is under way: what was granted to nobody is given back too;
             and one for each lease with progress that its service has not acknowledged, up to 64 MiB in all

Rule 1: a body is noted as begun before its first line: who killed his process must not pass for one who never began.
Rule 2: an entry is filled before its state says so, and its state is the first to go.
"""

import logging
import math
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from leasekit.task import Settlement

__all__ = ["Asked", "Holder", "Ledger", "Left", "Past", "SharedMemory"]

logger = logging.getLogger("leasekit")

_MAGIC = b"LEASEKT1"
_SIGNALS = len(_MAGIC)  # one byte: how many signals the supervisor has heard …
_HEARD = _SIGNALS + 1  # … and one: how many the worker has, passed on or not
_LENGTH = struct.Struct("<I")
_HOLDER = _SIGNALS + 4
_ENTRIES = 16 * 1024  # where they begin: before, there is room for the header
_ENTRY = struct.Struct("<BBHI")  # state, log2 of the room, lengths of the id and of what follows it
_LEAST_ROOM = 6
_NOWHERE = 0  # an entry that there is no room for
_FREE, _HELD, _BEGUN, _SAID, _BEGUN_ELSEWHERE, _ASKED, _PROGRESS = range(7)
_MOST_FOR_PROGRESS = 64 * 1024 * 1024  # bytes of a ledger: above, progress is left to beats alone


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who held the leases, and where they are handed back."""

    worker: str
    url: str | None = None  # None: a backend object, which is nowhere but in that process
    guarded: bool = False
    spool: str | None = None


class Left(NamedTuple):
    """A lease that was held when the process ended."""

    task_id: str
    token: str
    begun: bool
    elsewhere: bool = False  # its body ran in another process: this one may have lived on after its lease
    progress: Any = UNSET  # the latest that was noted, where the service may not have it …
    progress_seq: int | None = None  # … and its number: a beat may have brought a later one there


class Asked(NamedTuple):
    """A claim that was under way: what it was granted, nobody has heard."""

    claim_id: str
    kinds: list[str]


class Past(NamedTuple):
    """What a process has left behind. No holder: it had never come to work."""

    holder: Holder | None
    leases: list[Left]
    said: list[Settlement]  # what it wanted to be reported once nothing of it runs any more
    asked: list[Asked]

    @property
    def is_empty(self) -> bool:
        """True where there is nothing to be handed back."""
        return not (self.leases or self.said or self.asked)


class SharedMemory:
    """The memory of a ledger, as the supervisor has it: given to one worker, and read when that has ended."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("leasekit-ledger", os.MFD_CLOEXEC)
        os.posix_fallocate(self.fd, 0, _ENTRIES)
        self._header = mmap.mmap(self.fd, _ENTRIES)
        self._header[: len(_MAGIC)] = _MAGIC

    def signalled(self) -> bool:
        """Note one more signal; false where the worker has heard as many, so that it need not be passed on."""
        self._header[_SIGNALS] = min(255, self._header[_SIGNALS] + 1)
        return self._header[_SIGNALS] > self._header[_HEARD]

    @property
    def used(self) -> bool:
        """True once the worker has come to work."""
        return self._holder() is not None

    def read(self) -> Past:
        """What is in it. Only after the worker has been reaped."""
        leases: list[Left] = []
        progress: dict[tuple[str, str], tuple[int, msgspec.Raw]] = {}  # of a lease, with its number
        said: list[Settlement] = []
        asked: list[Asked] = []
        with mmap.mmap(self.fd, 0, prot=mmap.PROT_READ) as memory:
            at = _ENTRIES
            while at + _ENTRY.size <= len(memory):
                state, room, of_id, of_rest = _ENTRY.unpack_from(memory, at)
                if room < _LEAST_ROOM:  # nothing was ever written from here on
                    break
                begin = at + _ENTRY.size
                task_id, rest = memory[begin : begin + of_id], memory[begin + of_id : begin + of_id + of_rest]
                if state == _SAID:
                    said.append(msgspec.json.decode(rest, type=Settlement))
                elif state == _ASKED:
                    asked.append(Asked(task_id.decode(), msgspec.json.decode(rest, type=list[str])))
                elif state == _PROGRESS:
                    number, token, raw = msgspec.json.decode(rest, type=tuple[int, str, msgspec.Raw])
                    lease = task_id.decode(), token
                    if lease not in progress or progress[lease][0] < number:
                        progress[lease] = number, msgspec.Raw(bytes(raw))
                elif state != _FREE:
                    elsewhere = state == _BEGUN_ELSEWHERE
                    begun = elsewhere or state == _BEGUN
                    leases.append(Left(task_id.decode(), rest.decode(), begun=begun, elsewhere=elsewhere))
                at += 1 << room
        latest = [
            lease._replace(progress=found[1], progress_seq=found[0])
            if (found := progress.get((lease.task_id, lease.token)))
            else lease
            for lease in leases
        ]
        return Past(self._holder(), latest, said, asked)

    def _holder(self) -> Holder | None:
        (length,) = _LENGTH.unpack_from(self._header, _HOLDER)
        begin = _HOLDER + _LENGTH.size
        return msgspec.json.decode(self._header[begin : begin + length], type=Holder) if length else None

    def close(self) -> None:
        self._header.close()
        os.close(self.fd)


class Ledger:
    """The worker's side, with the memory that `fd` is. What is not marked otherwise is for the driver's thread alone.

    Where there is no memory for one more entry it has none: what is not noted runs out by itself.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._full = False
        self._memory = mmap.mmap(fd, 0)
        if self._memory[: len(_MAGIC)] != _MAGIC:
            raise ValueError("this is no ledger")
        self._end = _ENTRIES
        self._spare: defaultdict[int, list[int]] = defaultdict(list)

    def open(self, holder: Holder) -> None:
        """All that is noted from now on is held by this one. ValueError where there is no room for what he says."""
        said = msgspec.json.encode(holder)
        begin = _HOLDER + _LENGTH.size
        if begin + len(said) > _ENTRIES:
            raise ValueError("the URL of the service is too long to be handed back to")
        _LENGTH.pack_into(self._memory, _HOLDER, 0)  # who is killed in between leaves none rather than half of one
        self._memory[begin : begin + len(said)] = said
        _LENGTH.pack_into(self._memory, _HOLDER, len(said))

    def signalled(self, count: int) -> int:
        """Note that this process has heard so many signals; returns how many the supervisor has. Any thread."""
        self._memory[_HEARD] = min(255, count)
        return self._memory[_SIGNALS]

    def add(self, task_id: str, token: str) -> int:
        """Note a lease; returns its entry."""
        return self._add(_HELD, task_id.encode(), token.encode())

    def progress(self, entry: int, task_id: str, token: str, progress: msgspec.Raw, *, number: int) -> int:
        """Note the latest progress of a lease, in place of that at `entry` (0: none); returns its entry.

        Its `number` is above those of that lease before.
        """
        noted = self._add(
            _PROGRESS,
            task_id.encode(),
            msgspec.json.encode((number, token, progress)),
            most=_MOST_FOR_PROGRESS,
        )
        if noted:  # who is killed in between leaves both, and the number says which is the newer
            self.remove(entry)
        return noted or entry

    def asks(self, claim_id: str, kinds: Sequence[str]) -> int:
        """Note a claim, until its answer is noted; returns its entry."""
        return self._add(_ASKED, claim_id.encode(), msgspec.json.encode(kinds))

    def begins(self, entry: int, *, elsewhere: bool = False) -> None:
        """Its body is about to run, here or in another process. Any thread, but not after `remove`."""
        if entry:
            self._memory[entry] = _BEGUN_ELSEWHERE if elsewhere else _BEGUN

    def remove(self, entry: int) -> None:
        """It is over, or not to be handed back."""
        if entry:
            self._memory[entry] = _FREE
            self._spare[self._memory[entry + 1]].append(entry)

    def say(self, entry: int, settlement: Settlement) -> int:
        """Once nothing of this process runs any more, this is to be reported of the lease. Returns its new entry."""
        if said := self._add(_SAID, b"", msgspec.json.encode(settlement)):
            self.remove(entry)
        return said or entry

    def forgive(self) -> None:
        """The process is about to be ended by who runs it: no body is to blame, all are given back. Any thread."""
        at = _ENTRIES
        while at < self._end and (room := self._memory[at + 1]) >= _LEAST_ROOM:  # a fresh one may not be filled yet
            if self._memory[at] in (_BEGUN, _BEGUN_ELSEWHERE):
                self._memory[at] = _HELD
            at += 1 << room

    def _add(self, state: int, task_id: bytes, rest: bytes, *, most: float = math.inf) -> int:
        length = _ENTRY.size + len(task_id) + len(rest)
        room = max(_LEAST_ROOM, (length - 1).bit_length())
        spare = self._spare[room]
        entry = spare.pop() if spare else self._fresh(room, most)
        if not entry:
            return _NOWHERE
        memory = self._memory
        memory[entry : entry + length] = _ENTRY.pack(_FREE, room, len(task_id), len(rest)) + task_id + rest
        memory[entry] = state
        return entry

    def _fresh(self, room: int, most: float) -> int:
        end = self._end + (1 << room)
        if end > most:
            return _NOWHERE
        if end > len(self._memory) and not self._grown(2 * end):
            return _NOWHERE
        entry, self._end = self._end, end
        return entry

    def _grown(self, size: int) -> bool:
        try:
            os.posix_fallocate(self._fd, 0, size)  # else a write finds that there is no memory, and that is a SIGBUS
            self._memory.resize(size)
        except OSError as error:
            if not self._full:
                logger.warning("no more leases can be noted for the supervisor, they run out by themselves: %s", error)
            self._full = True
            return False
        self._full = False
        return True

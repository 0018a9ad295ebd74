"""Ledger: what this process holds, in memory that outlives the process, for the supervisor that sees it end.

Worker and supervisor share the memory. The worker notes a lease when it is granted and when its handler begins, and
removes it when it is over: some hundred nanoseconds each, without a system call, so a stopped or slow supervisor does
not delay the worker. A worker that is killed between two bytes leaves a ledger that is right about all leases but one.
The supervisor reads the ledger only when the worker has been reaped.

    header   the moment to which the kernel's timer is armed; whether the service has answered; the timeout of a drain;
             the holder and its service: written once, when there is a connection
    entries  one for each lease, of fixed room, used again: state, room, two lengths, id and token;
             and one for each claim in progress: tasks that were granted but not received are given back too;
             and one for each lease with progress that its service has not acknowledged, up to 64 MiB in all

Rule 1: a handler is noted as begun before its first line: a run that killed its process must count as begun.
Rule 2: a handler is noted as ended before the kernel's timer ceases to guard it: to a supervisor, the timer proves that
        a lease has not expired.
Rule 3: an entry is filled before its state is set, and on removal the state is cleared first.
"""

import logging
import math
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from leasekit.task import Settlement

logger = logging.getLogger("leasekit")

_MAGIC = b"LEASEKT1"
_SIGNALS = len(_MAGIC)  # one byte: the number of signals that the supervisor has passed on
_ANSWERED = _SIGNALS + 1  # one byte: whether the service has ever answered
_MOMENT = struct.Struct("<d")
_ARMED = 16
_DRAIN = _ARMED + _MOMENT.size  # seconds
_LENGTH = struct.Struct("<I")
_HOLDER = _DRAIN + _MOMENT.size
_ENTRIES = 16 * 1024  # where entries begin: before, there is room for the header
_ENTRY = struct.Struct("<BBHI")  # state, log2 of the room, lengths of the id and of the data after it
_LEAST_ROOM = 6
_NOWHERE = 0  # an entry for which there is no room
_FREE, _HELD, _BEGUN, _SETTLEMENT, _UNGUARDED, _CLAIM, _PROGRESS, _RELEASED = range(8)
_ENDED = {_BEGUN: _UNGUARDED, _RELEASED: _HELD}
_MOST_FOR_PROGRESS = 64 * 1024 * 1024  # bytes of a ledger: above, only heartbeats carry progress


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that held the leases, and the service to which they are handed back."""

    worker: str
    url: str | None = None  # None: a backend object, which exists only in that process
    options: Mapping[str, Any] = {}  # of the client; they may hold credentials, so they are not shown
    guarded: bool = False
    spool: str | None = None

    def __repr__(self) -> str:
        return f"Holder(worker={self.worker!r})"


class Left(NamedTuple):
    """A lease that was held when the process ended."""

    task_id: str
    token: str
    begun: bool
    # Its handler ran in another process, or had ended: this process may have lived on after the lease.
    unguarded: bool = False
    released: bool = False  # its handler ran in this process, and is not to blame for its end
    progress: Any = UNSET  # the latest that was noted, if the service may not have it …
    progress_seq: int | None = None  # … and its number: a heartbeat may have brought later progress


class PendingClaim(NamedTuple):
    """A claim in progress: no code has received the tasks that it was granted."""

    claim_id: str
    kinds: list[str]


class Past(NamedTuple):
    """The content of a ledger, as a process left it. `holder` is None if the process ended before it connected."""

    holder: Holder | None
    leases: list[Left]
    settlements: list[Settlement]  # to be reported once no code of the process runs
    claims: list[PendingClaim]
    armed_at: float | None = None  # by CLOCK_BOOTTIME: when the kernel's timer would kill the process
    answered: bool = False  # whether the service has ever answered the process

    @property
    def is_empty(self) -> bool:
        return not (self.leases or self.settlements or self.claims)


class SharedMemory:
    """The supervisor's side of a ledger: memory that is given to one worker, and read when that worker has ended."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("leasekit-ledger", os.MFD_CLOEXEC)
        os.posix_fallocate(self.fd, 0, _ENTRIES)
        self._header = mmap.mmap(self.fd, _ENTRIES)
        self._header[: len(_MAGIC)] = _MAGIC
        _MOMENT.pack_into(self._header, _DRAIN, math.inf)

    def count_signal(self) -> None:
        """Count a signal that the supervisor is about to pass on."""
        self._header[_SIGNALS] = min(255, self._header[_SIGNALS] + 1)

    @property
    def drain_timeout(self) -> float:
        """The seconds after its first signal in which the worker ends, as it has noted them."""
        return float(_MOMENT.unpack_from(self._header, _DRAIN)[0])

    def read(self) -> Past:
        """Return the content. Call this only after the worker has been reaped."""
        leases: list[Left] = []
        progress: dict[tuple[str, str], tuple[int, msgspec.Raw]] = {}  # by lease, with its number
        settlements: list[Settlement] = []
        claims: list[PendingClaim] = []
        for state, task_id, rest in self._entries():
            if state == _SETTLEMENT:
                settlements.append(msgspec.json.decode(rest, type=Settlement))
            elif state == _CLAIM:
                claims.append(PendingClaim(task_id, msgspec.json.decode(rest, type=list[str])))
            elif state == _PROGRESS:
                number, token, raw = msgspec.json.decode(rest, type=tuple[int, str, msgspec.Raw])
                if (task_id, token) not in progress or progress[task_id, token][0] < number:
                    progress[task_id, token] = number, msgspec.Raw(bytes(raw))
            else:
                unguarded, begun = state == _UNGUARDED, state in (_BEGUN, _UNGUARDED)
                released = state == _RELEASED
                leases.append(Left(task_id, rest.decode(), begun=begun, unguarded=unguarded, released=released))
        for place, left in enumerate(leases):
            seq, latest = progress.get((left.task_id, left.token), (None, UNSET))
            leases[place] = left._replace(progress=latest, progress_seq=seq)
        (armed_at,) = _MOMENT.unpack_from(self._header, _ARMED)
        return Past(self._holder(), leases, settlements, claims, armed_at or None, bool(self._header[_ANSWERED]))

    def _entries(self) -> Iterator[tuple[int, str, bytes]]:
        """Yield state, task id and the rest of each entry that is in use."""
        with mmap.mmap(self.fd, 0, prot=mmap.PROT_READ) as memory:
            at = _ENTRIES
            while at + _ENTRY.size <= len(memory):
                state, room, of_id, of_rest = _ENTRY.unpack_from(memory, at)
                if room < _LEAST_ROOM:  # no entry was ever written from here on
                    return
                begin = at + _ENTRY.size
                rest = begin + of_id
                if state != _FREE:
                    yield state, memory[begin:rest].decode(), memory[rest : rest + of_rest]
                at += 1 << room

    def _holder(self) -> Holder | None:
        (length,) = _LENGTH.unpack_from(self._header, _HOLDER)
        begin = _HOLDER + _LENGTH.size
        return msgspec.json.decode(self._header[begin : begin + length], type=Holder) if length else None

    def close(self) -> None:
        self._header.close()
        os.close(self.fd)


class Ledger:
    """The worker's side, on the memory of `fd`. Methods are for the driver's thread unless they say "any thread".

    Where there is no memory for an entry, none is made: a lease that is not noted expires by itself.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._full = False
        self._memory = mmap.mmap(fd, 0)
        if self._memory[: len(_MAGIC)] != _MAGIC:
            raise ValueError("this memory is not a ledger")
        self._end = _ENTRIES
        self._spare: defaultdict[int, list[int]] = defaultdict(list)

    def open(self, holder: Holder) -> None:
        """Write the holder of all later entries. Raises ValueError if the header has no room for it."""
        try:
            said = msgspec.json.encode(holder, enc_hook=os.fspath)  # of the options, `ca` may be a path
        except TypeError:  # another process cannot be given these options
            said = msgspec.json.encode(msgspec.structs.replace(holder, url=None, options={}))
        begin = _HOLDER + _LENGTH.size
        if begin + len(said) > _ENTRIES:
            raise ValueError(
                "the URL and the options of the service are too long for the ledger of the supervisor: shorten them"
            )
        _LENGTH.pack_into(self._memory, _HOLDER, 0)  # killed in between, a process leaves no holder, not half of one
        self._memory[begin : begin + len(said)] = said
        _LENGTH.pack_into(self._memory, _HOLDER, len(said))

    @property
    def signals(self) -> int:
        """The number of signals that the supervisor has passed on. Any thread."""
        return self._memory[_SIGNALS]

    def note_answer(self) -> None:
        """Note that the service has answered."""
        self._memory[_ANSWERED] = 1

    def note_drain(self, timeout: float) -> None:
        """Note that this process ends within so many seconds after its first signal, or hangs. Any thread."""
        _MOMENT.pack_into(self._memory, _DRAIN, timeout)

    def arm(self, at: float | None) -> None:
        """Note when the kernel's timer will kill this process; None: it is not armed. One thread at a time."""
        _MOMENT.pack_into(self._memory, _ARMED, at or 0.0)

    def add(self, task_id: str, token: str) -> int:
        return self._add(_HELD, task_id.encode(), token.encode())

    def progress(self, entry: int, task_id: str, token: str, progress: msgspec.Raw, *, number: int) -> int:
        """Note a lease's latest progress, in place of `entry` (0: none); return the new entry. `number` must grow."""
        noted = self._add(
            _PROGRESS, task_id.encode(), msgspec.json.encode((number, token, progress)), most=_MOST_FOR_PROGRESS
        )
        if noted:  # a process killed in between leaves both, and the numbers say which is newer
            self.remove(entry)
        return noted or entry

    def record_claim(self, claim_id: str, kinds: Sequence[str]) -> int:
        """Note a claim, until its answer is noted; return its entry."""
        return self._add(_CLAIM, claim_id.encode(), msgspec.json.encode(kinds))

    def begins(self, entry: int, *, elsewhere: bool = False) -> None:
        """Note that a handler is about to run, here or in another process. Any thread, but not after `remove`."""
        if entry:
            self._memory[entry] = _UNGUARDED if elsewhere else _BEGUN

    def ends(self, entry: int) -> None:
        """Note that the handler has ended: the kernel's timer guards it no longer. Any thread.

        Call this before the timer is disarmed. An entry that was removed meanwhile, or is another lease's, is left.
        """
        if entry and self._memory[entry] in _ENDED:
            self._memory[entry] = _ENDED[self._memory[entry]]

    def pauses(self, entry: int) -> None:
        """Note that none of the handler's code runs before the next `begins`. As for `begins`."""
        if entry:
            self._memory[entry] = _HELD

    def remove(self, entry: int) -> None:
        """Remove an entry: its lease or claim is over, or must not be handed back."""
        if entry:
            self._memory[entry] = _FREE
            self._spare[self._memory[entry + 1]].append(entry)

    def record_settlement(self, entry: int, settlement: Settlement) -> int:
        """Note what to report of a lease once no code of this process runs. Return its new entry."""
        if said := self._add(_SETTLEMENT, b"", msgspec.json.encode(settlement)):
            self.remove(entry)
        return said or entry

    def mark_released(self) -> None:
        """Note that the process is ended from outside: no handler is to blame, all tasks are released. Any thread."""
        at = _ENTRIES
        while at < self._end and (room := self._memory[at + 1]) >= _LEAST_ROOM:  # a fresh entry may not be filled yet
            if self._memory[at] == _BEGUN:
                self._memory[at] = _RELEASED
            elif self._memory[at] == _UNGUARDED:
                self._memory[at] = _HELD
            at += 1 << room

    def _add(self, state: int, task_id: bytes, rest: bytes, *, most: float = math.inf) -> int:
        """Write an entry and return its position; `_NOWHERE` if the ledger would grow beyond `most` bytes or memory."""
        length = _ENTRY.size + len(task_id) + len(rest)
        room = max(_LEAST_ROOM, (length - 1).bit_length())
        spare = self._spare[room]
        entry = spare.pop() if spare else self._new_entry(room, most)
        if not entry:
            return _NOWHERE
        memory = self._memory
        memory[entry : entry + length] = _ENTRY.pack(_FREE, room, len(task_id), len(rest)) + task_id + rest
        memory[entry] = state
        return entry

    def _new_entry(self, room: int, most: float) -> int:
        """Take 2**`room` bytes at the end of the ledger; return their position, or `_NOWHERE` without memory."""
        end = self._end + (1 << room)
        if end > most:
            return _NOWHERE
        if end > len(self._memory) and not self._grow(2 * end):
            return _NOWHERE
        entry, self._end = self._end, end
        return entry

    def _grow(self, size: int) -> bool:
        try:
            os.posix_fallocate(self._fd, 0, size)  # else a write into missing memory would raise SIGBUS
            self._memory.resize(size)
        except OSError as error:
            if not self._full:
                logger.warning("no more leases can be noted for the supervisor, they expire by themselves: %s", error)
            self._full = True
            return False
        self._full = False
        return True

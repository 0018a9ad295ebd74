"""Directory: the workers that a node has heard of, when, and the kinds that they claim; and the nodes themselves.

The nodes that share a store write their workers into their signs, so that each lists the workers of all.

Rule 1: a directory is bounded. Beyond that, the access token with most forgets the workers that it has not heard of for
longest: a token below its share forgets none, whatever names and kinds another one makes up. A worker counts for the
token of its last claim.
Rule 2: whose name it was is not forgotten. A name that comes back was also used by somebody unknown.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from sys import getsizeof
from typing import NamedTuple

import msgspec
from msgspec import Struct

from leasekit.server.fair_bound import FairBound
from leasekit.server.roles.frontend import moment
from leasekit.server.store import DrainRow, Holding, Node, NodeRow
from leasekit.task import NodeInfo, WorkerInfo
from leasekit.wire import WorkerWindow

SEEN_FOR = 600.0
"""Seconds for which a worker without leases is listed."""
_MOST = 64 * 1024 * 1024  # bytes of all workers, about: five thousand with fifty kinds of a hundred characters each
_OF_WORKER = 2048  # bytes of one, beside its name, kinds and labels: there are 32,000 at most
_OF_WORD = 50  # bytes of a kind or a label, beside its characters
_KINDS = 1000  # of one worker, at most: a named lease is a kind of its own
_TOKENS = 8  # that are noted of one worker: its own, and some that came before
_BYTES = 262_144  # of what a node writes of its workers
_RATE = 20_000  # bytes a second that it writes, on average
_PAGE = 1_000_000  # characters of kinds in one page of workers
_BITS = 2**25  # of a filter of names: of two million, it takes one new name in fifty for one of them


class Heard(Struct, frozen=True, array_like=True):
    """A worker, as a node has heard of it."""

    name: str
    at: float
    kinds: list[str] | None
    labels: dict[str, str] | None = None
    window: WorkerWindow | None = None
    tokens: list[str] = []
    """The access tokens that have used the name."""


class Start(NamedTuple):
    """The start of a worker, as a claim has told it."""

    at: float = -math.inf
    caller: str = ""
    """The access token of the claim, as in `Roster.tokens`."""


class Claims(NamedTuple):
    """The kinds that a worker claims, and its labels."""

    name: str
    kinds: Collection[str] | None
    labels: Mapping[str, str]


_LONG_AGO = Start()
_NO_LABELS: Mapping[str, str] = {}
_ANYBODY = frozenset([""])  # who uses the name of a worker of which no request was heard
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Heard]).decode
_OTHERS = _encode(("", 0, None))  # in place of workers that are left out


class _Known(NamedTuple):
    """A worker of this node. Nothing in it is changed in place: other threads read it."""

    at: float  # when it was last heard of
    tokens: frozenset[str]  # the access tokens that have used the name
    caller: str  # for whom it counts
    size: int  # bytes, about
    kinds: Mapping[str, None] | None = None  # the one that was claimed last at the end
    labels: Mapping[str, str] = _NO_LABELS  # of its last claim
    window: WorkerWindow | None = None
    start: Start = _LONG_AGO


class _Filter:
    """Names: whether one was added in the last ten minutes. Some that were not seem so too (a Bloom filter)."""

    def __init__(self) -> None:
        self._sets: list[bytearray] = []  # the latest first
        self._turn_at = -math.inf

    def add(self, name: str, now: float) -> None:
        self._turn(now)
        if now >= self._turn_at:
            self._turn_at = now + SEEN_FOR
            self._sets = [bytearray(_BITS // 8), *self._sets[:1]]
        for byte, bit in self._places(name):
            self._sets[0][byte] |= bit

    def may_have(self, name: str, now: float) -> bool:
        self._turn(now)
        return any(all(each[byte] & bit for byte, bit in self._places(name)) for each in self._sets)

    def has_any(self, now: float) -> bool:
        self._turn(now)
        return bool(self._sets)

    def _turn(self, now: float) -> None:
        """Forget what was added long ago."""
        if self._sets and now >= self._turn_at + SEEN_FOR:
            self._sets = []

    def _places(self, name: str) -> list[tuple[int, int]]:
        number = hash(name)
        return [(place >> 3, 1 << (place & 7)) for place in (number % _BITS, (number >> 32) % _BITS)]


class Directory:
    """The workers of one node. `len` is their number. `left` is called with each that is forgotten."""

    def __init__(self, left: Callable[[str], None] = lambda worker: None) -> None:
        self._left = left
        self._known: dict[str, _Known] = {}
        self._of: dict[str, OrderedDict[str, None]] = {}  # access token → its workers, the one heard last at the end
        self._bytes = FairBound()
        self._forgotten = _Filter()  # for lack of room
        self._write_at = -math.inf

    def __len__(self) -> int:
        return len(self._known)

    def hear(self, worker: str, now: float, *, caller: str = "") -> bool:
        """Note that a worker has called, with this access token ("": with none); return whether it is new here."""
        if (known := self._known.get(worker)) is None:
            tokens = frozenset([caller, ""] if self._forgotten.may_have(worker, now) else [caller])
            self._keep(worker, _Known(now, tokens, caller, _OF_WORKER + getsizeof(worker)))
            return True
        tokens = known.tokens
        if caller not in tokens:
            tokens |= {caller if len(tokens) < _TOKENS else ""}
        self._known[worker] = known._replace(at=now, tokens=tokens)
        self._of[known.caller].move_to_end(worker)
        return False

    def claims(
        self,
        worker: str,
        kinds: Iterable[str],
        labels: Mapping[str, str] = _NO_LABELS,
        *,
        since: float | None = None,
        caller: str = "",
    ) -> None:
        """Note what a worker claims that was heard just now."""
        if (known := self._known.get(worker)) is None:  # it had no room
            return
        size, of_worker = known.size, dict(known.kinds or {})
        for kind in kinds:
            if kind in of_worker:
                del of_worker[kind]
            else:
                size += _size(kind)
            of_worker[kind] = None
        for kind in list(islice(of_worker, max(0, len(of_worker) - _KINDS))):
            del of_worker[kind]
            size -= _size(kind)
        size += _size_of(labels) - _size_of(known.labels)
        start = known.start if since is None else Start(since, caller)
        self._keep(worker, known._replace(kinds=of_worker, labels=labels, start=start, caller=caller, size=size))

    def start_of(self, worker: str) -> Start:
        """Return when the worker of the last claim of this name started; long ago: it has not said."""
        return _LONG_AGO if (known := self._known.get(worker)) is None else known.start

    def note_window(self, worker: str, window: WorkerWindow) -> None:
        """Note the window of a worker, if it was heard."""
        if (known := self._known.get(worker)) is not None:
            self._known[worker] = known._replace(window=window)

    def forget(self, *, before: float) -> None:
        """Forget the workers that have not called since then."""
        for worker in [worker for worker, known in self._known.items() if known.at < before]:
            self._drop(worker)
            self._left(worker)

    def may_have_forgotten(self, worker: str, now: float) -> bool:
        """Return whether a worker may have been forgotten, in the last ten minutes, for lack of room."""
        return self._forgotten.may_have(worker, now)

    def written(self, now: float) -> bytes | None:
        """Return the directory as the other nodes read it; None: it was written a moment ago.

        If not all fit, the access tokens with most are those of which workers are left out, heard longest ago.
        """
        if now < self._write_at:
            return None
        rows: list[bytes] = []
        size = 2 + len(_OTHERS) + 1
        for _, row in heapq.merge(*map(self._rows_of, self._of), key=itemgetter(0)):
            size += len(row) + 1
            if size > _BYTES:
                break
            rows.append(row)
        if len(rows) < len(self._known) or self._forgotten.has_any(now):
            rows.append(_OTHERS)
        written = b"[" + b",".join(rows) + b"]"
        self._write_at = now + len(written) / _RATE
        return written

    def roster(
        self, running: Mapping[str, Holding], elsewhere: Iterable[bytes] = (), drains: Iterable[DrainRow] = ()
    ) -> "Roster":
        """Return the workers as of now, with what others know of them: see `Roster`."""
        return Roster(dict(self._known), running, elsewhere, drains)

    def _rows_of(self, caller: str) -> Iterator[tuple[int, bytes]]:
        """Yield the workers of an access token, the one heard last first, each after the bytes of all up to it."""
        size = 0
        for name in reversed(self._of[caller]):
            known = self._known[name]
            more = [dict(known.labels) or None, known.window, sorted(known.tokens)]
            while more and more[-1] in (None, [""]):  # the defaults
                more.pop()
            row = _encode((name, round(known.at, 1), None if known.kinds is None else sorted(known.kinds), *more))
            size += len(row)
            yield size, row

    def _keep(self, worker: str, known: _Known) -> None:
        """Note a worker, as the one that was heard last; if there is no room, forget others."""
        self._drop(worker)
        self._known[worker] = known
        self._of.setdefault(known.caller, OrderedDict())[worker] = None
        self._bytes.add(known.caller, known.size)
        while self._bytes.total > _MOST:
            oldest = next(iter(self._of[self._bytes.largest()]))
            self._drop(oldest)
            self._forgotten.add(oldest, known.at)
            self._left(oldest)

    def _drop(self, worker: str) -> None:
        if (known := self._known.pop(worker, None)) is not None:
            del self._of[known.caller][worker]
            if not self._of[known.caller]:
                del self._of[known.caller]
            self._bytes.add(known.caller, -known.size)


class Roster:
    """The workers that hold leases, or were heard of here, or elsewhere as other nodes have written it, at one moment.

    A thread of its own may look at them: very many take their time.
    """

    def __init__(
        self,
        here: Mapping[str, _Known],
        running: Mapping[str, Holding],
        elsewhere: Iterable[bytes],
        drains: Iterable[DrainRow],
    ) -> None:
        self._here = here
        self._running = running
        self._drained_at = {row.worker: row.at for row in drains}
        self._elsewhere: dict[str, list[Heard]] = {}
        for written in elsewhere:
            for worker in _decode(written):
                self._elsewhere.setdefault(worker.name, []).append(worker)
        self.is_whole = self._elsewhere.pop("", None) is None
        """Whether no other node has left out workers."""
        self.names = here.keys() | self._elsewhere.keys() | running.keys()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def holders(self) -> Collection[str]:
        """The workers that hold leases."""
        return self._running.keys()

    def tokens(self, worker: str) -> Collection[str]:
        """Return by which access tokens the name of a worker was used, here and elsewhere.

        "" stands for a request that needed none, for more tokens than are noted, and for those that are not known.
        """
        elsewhere = self._elsewhere.get(worker, ())
        if not elsewhere:
            return self._here[worker].tokens if worker in self._here else _ANYBODY
        return {*(self._here[worker].tokens if worker in self._here else ())}.union(
            *(heard.tokens or _ANYBODY for heard in elsewhere)
        )

    def held_kinds(self, worker: str) -> Collection[str]:
        """Return the kinds of the leases of a worker."""
        return self._running[worker].kinds if worker in self._running else ()

    def claims(self) -> Iterator[Claims]:
        """Yield what each worker claims, as far as that was heard."""
        for name in self.names:
            heard = self._heard(name)
            yield Claims(name, heard.kinds, heard.labels)

    def page(
        self, of: Callable[[str], bool] = lambda name: True, *, after: str = "", limit: int | None = None
    ) -> tuple[list[WorkerInfo], bool]:
        """List the first of these workers whose names come after `after`, and say whether more follow.

        With a `limit`, a page also ends where it has very many kinds.
        """
        found: list[WorkerInfo] = []
        size = 0
        for name in filter(of, sorted(name for name in self.names if name > after)):
            if limit is not None and (len(found) >= limit or size > _PAGE):
                return found, True
            found.append(info := self.info(name))
            size += sum(map(len, info.kinds or ()))
        return found, False

    def info(self, name: str) -> WorkerInfo:
        """Describe a worker."""
        heard, held = self._heard(name), self._running.get(name, Holding())
        return WorkerInfo(
            name=name,
            last_seen=None if heard.at == -math.inf else moment(heard.at),
            running=held.running,
            kinds=None if heard.kinds is None else sorted(heard.kinds),
            labels=dict(heard.labels),
            ttl=held.ttl,
            window=None if heard.window is None else heard.window.size,
            waiting=None if heard.window is None else heard.window.waiting,
            draining_since=moment(self._drained_at[name]) if name in self._drained_at else None,
        )

    def _heard(self, name: str) -> "_Sum":
        """Sum up what was heard of a worker here and elsewhere."""
        known = self._here.get(name)
        found = _Sum() if known is None else _Sum(known.at, known.kinds, known.labels, known.window)
        for worker in self._elsewhere.get(name, ()):
            if worker.at >= found.at:
                labels = found.labels if worker.labels is None else worker.labels
                found = found._replace(at=worker.at, labels=labels, window=worker.window or found.window)
            if worker.kinds is not None:
                found = found._replace(kinds={*worker.kinds, *(found.kinds or ())})
        return found


class _Sum(NamedTuple):
    """A worker, as all nodes together have heard of it."""

    at: float = -math.inf
    kinds: Collection[str] | None = None
    labels: Mapping[str, str] = _NO_LABELS
    window: WorkerWindow | None = None


def _size(word: str) -> int:
    return getsizeof(word) + _OF_WORD


def _size_of(labels: Mapping[str, str]) -> int:
    return sum(_size(name) + _size(value) for name, value in labels.items())


def node_info(row: NodeRow, *, correction: float = 0.0) -> NodeInfo:
    """Describe a node; `correction` is the seconds by which the wall clock is ahead of the clock of its moments."""
    return NodeInfo(
        id=row.id,
        name=row.name,
        version=row.version,
        role="process" if row.address is None else "server",
        address=row.address,
        started_at=moment(row.started_at + correction),
        last_seen=moment(row.seen + correction),
        has_left=row.has_left,
    )


def only_node(node_id: str, *, address: str | None = None, started_at: float, now: float) -> list[NodeInfo]:
    """Describe this process, as the only node of a store."""
    node = Node.of_this_process(node_id)
    row = NodeRow(
        node.id, node.name, node.version, address, wants_events=False, started_at=started_at, seen=now, has_left=False
    )
    return [node_info(row)]

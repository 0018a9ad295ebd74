"""Messages between the nodes that share a store, so that a client may use any of them.

Rule 1: messages have hints only, which may get lost or come twice. The store alone decides: each node looks once in a
period for tasks that are due, and for ends that are waited for, and a heartbeat brings what a cancel hint has not. Only
events are told nowhere else.
Rule 2: hints are gathered for a moment, and are sent outside the transactions that they are about.
Rule 3: what nodes send is bounded. Of what does not fit, events are left out first. What is heard is bounded too: it
waits for its turns in the event loop, which sees to everything else between them. What there is no room for is lost,
except that tokens or the inbox are to be read.
Rule 4: what changes seldom, or must not get lost, is in a node's sign in the store; events are sent only while the sign
of another node says that it wants them.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from leasekit.backend import cancel_all
from leasekit.errors import BackendError
from leasekit.server.clock import ALIVE, Clock
from leasekit.server.end_waits import TOLD_FOR, EndWaits
from leasekit.server.http.events import Feed
from leasekit.server.long_poll import LongPolls
from leasekit.server.roles.cancel_hints import CancelHints
from leasekit.server.roles.directory import Directory, node_info
from leasekit.server.store import MESSAGE, Company, Lane, NodeRow, SharedStore
from leasekit.server.store.gates import KIND, Gates
from leasekit.server.store.routes import is_route, ready_after
from leasekit.server.unit_of_work import NewlyDue, TaskEvent
from leasekit.task import NodeInfo, Verdict

logger = logging.getLogger("leasekit.server")

_GATHER = 0.01  # seconds between two rounds of messages of a node
_MESSAGES = 20  # in one round, at most
_WAITING = 1000  # hints of each sort that wait for the next round, at most
_HEARD = 5000  # hints that wait to be worked off; if there are fewer, those of one more message find room
_TURN = 500  # hints that are worked off in one turn of the event loop, at most
_AWAITED = 50_000  # tasks that other nodes wait for, and that are remembered
_ID = 128  # characters of the id of a task, at most

_T = TypeVar("_T")

_Count = Annotated[int, Meta(ge=0, le=2**31)]


class Due(Struct, frozen=True, array_like=True, tag="due"):
    """Tasks of a kind or route have become due, or will, or may start."""

    kind: str  # or the name of a route
    number: _Count
    next_at: float | None
    freed: _Count = 0  # the places that have become free, if the kind has a limit


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """The cancel of a task that this worker holds was requested."""

    worker: str
    id: str


class Awaited(Struct, frozen=True, array_like=True, tag="awaited"):
    """A request at the sender waits until this task has ended."""

    id: str


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """A task has ended that some node waits for."""

    id: str


class Happened(Struct, frozen=True, array_like=True, tag="event"):
    """Something has happened that readers of events want to know."""

    event: TaskEvent


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """A worker is to drain: its claims that wait are answered."""

    worker: str


class NewTokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """Access tokens were made, revoked or rotated."""


class Rings(Struct, frozen=True, array_like=True, tag="inbox"):
    """An application has put tasks into the inbox; the sender is no node."""


Hint = Due | Cancel | Ended | Awaited | Happened | Drain | NewTokens | Rings

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Hint]).decode
_KEPT = {_encode(hint).decode(): hint for hint in (NewTokens(), Rings())}  # also if there is no room


def packed(hints: Iterable[Hint]) -> Iterator[str]:
    """Yield messages with these hints, in order; a hint that is longer than a message is left out."""
    message = b""
    for hint in hints:
        item = _encode(hint)
        if message and len(message) + len(item) + 3 > MESSAGE:  # with a comma and brackets
            yield f"[{message.decode()}]"
            message = b""
        if len(item) + 2 <= MESSAGE:
            message += b"," + item if message else item
    if message:
        yield f"[{message.decode()}]"


class _Heard:
    """Hints that were heard, and that the event loop has not taken yet; the listener's thread adds them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hints = deque[Hint]()
        self._kept = set[Hint]()  # from messages that found no room
        self._is_known = False  # to the event loop, which will take what is here

    def add(self, message: str) -> bool:
        """Add the hints of a message, and return whether the event loop is to be told of them.

        A message that finds no room is not decoded, which would take the interpreter from the event loop.
        """
        hints, kept = list[Hint](), set[Hint]()
        if len(self._hints) < _HEARD:
            try:
                hints = _decode(message)
            except (msgspec.MsgspecError, RecursionError):  # not from leasekit, or from one that knows more
                return False
        else:
            kept = {hint for text, hint in _KEPT.items() if text in message}
        with self._lock:
            self._hints += hints
            self._kept |= kept
            is_news = not self._is_known and bool(hints or kept)
            self._is_known |= is_news
            return is_news

    def take(self) -> tuple[list[Hint], bool]:
        """Return the hints for one turn, and whether there are more, which the event loop is to take later."""
        with self._lock:
            hints = [*self._kept, *(self._hints.popleft() for _ in range(min(_TURN, len(self._hints))))]
            self._kept.clear()
            self._is_known = bool(self._hints)
            return hints, self._is_known


class Neighbours:
    """The other nodes, as one engine sees them. For the event loop; `run` calls a function in a reader's thread."""

    def __init__(
        self,
        store: SharedStore,
        clock: Clock,
        *,
        polls: LongPolls,
        waits: EndWaits,
        cancels: CancelHints,
        feed: Feed,
        directory: Directory,
        ring: Callable[[Collection[str]], None],
        ring_inbox: Callable[[], None],
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_new_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._polls = polls
        self._waits = waits
        self._cancels = cancels
        self._feed = feed
        self._directory = directory
        self._ring = ring
        self._ring_inbox = ring_inbox
        self._run = run
        self._on_new_tokens = on_new_tokens
        self._has_new_tokens = False
        self._due: dict[str, NewlyDue] = {}
        self._requested: list[Cancel] = []
        self._ended: list[Ended] = []
        self._awaited: list[Awaited] = []
        self._awaited_elsewhere: dict[str, float] = {}  # task → until when, in order
        self._happened: list[TaskEvent] = []
        self._drained: list[Drain] = []
        self._sending: asyncio.Task[None] | None = None
        self._heard = _Heard()
        self._stop: Callable[[], None] | None = None
        self.company = Company(store.tables, None, 0.0, [])  # as of the last look

    def start(self) -> None:
        loop = asyncio.get_running_loop()

        def heard(message: str) -> None:
            if self._heard.add(message):
                loop.call_soon_threadsafe(self._hear_some, loop)

        self._stop = self._store.listen(heard)

    async def stop(self) -> None:
        try:
            if self._sending is not None:
                await cancel_all([self._sending])
        finally:
            if self._stop is not None:
                await asyncio.to_thread(self._stop)
            self._heard = _Heard()  # what waits for a later turn concerns nothing any more

    @property
    def tables(self) -> tuple[int, int]:
        """The version of the tables, as of the last look, and the one that is needed."""
        return self.company.tables, self._store.tables

    @property
    def alive(self) -> list[NodeRow]:
        """The nodes that are alive, this one included, as of the last look."""
        since = self._clock.instant() - ALIVE
        return [node for node in self.company.nodes if not node.has_left and node.seen >= since]

    def has_lost_one(self, seconds: float) -> bool:
        """Return whether another server has left or died in so many seconds, and what it has heard is lost."""
        since, alive = self._clock.instant() - seconds, {node.id for node in self.alive}
        nodes = self.company.nodes
        return any(node.id not in alive and node.address is not None and node.seen >= since for node in nodes)

    async def nodes(self) -> list[NodeInfo]:
        """Return all nodes that were seen lately, and those that have left."""
        company = await self._run(self._store.company)
        return [node_info(node, correction=company.correction) for node in company.nodes]

    async def workers(self) -> list[bytes]:
        """Return the reports of the other nodes that are alive, each on the workers that the node has heard of."""
        since = self._clock.instant() - ALIVE
        found: list[bytes] = await self._run(lambda: self._store.workers(since))
        return found

    def introduce(self, *, address: str | None) -> None:
        """Have the first sign say where this node serves clients: one that dies early is known by its address too."""
        self._store.node = self._store.node._replace(address=address)

    async def look(self) -> None:
        """Say in the next sign what is new here, see which nodes there are, and try claims of kinds that are due."""
        written = self._directory.written(self._clock.instant())
        self._store.node = self._store.node._replace(
            wants_events=self._feed.wanted_here,
            workers=self._store.node.workers if written is None else written,
        )
        self.company = await self._run(self._store.company)
        self._feed.wanted_elsewhere = any(node.wants_events for node in self.alive if node.id != self._store.node.id)
        kinds = self._polls.kinds()
        lanes, drained = list[Lane](), list[str]()
        if kinds:
            lanes, drained = await self._run(lambda: self._news_of(kinds))
        self._polls.drain(drained)
        now = self._clock.peek()
        for lane in lanes:  # a kind may have several
            for name, kept_for in ready_after(lane.name):
                at = lane.due_at + kept_for
                is_due = at <= now
                self._polls.ready({name: NewlyDue(int(is_due), None if is_due else at, int(is_due))})

    def _news_of(self, kinds: Sequence[str]) -> tuple[list[Lane], list[str]]:
        """Return the lanes of these kinds, and the workers that drain."""
        with self._store.view() as view:
            closed = Gates(view.gates()).holding(KIND, self._clock.peek())
            open_kinds = [kind for kind in kinds if kind not in closed]
            drained = [row.worker for row in view.drains()]
            return view.lanes([*open_kinds, *view.routes(open_kinds)]), drained

    @property
    def _has_news(self) -> bool:
        hints = (self._due, self._requested, self._ended, self._awaited, self._happened, self._drained)
        return any(hints) or self._has_new_tokens

    def tell(
        self,
        *,
        due: Mapping[str, NewlyDue] | None = None,
        cancelled: Iterable[tuple[Verdict, str | None]] = (),
        ended: Iterable[str] = (),
        awaited: Sequence[str] = (),
        events: Sequence[TaskEvent] = (),
        drained: Sequence[str] = (),
        has_new_tokens: bool = False,
    ) -> None:
        """Have the other nodes told soon of due tasks, verdicts on cancels, events, drained workers, and new tokens.

        They are also told of tasks that requests wait for here (`awaited`), and of those that have `ended` and that
        another node waits for.
        """
        if not self._clock.has_company:
            return
        for kind, newly in (due or {}).items():
            self._due[kind] = self._due[kind] + newly if kind in self._due else newly
        requested = [Cancel(holder, verdict.id) for verdict, holder in cancelled if holder is not None]
        self._requested += requested[: _WAITING - len(self._requested)]
        wanted = self._awaited_elsewhere
        ends = [Ended(task_id) for task_id in ended if wanted.pop(task_id, None) is not None] if wanted else []
        self._ended += ends[: _WAITING - len(self._ended)]
        self._awaited += map(Awaited, awaited[: _WAITING - len(self._awaited)])
        self._happened += events[: _WAITING - len(self._happened)]
        self._drained += map(Drain, drained[: _WAITING - len(self._drained)])
        self._has_new_tokens |= has_new_tokens
        if self._has_news and self._sending is None:
            self._sending = asyncio.create_task(self._send(), context=Context())

    async def _send(self) -> None:
        try:
            while hints := self._gathered():
                messages = list(islice(packed(hints), _MESSAGES))
                await self._run(lambda messages=messages: self._store.announce(messages))  # type: ignore[misc]
                await asyncio.sleep(_GATHER)
        except BackendError as error:
            logger.debug("the other nodes were not told what has happened here: %s", error)
        finally:
            self._sending = None

    def _gathered(self) -> list[Hint]:
        due = [Due(kind, newly.number, newly.next_at, newly.freed) for kind, newly in self._due.items()]
        hints: list[Hint] = [*due, *self._requested, *self._ended, *self._awaited, *self._drained]
        hints += map(Happened, self._happened)
        hints += [NewTokens()] if self._has_new_tokens else []
        self._due, self._requested, self._ended, self._awaited, self._happened = {}, [], [], [], []
        self._drained = []
        self._has_new_tokens = False
        return hints

    def _hear_some(self, loop: asyncio.AbstractEventLoop) -> None:
        hints, are_more = self._heard.take()
        if are_more:
            loop.call_later(_GATHER, self._hear_some, loop)
        self._hear(hints)

    def _hear(self, hints: Sequence[Hint]) -> None:
        due: dict[str, NewlyDue] = {}
        ended, drained, events = list[str](), set[str](), list[TaskEvent]()
        for hint in hints:
            match hint:
                case Due(kind=kind):
                    newly = NewlyDue(hint.number, hint.next_at, hint.freed)
                    due[kind] = due[kind] + newly if kind in due else newly
                case Cancel():
                    self._cancels.tell([(Verdict(id=hint.id, verdict="cancel_requested"), hint.worker)])
                case Ended():
                    ended.append(hint.id)
                case Awaited():
                    self._note_awaited(hint.id)
                case Happened():
                    events.append(hint.event)
                case Drain():
                    drained.add(hint.worker)
                case NewTokens():
                    self._on_new_tokens()
                case Rings():
                    self._ring_inbox()
        if due:
            self._polls.ready(due)
        if kinds := [kind for kind, newly in due.items() if newly.number and not is_route(kind)]:
            self._ring(kinds)
        self._waits.over(ended)
        if drained:
            self._polls.drain(drained)
        if events:
            self._feed.hear(events)

    def _note_awaited(self, task_id: str) -> None:
        if len(task_id) > _ID:  # not from leasekit
            return
        wanted, now = self._awaited_elsewhere, self._clock.instant()
        wanted.pop(task_id, None)
        wanted[task_id] = now + TOLD_FOR
        while len(wanted) > _AWAITED or next(iter(wanted.values())) < now:
            del wanted[next(iter(wanted))]

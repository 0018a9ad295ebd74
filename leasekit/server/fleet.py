"""Fleet: the workers that send requests to an engine and its neighbours, and the nodes that share its store."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from leasekit.server.access import LOCAL, KindPatterns
from leasekit.server.clock import Clock
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.events import Feed
from leasekit.server.neighbours import Neighbours
from leasekit.server.readers import Readers
from leasekit.server.roles import frontend
from leasekit.server.roles.directory import SEEN_FOR, Directory, Roster, only_node
from leasekit.server.store import DrainRow
from leasekit.server.token_book import TokenBook
from leasekit.server.unit_of_work import TaskEvent
from leasekit.task import NodeInfo, WorkerInfo
from leasekit.wire import WorkerWindow

_T = TypeVar("_T")


class Fleet:
    """The workers and nodes that one engine knows of. `node_id` and `address` are its own.

    Without `neighbours`, no other nodes share the store.
    """

    def __init__(
        self,
        directory: Directory,
        neighbours: Neighbours | None,
        readers: Readers,
        clock: Clock,
        feed: Feed,
        tokens: TokenBook,
        *,
        node_id: str,
        address: str | None,
    ) -> None:
        self._directory = directory
        self._neighbours = neighbours
        self._readers = readers
        self._clock = clock
        self._feed = feed
        self._tokens = tokens
        self._node_id = node_id
        self._address = address
        self._started_at = 0.0

    def __len__(self) -> int:
        """Return the number of workers that sent a request to this node in the last ten minutes."""
        return len(self._directory)

    def begin(self) -> None:
        """Note that this node has started, and tell the others."""
        if self._neighbours is not None:
            self._neighbours.introduce(address=self._address)
        self._started_at = self._clock.peek()

    def hear(self, worker: str) -> None:
        """Note that a worker has sent a request."""
        if self._directory.hear(worker, self._clock.peek(), caller=CALLER.get()):
            self.tell(worker, "joined")

    def hear_claim(
        self, worker: str, kinds: Sequence[str], labels: Mapping[str, str], *, since: float | None = None
    ) -> None:
        """Note what a worker claims, that it has sent a request, and when it started, if it says so."""
        self.hear(worker)
        self._directory.claims(worker, kinds, labels, since=since, caller=CALLER.get())

    async def restarted(self, drains: Sequence[DrainRow], *, is_early: bool) -> list[DrainRow]:
        """Return those of these drains whose workers have started since, as their last claims here have said.

        Whoever may claim can use the name of any worker. So a claim with an access token for some kinds says nothing of
        others' workers (`_owned`), and nothing at all as long as not all names are known that were used lately, for
        example because this node has started a moment ago (`is_early`).
        """
        starts = {row: self._directory.start_of(row.worker) for row in drains}
        later = [row for row, start in starts.items() if start.at > row.at]
        found = [row for row in later if self._kinds_of(starts[row].caller).has_all]
        if is_early or len(found) == len(later):
            return found
        if self._neighbours is not None and self._neighbours.has_lost_one(SEEN_FOR):
            return found
        within = {row: self._within(self._kinds_of(starts[row].caller)) for row in later}
        return await self._look(
            lambda roster: [row for row in later if within[row](roster, row.worker)] if roster.is_whole else found
        )

    def note_window(self, worker: str, window: WorkerWindow | None) -> None:
        """Note the window of a worker, if its request tells of one, for the list of workers."""
        if window is not None:
            self.hear(worker)
            self._directory.note_window(worker, window)

    def forget_silent(self) -> None:
        """Forget the workers that were not heard of for ten minutes."""
        self._directory.forget(before=self._clock.peek() - SEEN_FOR)

    async def workers(self, kinds: KindPatterns | None = None) -> list[WorkerInfo]:
        """List the workers that hold leases or sent a request in the last ten minutes, to any node that is alive.

        With `kinds`, those of an access token, only the workers are listed that are altogether of these.
        """
        found, _ = await self.page(kinds)
        return found

    async def page(
        self, kinds: KindPatterns | None = None, *, after: str = "", limit: int | None = None
    ) -> tuple[list[WorkerInfo], bool]:
        """Return the first of the `workers` whose names come after `after`, and whether more follow."""
        if kinds is None:
            return await self._look(lambda roster: roster.page(after=after, limit=limit))
        is_own = self._within(kinds)
        return await self._look(lambda roster: roster.page(lambda name: is_own(roster, name), after=after, limit=limit))

    async def worker(self, name: str) -> WorkerInfo | None:
        """Return one of the workers that `workers` lists."""
        return await self._look(lambda roster: roster.info(name) if name in roster.names else None)

    async def gone(self, marks: Collection[DrainRow]) -> list[DrainRow]:
        """Return those of these drains whose workers are not listed, and were not forgotten or left out either."""
        now = self._clock.peek()
        found = [mark for mark in marks if not self._directory.may_have_forgotten(mark.worker, now)]
        return await self._look(
            lambda roster: [mark for mark in found if mark.worker not in roster.names] if roster.is_whole else []
        )

    async def is_handled(self, kind: str) -> bool:
        """Return whether a worker is known that may run tasks of a kind."""
        return await self._look(
            lambda roster: any(worker.kinds is None or kind in worker.kinds for worker in roster.claims())
        )

    async def at_work(self, limit: int) -> tuple[list[WorkerInfo], list[WorkerInfo], int]:
        """Return the first workers, those that hold leases, and the number of all."""
        return await self._look(
            lambda roster: (roster.page(limit=limit)[0], list(map(roster.info, roster.holders)), len(roster))
        )

    async def claimants(self) -> Roster:
        """Return the workers that sent a request in the last ten minutes; the store is not asked who holds leases."""
        return self._directory.roster({}, await self._heard_elsewhere())

    async def holders(self) -> Collection[str]:
        """Return the workers that hold leases."""
        return (await self._readers.read(lambda view: view.holders())).keys()

    async def nodes(self) -> list[NodeInfo]:
        """List the nodes that share the store, also those that have left lately; this process alone, if none do."""
        if self._neighbours is not None:
            return await self._neighbours.nodes()
        return only_node(self._node_id, address=self._address, started_at=self._started_at, now=self._clock.peek())

    async def _heard_elsewhere(self) -> Iterable[bytes]:
        return [] if self._neighbours is None else await self._neighbours.workers()

    async def _look(self, look: Callable[[Roster], _T]) -> _T:
        """Return what a function finds among the workers that are known now; it runs in a reader's thread."""
        elsewhere, here = await self._heard_elsewhere(), self._directory.roster
        return await self._readers.read(lambda view: look(here(view.holders(), elsewhere, view.drains())))

    def _within(self, kinds: KindPatterns) -> Callable[[Roster, str], bool]:
        """Return whether the name of a worker was used only by access tokens for these kinds, and it holds no others.

        Which kinds a worker has claimed does not matter: with its token it may claim others too.
        """
        within = self._tokens.within(kinds)
        if kinds.has_all:
            within.add("")
        return lambda roster, name: (
            within.issuperset(roster.tokens(name)) and all(map(kinds.match, roster.held_kinds(name)))
        )

    def _kinds_of(self, caller: str) -> KindPatterns:
        """Return the kinds of an access token (""; none was needed); no kinds, if it is no longer known."""
        return self._tokens.kinds_of(caller) if caller else LOCAL.kinds

    def tell(self, worker: str, event: str) -> None:
        """Publish an event of a worker."""
        if self._feed.wanted:
            self._feed.publish([TaskEvent(event=event, at=frontend.moment(self._clock.peek()), worker=worker)])

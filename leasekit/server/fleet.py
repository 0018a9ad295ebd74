"""Fleet: the workers that send requests to an engine and its neighbours, and the nodes that share its store."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from leasekit.server.access import LOCAL, KindPatterns
from leasekit.server.clock import Clock
from leasekit.server.fair_bound import CALLER
from leasekit.server.http.events import Feed
from leasekit.server.neighbours import Neighbours
from leasekit.server.readers import Readers
from leasekit.server.roles import frontend
from leasekit.server.roles.directory import Directory, only_node
from leasekit.server.store import DrainRow, Holding
from leasekit.server.token_book import TokenBook
from leasekit.server.unit_of_work import TaskEvent
from leasekit.task import NodeInfo, WorkerInfo
from leasekit.wire import WorkerWindow

SEEN_FOR = 600.0
"""Seconds for which a worker without leases is listed."""
_ANYBODY = {""}  # who uses the name of a worker of which no request was heard


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
            self._tell(worker, "joined")

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
        running, elsewhere = await self._readers.read(lambda view: view.holders()), await self._heard_elsewhere()
        tokens = self._directory.tokens(elsewhere)
        if "" in tokens or (self._neighbours is not None and self._neighbours.has_lost_one(SEEN_FOR)):
            return found
        return [row for row in later if self._owned([row.worker], self._kinds_of(starts[row].caller), tokens, running)]

    def note_window(self, worker: str, window: WorkerWindow | None) -> None:
        """Note the window of a worker, if its request tells of one, for the list of workers."""
        if window is not None:
            self._directory.note_window(worker, window)

    def forget_silent(self) -> list[str]:
        """Forget the workers that were not heard of for ten minutes; return them."""
        silent = self._directory.forget(before=self._clock.peek() - SEEN_FOR)
        for worker in silent:
            self._tell(worker, "left")
        return silent

    async def workers(self, kinds: KindPatterns | None = None) -> list[WorkerInfo]:
        """List the workers that hold leases or sent a request in the last ten minutes, to any node that is alive.

        With `kinds`, those of an access token, only the workers are listed that are altogether of these.
        """
        running, drains = await self._readers.read(lambda view: (view.holders(), view.drains()))
        elsewhere = await self._heard_elsewhere()
        found = self._directory.workers(running, elsewhere, drains)
        if kinds is None:
            return found
        own = self._owned([worker.name for worker in found], kinds, self._directory.tokens(elsewhere), running)
        return [worker for worker in found if worker.name in own]

    async def worker(self, name: str) -> WorkerInfo | None:
        """Return one of the workers that `workers` lists."""
        return next((worker for worker in await self.workers() if worker.name == name), None)

    async def claimants(self) -> list[WorkerInfo]:
        """List the workers that sent a request in the last ten minutes; the store is not asked who holds leases."""
        return self._directory.workers({}, await self._heard_elsewhere())

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

    def _owned(
        self,
        workers: Collection[str],
        kinds: KindPatterns,
        tokens: Mapping[str, set[str]],
        running: Mapping[str, Holding],
    ) -> set[str]:
        """Return the workers whose names were used only by access tokens for these kinds, and that hold no others.

        Which kinds a worker has claimed does not matter: with its token it may claim others too.
        """
        used = set[str]().union(*(tokens.get(worker, ()) for worker in workers))
        patterns = {token: self._kinds_of(token).patterns for token in used}
        within = {token for token in used if patterns[token] and all(map(kinds.cover, patterns[token]))}
        return {
            worker
            for worker in workers
            if tokens.get(worker, _ANYBODY) <= within and all(map(kinds.match, running.get(worker, Holding()).kinds))
        }

    def _kinds_of(self, caller: str) -> KindPatterns:
        """Return the kinds of an access token (""; none was needed); no kinds, if it is no longer known."""
        return self._tokens.kinds_of(caller) if caller else LOCAL.kinds

    def _tell(self, worker: str, event: str) -> None:
        if self._feed.wanted:
            self._feed.publish([TaskEvent(event=event, at=frontend.moment(self._clock.peek()), worker=worker)])

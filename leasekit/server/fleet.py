"""Fleet: the workers that send requests to an engine and its neighbours, and the nodes that share its store."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from leasekit.server.access import KindPatterns
from leasekit.server.clock import Clock
from leasekit.server.http.events import Feed
from leasekit.server.neighbours import Neighbours
from leasekit.server.readers import Readers
from leasekit.server.roles import frontend
from leasekit.server.roles.directory import Directory, only_node
from leasekit.server.unit_of_work import TaskEvent
from leasekit.task import NodeInfo, WorkerInfo
from leasekit.wire import WorkerWindow

SEEN_FOR = 600.0
"""Seconds for which a worker without leases is listed."""


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
        *,
        node_id: str,
        address: str | None,
    ) -> None:
        self._directory = directory
        self._neighbours = neighbours
        self._readers = readers
        self._clock = clock
        self._feed = feed
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
        if self._directory.hear(worker, self._clock.peek()):
            self._tell(worker, "joined")

    def hear_claim(
        self,
        worker: str,
        kinds: Sequence[str],
        labels: Mapping[str, str],
        *,
        since: float | None = None,
        of: KindPatterns | None = None,
    ) -> None:
        """Note what a worker claims, that it has sent a request, and when it started, if it says so.

        Its access token is `of` these kinds (None: of all).
        """
        self.hear(worker)
        self._directory.claims(worker, kinds, labels, since=since, of=of)

    async def has_restarted(self, worker: str, since: float) -> bool:
        """Return whether a worker has started after `since`, as its last claim here has said.

        A claim with an access token that is not for all kinds of the worker says nothing of that: whoever may claim can
        use the name of any worker.
        """
        if self._directory.started_at(worker) <= since:
            return False
        of = self._directory.kinds_of_token(worker)
        known = None if of is None else await self.worker(worker)
        return of is None or known is None or all(map(of.match, known.kinds or ()))

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

    async def workers(self) -> list[WorkerInfo]:
        """List the workers that hold leases or sent a request in the last ten minutes, to any node that is alive."""
        running, drains = await self._readers.read(lambda view: (view.holders(), view.drains()))
        return self._directory.workers(running, await self._heard_elsewhere(), drains)

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

    def _tell(self, worker: str, event: str) -> None:
        if self._feed.wanted:
            self._feed.publish([TaskEvent(event=event, at=frontend.moment(self._clock.peek()), worker=worker)])

"""The fleet: workers and nodes, and the leases of workers that are silent."""

import asyncio
from datetime import datetime
from typing import NamedTuple

from leasekit.config import Heartbeats
from leasekit.server.console.visit import Visit
from leasekit.task import NodeInfo, WorkerInfo

_WORKERS = 500  # that are listed
_SHORTEST = 2.0  # seconds of a ttl for which there is a rhythm


class Fleet(NamedTuple):
    """The workers and the nodes."""

    workers: list[WorkerInfo]
    """The first of them."""
    number: int
    """How many there are."""
    holders: list[WorkerInfo]
    """The workers that hold leases."""
    nodes: list[NodeInfo]
    overdue: set[str]
    """Workers that hold leases, and were not heard of for longer than a cycle."""

    @property
    def running(self) -> int:
        return sum(worker.running for worker in self.holders)

    @property
    def at_risk(self) -> int:
        """The leases of the workers that are overdue."""
        return sum(worker.running for worker in self.holders if worker.name in self.overdue)

    @property
    def alive(self) -> list[NodeInfo]:
        return [node for node in self.nodes if not node.has_left]


async def fleet(visit: Visit) -> Fleet:
    """Ask for the workers and the nodes."""
    (workers, holders, number), nodes = await asyncio.gather(
        visit.engine.fleet.at_work(_WORKERS), visit.engine.fleet.nodes()
    )
    overdue = {worker.name for worker in holders if _is_overdue(worker, visit.now)}
    return Fleet(workers, number, holders, nodes, overdue)


def _is_overdue(worker: WorkerInfo, now: datetime) -> bool:
    if not worker.running or worker.last_seen is None:
        return False
    heartbeats = Heartbeats() if worker.ttl is None else Heartbeats().for_ttl(max(worker.ttl, _SHORTEST))
    return (now - worker.last_seen).total_seconds() > heartbeats.cycle + heartbeats.call_timeout

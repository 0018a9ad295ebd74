"""Nodes of a shared store: what they know of it, and of one another."""

import os
from typing import NamedTuple

from leasekit.server.store.rows import Anchor


class Contended(Exception):
    """Another writer has changed the same rows meanwhile: the transaction is undone, and must be repeated."""


class Locked(Contended):
    """Another session has kept rows locked for longer than a transaction may wait: it is undone."""


class Reading(NamedTuple):
    """The clock of a database that several nodes share, at the start of a transaction, and what they know of it."""

    wall: float  # the wall clock of the database, in seconds since the epoch
    correction: float  # the seconds by which this is ahead of the clock of leases, in which it made a step
    gained: float  # the seconds by which the clock of due times is ahead of the clock of leases
    last: Anchor | None  # the last sign of any node; None: there never was one
    others_seen: float | None  # when another node was seen last that has not left since; None: there is none
    before: float  # a moment before the reading, by the boot clock of this machine
    after: float  # a moment after the reading
    kind_change: int | None = None  # of the last change of a kind, gate or drain; None: there are no such tables
    has_waits: bool = False  # whether any task was ever scheduled after another
    has_routes: bool = False  # whether any task has ever required labels


class Node(NamedTuple):
    """A process that has a shared store open, and what it says of itself with its signs."""

    id: str  # made anew at each start
    name: str  # the machine and the process
    version: str  # of leasekit
    address: str | None = None  # where the node serves clients over HTTP
    wants_events: bool = False  # of the other nodes
    workers: bytes | None = None  # those that the node has heard of, as a `Directory` writes them

    @classmethod
    def of_this_process(cls, node_id: str) -> "Node":
        import platform
        from importlib.metadata import version

        return cls(node_id, f"{platform.node()}:{os.getpid()}", version("leasekit"))


class NodeRow(NamedTuple):
    """A node as others see it. Moments are by the clock of leases."""

    id: str
    name: str
    version: str
    address: str | None
    wants_events: bool
    started_at: float
    seen: float  # the moment of its last sign
    has_left: bool


class InboxRow(NamedTuple):
    """A task that an application has put into the inbox of a shared database, in a transaction of its own."""

    number: int
    task: str | None  # JSON, as the application wrote it; None: it is too large to be read
    at: float  # when it was written, by the clock of the database


class Company(NamedTuple):
    """The nodes that share a store, and what they share."""

    tables: int  # the version of the tables
    fault: str | None  # why this node cannot use them
    correction: float  # the seconds by which the wall clock is ahead of the clock of leases
    nodes: list[NodeRow]  # this one too; the last that were seen

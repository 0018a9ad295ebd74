"""The seam between the server's rules and the storage of tasks.

One engine opens a store and gets transactions from it: batches of plain rows in, batches of plain rows out, without
rules. All methods are synchronous. One thread writes; readers work beside it, on connections of their own.

A task consists of an `Entity`, its definition, which is written once, and a `Trigger`, its state, which is small and
changes often. Times are seconds since the epoch, users' JSON values are bytes. Times are by the store's clock, which
follows the wall clock forward, except for the ends of leases and runs: by a clock without steps (`server.clock`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from leasekit._lifecycle.rows import Limits, Trigger
from leasekit.server.store.nodes import (
    Company,
    Contended,
    InboxRow,
    Locked,
    Node,
    NodeRow,
    Reading,
)
from leasekit.server.store.rows import (
    NOT_DECLARED,
    Anchor,
    AuditRow,
    Checkpoint,
    ClaimMemory,
    Content,
    Deadline,
    Dedupe,
    DrainRow,
    Ending,
    Entity,
    Filter,
    GateRow,
    Holding,
    KindDeclaration,
    KindRow,
    Lane,
    MinuteRow,
    PeriodicRow,
    Run,
    SessionRow,
    Share,
    Space,
    Tagged,
    TokenRow,
    shifted,
)
from leasekit.server.store.view import View
from leasekit.server.store.writes import Tx

__all__ = [
    "MESSAGE",
    "NOT_DECLARED",
    "RETENTION",
    "Anchor",
    "AuditRow",
    "Checkpoint",
    "ClaimMemory",
    "Company",
    "Contended",
    "Content",
    "Deadline",
    "Dedupe",
    "DrainRow",
    "Ending",
    "Entity",
    "Filter",
    "GateRow",
    "Holding",
    "InboxRow",
    "KindDeclaration",
    "KindRow",
    "Lane",
    "Limits",
    "Locked",
    "MinuteRow",
    "Node",
    "NodeRow",
    "PeriodicRow",
    "Reading",
    "Run",
    "SessionRow",
    "Share",
    "SharedStore",
    "SharedTx",
    "Space",
    "Store",
    "Tagged",
    "TokenRow",
    "Trigger",
    "Tx",
    "View",
    "shifted",
]


RETENTION = 30 * 86400.0
"""Seconds for which a store keeps ended tasks, if its URL does not say another time."""

MESSAGE = 7900
"""The bytes of a message between nodes, at most."""


class Store(Protocol):
    """The storage of one engine's tasks."""

    id: str = ""
    """The identity of this store, which no other has; known once the store is open.

    It cannot be guessed and never leaves the servers of the store: clients know it by its hash, `Engine.store_id`.
    """
    url: str | None = None
    """The URL of this store, valid in any working directory; None: the store exists in this process only."""
    retention: float = RETENTION
    """Seconds for which ended tasks are kept."""
    is_new: bool = False
    """Whether `open` has created the file of this store."""
    damage: str | None = None
    """The damage that a read or a write has met since `open`; None: it has met none."""

    def open(self) -> None:
        """Open the store, in the thread that will write. Raises `StoreLocked` if another engine has it open."""
        ...

    def transaction(self) -> AbstractContextManager[Tx]:
        """Begin a transaction: durable when the block ends, undone if it raises. Raises `Unavailable`."""
        ...

    def view(self) -> AbstractContextManager[View]:
        """Open a snapshot of the store, from any thread, without delaying the writer."""
        ...

    def counts(self) -> dict[str, dict[str, int]]:
        """Count the tasks of each kind in each status, from any thread, without a scan if the store keeps counts."""
        with self.view() as view:
            return view.counts()

    def space(self) -> Space | None:
        """Return the space that the store takes; None: it has no file, or this cannot be told. Any thread."""
        return None

    def cramped(self) -> str | None:
        """Return why no new tasks should be accepted, so that existing tasks can go on; None: there is room."""
        return None

    def close(self) -> None:
        """Close the store, in the thread that wrote."""
        ...


class SharedTx(Tx, Protocol):
    """A transaction of one of several writers. The rows that it reads are locked until it ends.

    Each method may raise `Contended`.
    """

    @property
    def reading(self) -> Reading:
        """The clock of the database, read when the transaction began."""
        ...

    def correct_clock(self, correction: float, gained: float) -> None:
        """Replace the correction that was read. Raises `Contended` if another node has replaced it."""
        ...

    def sign_in(self, sign: Anchor) -> None:
        """Note that this node was alive at this moment."""
        ...

    def forget_nodes(self, before: float) -> None:
        """Remove nodes that were seen last before this moment, by the clock of leases."""
        ...

    def inbox(self, *, limit: int, most_bytes: int, largest: int, numbers: Sequence[int] | None) -> list[InboxRow]:
        """Return the first `limit` rows of the inbox (of `numbers`, unless None), up to `most_bytes` in all.

        Rows that another writer has locked, or that were set aside, are left out. A first row that is longer than
        `most_bytes` is returned alone.
        """
        ...

    def leave_inbox(self, numbers: Collection[int]) -> None:
        """Remove these rows of the inbox."""
        ...

    def set_aside(self, refused: Mapping[int, str]) -> None:
        """Note why these rows of the inbox cannot become tasks."""
        ...


@runtime_checkable
class SharedStore(Store, Protocol):
    """The storage of tasks that several engines, the nodes, have open at once, on any machines."""

    wall: Callable[[], float] | None
    """A clock in place of the database's; None: there is none."""
    boot: Callable[[], float]
    """The boot clock of this machine."""
    node: Node
    """This node. What is written here is in its next sign."""
    tables: int
    """The version of the tables that this leasekit needs."""

    def transaction(self) -> AbstractContextManager[SharedTx]:
        """Begin a transaction; see `Store.transaction`."""
        ...

    def lacks(self) -> list[int]:
        """Return the versions of the tables that a migration would make."""
        ...

    def migrate(self) -> list[int]:
        """Create the tables, or bring them up to date; return the versions that were made."""
        ...

    def announce(self, messages: Sequence[str]) -> None:
        """Send messages of at most `MESSAGE` bytes to the other nodes. They may get lost. Any thread."""
        ...

    def listen(self, heard: Callable[[str], None]) -> Callable[[], None]:
        """Call `heard` with messages of other nodes, in a thread of its own; return a function that ends this."""
        ...

    def company(self) -> Company:
        """Return the nodes that were seen lately. Any thread."""
        ...

    def workers(self, since: float) -> list[bytes]:
        """Return `workers` of the other nodes that were seen since then and have not left. Any thread."""
        ...

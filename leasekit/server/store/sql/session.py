"""The base classes of the parts of which transactions and snapshots of an SQL database consist."""

from collections.abc import Sequence
from typing import Any

from leasekit.server.store import Trigger, Tx, View, damage
from leasekit.server.store.sql.keyed import KeyedTasks, with_due_times
from leasekit.server.store.sql.statements import Session

PRIORITIES = range(5)


class Walk:
    """How far the upkeep has looked through the tasks with keys."""

    def __init__(self) -> None:
        self.after = 0


class Reads(View):
    """Reads of a consistent snapshot."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _decoded(self, rows: Sequence[tuple[Any, ...]]) -> list[Trigger]:
        return with_due_times(self._session, damage.triggers(rows)[0])[0]


class Writes(Reads, Tx):
    """Reads and writes of a transaction of the writer."""

    def __init__(self, session: Session, walk: Walk, *, has_keys: bool = True) -> None:
        super().__init__(session)
        self._has_keys = has_keys  # whether there are the tables of keys
        self._keyed = KeyedTasks(session)
        self._walk = walk
        self._firsts: set[tuple[str, str]] = set()  # the keys of which this transaction has seen the first tasks
        self._buckets: set[tuple[str, str]] = set()  # those that this transaction has seen

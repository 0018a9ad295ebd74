"""The gates of a store at one moment: which kinds and collections are closed."""

from collections.abc import Mapping, Sequence

from leasekit.server.store import GateRow
from leasekit.server.store.routes import kind_of

KIND, COLLECTION = "kind", "collection"
PAUSE, DROP, OPEN = "pause", "drop", "open"

PARKED_AT = 253_402_250_000.0
"""The next trigger time of a parked task: later than any task can be scheduled, so that no claim reads it.

A leasekit that knows no gates takes such a task for one that is due in the year 9999, and lets it wait.
"""


class Gates:
    """The gates of a store, as of the last transaction that has changed one."""

    def __init__(self, rows: Sequence[GateRow] = ()) -> None:
        self.rows = rows
        self._closed = {
            of: {row.name: row for row in rows if row.scope == of and row.mode != OPEN} for of in (KIND, COLLECTION)
        }
        self._opening = any(row.until is not None for row in rows)  # at least one, by itself

    def holding(self, scope: str, now: float) -> Mapping[str, GateRow]:
        """Return the gates that hold now, by the names of what is closed."""
        closed = self._closed[scope]
        return {name: row for name, row in closed.items() if row.holds(now)} if self._opening else closed

    def passing(self, counts: Mapping[str, int], now: float) -> Mapping[str, int]:
        """Return the counts of those of these kinds and routes that are open."""
        closed = self.holding(KIND, now) if self.rows else ()
        return {name: count for name, count in counts.items() if kind_of(name) not in closed} if closed else counts

    def of(self, kind: str, collection: str | None, now: float) -> GateRow | None:
        """Return the gate behind which a task of this kind and collection waits."""
        return self.holding(KIND, now).get(kind) or self.holding(COLLECTION, now).get(collection or "")

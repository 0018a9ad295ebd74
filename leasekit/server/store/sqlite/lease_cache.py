"""A cache of leased tasks' states, so that the writer need not read rows that it has written last.

Rule 1: there is no other writer; the store is locked against a second server.
Rule 2: when a transaction fails, the cache is cleared: the rows that the transaction wrote may not be in the store.
Rule 3: rows that are not in the cache are read from the store, so the results do not depend on the cache.
"""

from collections.abc import Collection, Iterable

from leasekit._lifecycle.transitions import renewed
from leasekit.server.store import Trigger
from leasekit.task import Status

_MOST = 100_000  # leases, about 0.6 KB each


class LeaseCache:
    """The rows of leased tasks; used by the writer only."""

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._rows: dict[int, Trigger] = {}
        self._seqs: dict[str, int] = {}

    def find(self, ids: Iterable[str]) -> dict[str, Trigger]:
        rows, seqs = self._rows, self._seqs
        return {task_id: rows[seqs[task_id]] for task_id in ids if task_id in seqs}

    def keep(self, rows: Collection[Trigger]) -> None:
        if len(self._rows) + len(rows) > self._most:
            self.clear()
        for row in rows:
            if row.owner is None:
                self.drop([row.seq])
            else:
                self._rows[row.seq] = row
                self._seqs[row.id] = row.seq

    def renew(self, seqs: Iterable[int], status: Status, *, now: float, at: float) -> None:
        """Renew cached rows as `Tx.renew` renews those of the store."""
        for seq in seqs:
            row = self._rows.get(seq)
            if row is not None:
                self._rows[seq] = renewed(row, status, now=now, at=at)

    def drop(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            row = self._rows.pop(seq, None)
            if row is not None:
                del self._seqs[row.id]

    def clear(self) -> None:
        self._rows.clear()
        self._seqs.clear()

"""Where the leases stand that were granted: what the writer has written last, it need not read.

Rule 1: nobody else writes; the store is locked against a second server.
Rule 2: when a transaction does not end well, everything is forgotten: what it wrote may not be there.
Rule 3: what is not known here is read. Nothing depends on what is.
"""

from collections.abc import Collection, Iterable

from leasekit._lifecycle.transitions import renewed
from leasekit.server.store import Trigger
from leasekit.task import Status

__all__ = ["LeaseCache"]

_MOST = 100_000  # leases, about 0.6 KB each


class LeaseCache:
    """The rows of leases, by task. It belongs to the writer."""

    def __init__(self, *, most: int = _MOST) -> None:
        self._most = most
        self._rows: dict[int, Trigger] = {}
        self._seqs: dict[str, int] = {}

    def find(self, ids: Iterable[str]) -> dict[str, Trigger]:
        """Where those of these tasks stand that are known."""
        rows, seqs = self._rows, self._seqs
        return {task_id: rows[seqs[task_id]] for task_id in ids if task_id in seqs}

    def keep(self, rows: Collection[Trigger]) -> None:
        """Remember where these tasks stand, as far as they are leased."""
        if len(self._rows) + len(rows) > self._most:
            self.clear()
        for row in rows:
            if row.owner is None:
                self.drop([row.seq])
            else:
                self._rows[row.seq] = row
                self._seqs[row.id] = row.seq

    def renew(self, seqs: Iterable[int], status: Status, *, now: float) -> None:
        """What `Tx.renew` does to its rows."""
        for seq in seqs:
            row = self._rows.get(seq)
            if row is not None:
                self._rows[seq] = renewed(row, status, now=now)

    def drop(self, seqs: Iterable[int]) -> None:
        """Forget these."""
        for seq in seqs:
            row = self._rows.pop(seq, None)
            if row is not None:
                del self._seqs[row.id]

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()
        self._seqs.clear()

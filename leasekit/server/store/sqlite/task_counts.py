"""The number of tasks by kind and status, kept in memory, so that a big store is not scanned for it.

Rule 1: triggers of the writer's own connection report each change of a status, whichever statement makes it; they are
not in the file. New tasks are reported by `SqliteTx.add`, which costs less.
Rule 2: changes count when their transaction has committed. If it is unknown whether it has, all is counted anew.
Rule 3: the rows are counted once, in a snapshot, when the counts are first read. Each transaction has a number, which
is in the snapshot too: so changes that are committed meanwhile are counted, and none is counted twice.
"""

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Key = tuple[bytes, bytes]
"""A kind and a status as the bytes in the file: both may be damaged."""

_CHANGED = "leasekit_status_changed"
# With casts, because the driver refuses to pass text that is not UTF-8.
_TRIGGERS = f"""
CREATE TEMP TRIGGER leasekit_changed AFTER UPDATE OF status ON main.trigger WHEN old.status IS NOT new.status
BEGIN SELECT {_CHANGED}(CAST(old.kind AS BLOB), CAST(old.status AS BLOB), CAST(new.status AS BLOB)); END;
CREATE TEMP TRIGGER leasekit_removed AFTER DELETE ON main.trigger
BEGIN SELECT {_CHANGED}(CAST(old.kind AS BLOB), CAST(old.status AS BLOB), NULL); END;
"""


class TaskCounts:
    """The counts of one store. `read` is for any thread, all else is for the writer's."""

    def __init__(self) -> None:
        self.changes: Counter[Key] = Counter()  # of the transaction in progress
        self._watched: sqlite3.Connection | None = None
        self._counting = threading.Lock()  # one scan at a time
        self._lock = threading.Lock()  # for the fields below
        self._counts: Counter[Key] | None = None  # None: not counted yet
        self._number = -1  # of the last transaction in `_counts` when it was made; or of one whose result is unknown
        self._meanwhile: list[tuple[int, Counter[Key]]] | None = None  # the transactions during a scan, by number

    def begin(self, driver: sqlite3.Connection) -> None:
        """Begin to record the changes of a transaction on this connection."""
        self.changes = Counter()
        if self._watched is not driver:
            driver.create_function(_CHANGED, 3, self._changed)
            driver.executescript(_TRIGGERS)
            self._watched = driver

    def commit(self, number: int) -> None:
        """Count the changes of the transaction with this number, which has committed."""
        with self._lock:
            if self._meanwhile is not None:
                self._meanwhile.append((number, self.changes))
            elif self._counts is not None and number > self._number:
                _add(self._counts, self.changes)

    def doubt(self, number: int) -> None:
        """Forget all counts: it is unknown whether the transaction with this number has committed."""
        with self._lock:
            self._counts = self._meanwhile = None
            self._number = number

    def read(self, count: Callable[[], tuple[int, Sequence[tuple[Any, Any, int]]]]) -> Mapping[Key, int]:
        """Return the counts; `count` returns the last transaction's number and the counts of one snapshot."""
        if (known := self._known()) is not None:
            return known
        with self._counting:
            if (known := self._known()) is not None:  # another thread has counted meanwhile
                return known
            with self._lock:
                self._meanwhile = []
            try:
                number, rows = count()
            except BaseException:
                with self._lock:
                    self._meanwhile = None
                raise
            counts = Counter[Key]()
            for kind, status, tasks in rows:
                counts[_bytes(kind), _bytes(status)] += tasks
            with self._lock:
                meanwhile = self._take_meanwhile()
                # A transaction whose result is unknown shares its number with the next one.
                if meanwhile is not None and number > self._number:
                    for later, changes in meanwhile:
                        if later > number:
                            _add(counts, changes)
                    self._counts, self._number = counts, number
            return dict(counts)

    def _take_meanwhile(self) -> list[tuple[int, Counter[Key]]] | None:
        meanwhile, self._meanwhile = self._meanwhile, None
        return meanwhile

    def _known(self) -> Mapping[Key, int] | None:
        with self._lock:
            return None if self._counts is None else dict(self._counts)

    def _changed(self, kind: bytes, before: bytes, after: bytes | None) -> None:
        self.changes[kind, before] -= 1
        if after is not None:
            self.changes[kind, after] += 1


def _add(counts: Counter[Key], changes: Counter[Key]) -> None:
    for key, change in changes.items():
        counts[key] += change
        if not counts[key]:
            del counts[key]


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()

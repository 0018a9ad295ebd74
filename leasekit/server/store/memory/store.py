"""A store in memory, for `memory://`, tests and simulations; its tasks end with the process."""

import threading
import uuid
from collections.abc import Generator
from contextlib import contextmanager

from leasekit.server.store import Store, Tx, View
from leasekit.server.store.memory.later import MemoryLater
from leasekit.server.store.memory.leases import MemoryLeases
from leasekit.server.store.memory.rules import MemoryRules
from leasekit.server.store.memory.shares import MemoryShares
from leasekit.server.store.memory.tables import Tables
from leasekit.server.store.memory.view import MemoryView


class MemoryStore(Store):
    """Tasks in the memory of one process; they outlive the engine that opened the store."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._tables = Tables()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Do nothing: the store is always open."""

    @contextmanager
    def transaction(self) -> Generator[Tx]:
        with self._lock:
            tx = MemoryTx(self._tables)
            try:
                yield tx
            except BaseException:
                tx.undo()
                raise
            tx.remove_now()

    @contextmanager
    def view(self) -> Generator[View]:
        """Open a snapshot; the writer waits for its end."""
        with self._lock:
            yield MemoryView(self._tables)

    def close(self) -> None:
        """Keep all tasks, so that the store can be opened again."""


class MemoryTx(MemoryLeases, MemoryShares, MemoryRules, MemoryLater, Tx):
    """A transaction in memory, which can undo its changes. `Tx` describes the methods."""

    def latest_time(self) -> float:
        last = next(reversed(self._tables.entities.values()), None)
        granted_at = max((memory.granted_at for memory in self._tables.claims.values()), default=0.0)
        waiting = (seq for lanes in self._tables.lanes.values() for lane in lanes.values() for _, seq in lane)
        put_back = (run.at for seq in waiting for run in self._tables.runs.get(seq, {}).values())
        return max(granted_at, 0.0 if last is None else last.created_at, max(put_back, default=0.0))

    def probe_write(self) -> None:
        pass

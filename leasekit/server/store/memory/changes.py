"""Changes of a store in memory that can be undone."""

from collections.abc import Callable
from typing import Any, TypeVar

from leasekit.server.store.memory.tables import Tables
from leasekit.server.store.memory.view import MemoryView

_K = TypeVar("_K")
_V = TypeVar("_V")


class Changes(MemoryView):
    """A view that can change the rows, and can undo its changes."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self._undo: list[Callable[[], Any]] = []

    def undo(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _put(self, table: dict[_K, _V], key: _K, value: _V) -> None:
        if key in table:
            before = table[key]
            self._undo.append(lambda: table.__setitem__(key, before))
        else:
            self._undo.append(lambda: table.pop(key, None))
        table[key] = value

    def _drop(self, table: dict[_K, _V], key: _K) -> None:
        if key in table:
            before = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, before))

"""A queue in which callers take turns: a caller with few items never waits for all those of another with many.

Rule 1: the next item is one of the caller whose turn it is; that caller's next turn comes after those of all others.
Rule 2: of the items of one caller, urgent ones come first; otherwise the order is that of arrival. Urgent items do not
come before those of other callers, because a caller with many of these would keep all others out.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """The items of callers that wait for their turn. It is false if there are none."""

    def __init__(self) -> None:
        # caller → its urgent items, and its others; the caller whose turn it is comes first
        self._items: OrderedDict[str, tuple[OrderedDict[_T, None], OrderedDict[_T, None]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._items)

    def __len__(self) -> int:
        return sum(len(items) for queues in self._items.values() for items in queues)

    def add(self, caller: str, item: _T, *, is_urgent: bool = False) -> None:
        urgent, others = self._items.setdefault(caller, (OrderedDict(), OrderedDict()))
        (urgent if is_urgent else others)[item] = None

    def remove(self, caller: str, item: _T) -> None:
        """Remove an item of a caller; unknown items are ignored."""
        for items in (queues := self._items.get(caller, ())):
            items.pop(item, None)
        if queues and not any(queues):
            del self._items[caller]

    def first(self) -> _T:
        """Return the next item. Raises `StopIteration` if there is none."""
        urgent, others = next(iter(self._items.values()))
        return next(iter(urgent or others))

    def take(self) -> _T:
        """Remove the next item, and return it. Raises `StopIteration` if there is none."""
        caller, queues = next(iter(self._items.items()))
        item = self.first()
        (queues[0] or queues[1]).popitem(last=False)
        if any(queues):
            self._items.move_to_end(caller)
        else:
            del self._items[caller]
        return item

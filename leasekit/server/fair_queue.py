"""A queue in which callers take turns by work: one with little of it never waits for all of another with much.

Rule 1: the next item is one of the caller that has been given the least work since it began to wait. Who comes back
goes on from there, so that asking again gains nothing. This is start-time fair queueing (Goyal, Vin and Cheng, 1996).
Rule 2: of the items of one caller, urgent ones come first; otherwise the order is that of arrival. Urgent items do not
come before those of other callers, because a caller with many of these would keep all others out.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """The items of callers that wait for their turn. It is false if there are none."""

    def __init__(self) -> None:
        # caller → its urgent items and its others, each with its work
        self._items: dict[str, tuple[OrderedDict[_T, int], OrderedDict[_T, int]]] = {}
        self._turns: list[tuple[int, int, str]] = []  # a heap of callers; those whose start has changed are stale
        self._starts: dict[str, int] = {}  # caller → the work at which its turn is
        self._ends: dict[str, int] = {}  # caller → the work up to which it was served
        self._now = 0  # the start of the caller that was served last
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._items)

    def __len__(self) -> int:
        return sum(len(items) for queues in self._items.values() for items in queues)

    def add(self, caller: str, item: _T, *, work: int = 1, is_urgent: bool = False) -> None:
        if caller not in self._items:
            self._items[caller] = (OrderedDict(), OrderedDict())
            self._wait(caller)
        urgent, others = self._items[caller]
        (urgent if is_urgent else others)[item] = work

    def remove(self, caller: str, item: _T) -> None:
        """Remove an item of a caller; unknown items are ignored."""
        for items in (queues := self._items.get(caller, ())):
            items.pop(item, None)
        if queues and not any(queues):
            self._leave(caller)

    def first(self) -> _T:
        """Return the next item. Raises `IndexError` if there is none."""
        urgent, others = self._items[self._next()]
        return next(iter(urgent or others))

    def take(self) -> _T:
        """Remove the next item, and return it. Raises `IndexError` if there is none."""
        caller = self._next()
        heappop(self._turns)
        urgent, others = self._items[caller]
        item, work = (urgent or others).popitem(last=False)
        self._now = self._starts[caller]
        self._ends[caller] = self._now + work
        if urgent or others:
            self._wait(caller)
        else:
            self._leave(caller)
        return item

    def _next(self) -> str:
        """Return the caller whose turn it is."""
        while self._starts.get(self._turns[0][2]) != self._turns[0][0]:
            heappop(self._turns)
        return self._turns[0][2]

    def _wait(self, caller: str) -> None:
        """Give a caller its next turn."""
        start = self._starts[caller] = max(self._now, self._ends.get(caller, 0))
        heappush(self._turns, (start, next(self._numbers), caller))
        if len(self._turns) > 2 * len(self._items) + 10:
            self._turns = [turn for turn in self._turns if self._starts.get(turn[2]) == turn[0]]
            heapify(self._turns)
            self._ends = {caller: end for caller, end in self._ends.items() if end > self._now}

    def _leave(self, caller: str) -> None:
        del self._items[caller], self._starts[caller]
        if not self._items:  # nobody has waited for what any caller was given
            self._turns.clear()
            self._ends.clear()
            self._now = 0

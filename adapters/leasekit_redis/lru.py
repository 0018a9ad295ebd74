"""A bounded memory of kinds: each name that is leased is a kind of its own, so their number has no bound."""

from collections import OrderedDict
from typing import TypeVar

V = TypeVar("V")

MOST = 10_000


class LRU(OrderedDict[str, V]):
    """A dictionary that keeps the `MOST` entries that were set last."""

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MOST:
            self.popitem(last=False)

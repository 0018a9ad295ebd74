"""What is remembered of kinds, of the latest only: a name that is leased once is a kind of its own, and there is no end
of them."""

from collections import OrderedDict
from typing import TypeVar

__all__ = ["MOST", "Recent"]

V = TypeVar("V")

MOST = 10_000


class Recent(OrderedDict[str, V]):
    """A dictionary of the `MOST` entries that were set last."""

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MOST:
            self.popitem(last=False)

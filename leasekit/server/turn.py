"""One transaction's worth of work: what the roles get instead of a clock, a store and a generator of chance.

Roles (`frontend`, `hsc`, `consumer`) are functions of a turn and a batch. They run in the writer's thread, know of no
other, and leave what others wait for in `readied`.
"""

import random as _random
from typing import Any

import msgspec
from msgspec import Raw

from leasekit.server.store import Tx

__all__ = ["Turn", "to_bytes"]

_encode = msgspec.json.encode


class Turn:
    """A transaction, the moment at which all of it happens, and which kinds became ready, when."""

    __slots__ = ("instant", "now", "random", "readied", "tx")

    def __init__(self, tx: Tx, *, now: float, instant: float, random: _random.Random) -> None:
        self.tx = tx
        self.now = now  # the store's time
        self.instant = instant  # the same moment, by the clock that measures how long requests wait
        self.random = random
        self.readied: dict[str, float] = {}  # kind → when the first of what became ready is due

    def ready(self, kind: str, due_at: float) -> None:
        """Note that a task of this kind can be claimed from then on."""
        known = self.readied.get(kind)
        if known is None or due_at < known:
            self.readied[kind] = due_at


def to_bytes(value: Any) -> bytes:
    """A user's JSON value as the store keeps it: the bytes that came, or what the value encodes to."""
    return bytes(value) if type(value) is Raw else _encode(value)

"""The names of the keys.

All that belongs to one kind has one hash tag, so that a cluster keeps it in one slot and a script may change it at
once. Which kind an id belongs to is in a register of its own, in parts that are spread over the cluster.
"""

from functools import cached_property
from zlib import crc32

from leasekit_redis.recent import Recent

__all__ = ["PARTS", "Keys"]

PARTS = 32
"""Parts of the register of ids."""

# In the order in which common.lua unpacks them.
_OF_A_KIND = (
    "meta", "counts", "task", "state", "progress", "runs", "working", "leases",
    "due:0", "due:1", "due:2", "due:3", "due:4",
    "all", "ended", "dead", "dedupe", "claims", "claimed", "outbox", "waiting", "seen", "holders",
    "gated", "awaited", "ending", "damaged",
)  # fmt: skip

# What would end a hash tag early, or make an empty one.
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


class Keys:
    """The keys of one service: all begin with its prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._known: Recent[tuple[bytes, ...]] = Recent()

    def of_kind(self, kind: str) -> tuple[bytes, ...]:
        """All keys of a kind, in the order in which its scripts take them."""
        known = self._known.get(kind)
        if known is None:
            known = tuple(self.one(kind, name) for name in _OF_A_KIND)
            self._known[kind] = known
        return known

    def one(self, kind: str, name: str) -> bytes:
        """One key of a kind."""
        return f"{self._prefix}:{{{kind.translate(_ESCAPED)}}}:{name}".encode()

    def part(self, task_id: str) -> int:
        """Which part of the register has this id."""
        return crc32(task_id.encode(errors="replace")) % PARTS

    @cached_property
    def register(self) -> tuple[bytes, ...]:
        """The parts of the register: hashes id → kind."""
        return tuple(f"{self._prefix}:ids:{{{part}}}".encode() for part in range(PARTS))

    @cached_property
    def wanted(self) -> tuple[bytes, ...]:
        """Beside the parts of the register: who waits for ids that are in none of them yet."""
        return tuple(f"{self._prefix}:wanted:{{{part}}}".encode() for part in range(PARTS))

    @cached_property
    def kinds(self) -> bytes:
        """A sorted set: the kinds that there are, by when a mover is to visit them."""
        return f"{self._prefix}:kinds".encode()

    @cached_property
    def clients(self) -> bytes:
        """A sorted set: the clients, by when they are counted no more."""
        return f"{self._prefix}:clients".encode()

    def channel(self, name: str) -> str:
        """On which a client is told that something is ready."""
        return f"{self._prefix}:wake:{name}"

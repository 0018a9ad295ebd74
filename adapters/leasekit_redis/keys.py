"""The names of the keys.

All keys of one kind have one hash tag, so that a cluster keeps them in one slot and one script can change them. The
kind of each id is in a register of its own, in parts that are spread over the cluster.
"""

from functools import cached_property
from zlib import crc32

from leasekit.named import PREFIXES
from leasekit_redis.lru import LRU

PARTS = 32  # the number of parts of the register of ids

# In the order in which common.lua unpacks them.
OF_A_KIND = (
    "meta", "counts", "task", "state", "progress", "runs", "working", "leases",
    "due:0", "due:1", "due:2", "due:3", "due:4",
    "all", "ended", "dead", "dedupe", "claims", "claimed", "outbox", "waiting", "seen", "holders",
    "gated", "awaited", "ending", "damaged",
)  # fmt: skip

_OF_A_KIND = tuple(name.encode() for name in OF_A_KIND)

# Characters that would end a hash tag early, or make an empty one.
_ESCAPED = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def is_name(kind: str) -> bool:
    """Return whether a kind stands for a name: its one task has the same id, and exists only to be leased."""
    return kind.startswith(PREFIXES)


class Keys:
    """The keys of one service: all begin with its prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._known: LRU[tuple[bytes, ...]] = LRU()

    def of_kind(self, kind: str) -> tuple[bytes, ...]:
        known = self._known.get(kind)
        if known is None:
            tagged = self.one(kind, "")
            known = tuple(tagged + name for name in _OF_A_KIND)
            self._known[kind] = known
        return known

    def one(self, kind: str, name: str) -> bytes:
        return f"{self._prefix}:{{{kind.translate(_ESCAPED)}}}:{name}".encode()

    def part(self, task_id: str) -> int:
        return crc32(task_id.encode(errors="replace")) % PARTS

    @cached_property
    def register(self) -> tuple[bytes, ...]:
        """The parts of the register: hashes id → kind."""
        return tuple(f"{self._prefix}:ids:{{{part}}}".encode() for part in range(PARTS))

    @cached_property
    def wanted(self) -> tuple[bytes, ...]:
        """Sorted sets beside the parts of the register: waits for ids that are not registered yet."""
        return tuple(f"{self._prefix}:wanted:{{{part}}}".encode() for part in range(PARTS))

    @cached_property
    def kinds(self) -> bytes:
        """A sorted set: all kinds, by when they are due for maintenance."""
        return f"{self._prefix}:kinds".encode()

    def chain(self, root: str) -> bytes:
        """A sorted set: the tasks that came from this one (`chains`)."""
        return f"{self._prefix}:chain:{{{root.translate(_ESCAPED)}}}".encode()

    @cached_property
    def clients(self) -> bytes:
        """A sorted set: the clients, by when they are no longer counted."""
        return f"{self._prefix}:clients".encode()

    def cancels(self, worker: str) -> str:
        """Return the channel on which a worker hears of requested cancels."""
        return f"{self._prefix}:cancels:{worker}"

    def channel(self, name: str) -> str:
        """Return the channel on which the client of this name receives wake-ups for its claims."""
        return f"{self._prefix}:wake:{name}"

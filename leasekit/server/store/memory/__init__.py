"""A store in memory, for `memory://`, tests and simulations; its tasks end with the process."""

from leasekit.server.store.memory.store import MemoryStore

__all__ = ["MemoryStore"]

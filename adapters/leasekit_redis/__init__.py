"""The Redis backend: URLs of one Redis, a cluster, or Sentinels (`leasekit_redis.address`). No server is needed.

    redis://localhost:6379/0?prefix=leasekit&retention=14d

Each change of a task is one Lua script, so exactly one client makes the change, and everything that points at the task
changes with it. All keys of a kind are in one slot; kinds are spread over a cluster.

The backend's promises depend on how Redis is run. With `appendonly yes` and `appendfsync always` an answer means that
the change is on disk. With `appendfsync everysec` the last second may be lost when Redis is killed; without an
append-only file everything may be lost. A replica that takes over may not have the last changes, whatever the setting:
tasks just accepted are gone, tasks just settled run again, and a fence may be granted a second time. Redis refuses new
tasks when its memory is full (`maxmemory-policy noeviction`, the default; any `allkeys-…` policy deletes tasks
silently: do not use it). Leases end by the wall clock of Redis: a jump forward ends them early.
"""

from leasekit.registry import needs_extra

with needs_extra("redis"):
    from leasekit_redis.backend import RedisBackend, connect

__all__ = ["RedisBackend", "connect"]

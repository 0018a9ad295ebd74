"""The Redis backend: `redis://`, `rediss://` and `redis+cluster://` URLs. No server of ours is needed.

    redis://localhost:6379/0?prefix=leasekit&retention=180d

Each move of a task is one Lua script, so exactly one client makes it, and all that points at the task changes with it.
All keys of a kind are in one slot; kinds are spread over a cluster.

What it promises depends on how Redis is run. With `appendonly yes` and `appendfsync always` an answer means that the
change is on the disk; with `everysec` the last second, without a file everything may be lost when Redis is killed. A
replica that takes over may not have the last changes, whatever the setting: tasks just accepted are gone, tasks
just settled run again, and a fence may be granted a second time. Memory that is full refuses new tasks
(`maxmemory-policy noeviction`, the default; any `allkeys-…` policy deletes tasks silently: do not use it).
Leases end by Redis's wall clock: a jump forward ends them early.
"""

from leasekit_redis.backend import RedisBackend, connect

__all__ = ["RedisBackend", "connect"]

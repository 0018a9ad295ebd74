"""Find cycles of tasks that wait for one another, and so would wait forever.

A cycle cannot be seen when it is closed, because its tasks come in any order and are kept in any slot. The task that
closes a cycle waits too, so maintenance searches from every waiting task. A cycle that is found is real, though the
tasks are read one after the other: a task waits until its dependency has succeeded, and a dependency that is seen
waiting later has not succeeded.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from msgspec import Struct, msgpack

from leasekit.errors import ProtocolError
from leasekit.task import Status
from leasekit_redis.client import Link
from leasekit_redis.id_index import IdIndex
from leasekit_redis.records import decode

_MOST = 1000  # tasks that one search reads


class _Waiting(Struct):
    status: str = ""
    after: list[str] = []


_STATE = msgpack.Decoder(_Waiting)


async def find_cycle(link: Link, register: IdIndex, task_id: str, after: Sequence[str]) -> list[str] | None:
    """Return the ids on the way from a task back to itself, without its own; None if no (short) way exists."""

    async def waits_for(kind: str | None, name: str) -> list[str]:
        raw = None if kind is None else await link.command("HGET", link.keys.one(kind, "state"), name)
        state: _Waiting = _Waiting()
        with contextlib.suppress(ProtocolError):  # a damaged task has no known dependencies, and never begins
            state = _Waiting() if raw is None else decode(raw, _STATE)
        return state.after if state.status == Status.NEW else []

    came_from = dict.fromkeys(after, task_id)
    level = list(after)
    while level and len(came_from) <= _MOST:
        kinds = await register.find(level)
        awaited = await asyncio.gather(*(waits_for(kind, name) for kind, name in zip(kinds, level, strict=True)))
        edges = [(name, target) for name, names in zip(level, awaited, strict=True) for target in names]
        further: list[str] = []
        for name, target in edges:
            if target == task_id:
                return _way(came_from, task_id, name)
            if target not in came_from:
                came_from[target] = name
                further.append(target)
        level = further
    return None


def _way(came_from: dict[str, str], first: str, last: str) -> list[str]:
    way = [last]
    while came_from[way[-1]] != first:
        way.append(came_from[way[-1]])
    return way[::-1]

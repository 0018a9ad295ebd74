"""Tasks that wait for one another in a circle, which none of them would ever leave.

Nobody sees a circle when it is closed: its tasks come in any order, and are kept anywhere. Whoever closes it is a task
that waits too, so movers look from there. What they find is true, though they read one task after the other: a task
waits until what it waits for has succeeded, and what is seen to wait later has not.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from msgspec import Struct, msgpack

from leasekit.errors import ProtocolError
from leasekit.task import Status
from leasekit_redis.keys import Keys
from leasekit_redis.link import Link
from leasekit_redis.records import decode
from leasekit_redis.register import Register

__all__ = ["find_circle"]

_MOST = 1000  # tasks that are looked at


class _Waiting(Struct):
    status: str = ""
    after: list[str] = []


_STATE = msgpack.Decoder(_Waiting)


async def find_circle(
    link: Link, keys: Keys, register: Register, task_id: str, after: Sequence[str]
) -> list[str] | None:
    """The ids that lead from a task back to itself, without its own; None where there is no (short) such way."""

    async def waits_for(kind: str | None, name: str) -> list[str]:
        raw = None if kind is None else await link.command("HGET", keys.one(kind, "state"), name)
        state: _Waiting = _Waiting()
        with contextlib.suppress(ProtocolError):  # it is damaged: nobody can tell, and it never begins
            state = _Waiting() if raw is None else decode(raw, _STATE)
        return state.after if state.status == Status.NEW else []

    came_from = dict.fromkeys(after, task_id)
    level = list(after)
    while level and len(came_from) <= _MOST:
        kinds = await register.find(level)
        found = await asyncio.gather(*(waits_for(kind, name) for kind, name in zip(kinds, level, strict=True)))
        edges = [(name, one) for name, names in zip(level, found, strict=True) for one in names]
        further: list[str] = []
        for name, one in edges:
            if one == task_id:
                return _way(came_from, task_id, name)
            if one not in came_from:
                came_from[one] = name
                further.append(one)
        level = further
    return None


def _way(came_from: dict[str, str], first: str, last: str) -> list[str]:
    way = [last]
    while came_from[way[-1]] != first:
        way.append(came_from[way[-1]])
    return way[::-1]

"""Which kinds there are, and of which kind the task of an id is.

An id stands for one task whatever its kind, and calls name a task by its id alone; but each kind is in a slot of its
own. So there is a register, in parts that are slots of their own. An id is registered before its task is made, and
forgotten before its task is dropped: what is registered and not there was never made, or is about to be.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import msgpack

from leasekit.errors import ProtocolError
from leasekit_redis.keys import Keys
from leasekit_redis.link import Link
from leasekit_redis.records import Visit, decode, encode
from leasekit_redis.scripts import AGENDA, REGISTER, VISIT, WANT, Script

__all__ = ["Owner", "Register"]

_VISIT = msgpack.Decoder(Visit)
_KINDS = msgpack.Decoder(list[str | bool])


class Owner(NamedTuple):
    """The kind that an id belongs to. `is_wanted`: it does since just now, and tasks wait for it already."""

    kind: str
    is_wanted: bool


class Register:
    """The register of one service."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def kinds(self) -> list[str]:
        """All kinds that there are, or were, sorted."""
        await self.find([""])  # which a replica refuses: it may not have heard of all
        return sorted(kind.decode() for kind in await self._link.command("ZRANGE", self._keys.kinds, 0, -1))

    async def note(self, kinds: Iterable[str]) -> None:
        """There are tasks of these kinds, to be visited soon; to be called before there are."""
        await self._link.command("ZADD", self._keys.kinds, "LT", *(word for kind in kinds for word in (0, kind)))

    async def to_visit(self, *, interval: int, limit: int) -> Visit:
        """Kinds that are to be visited now; nobody else is told of them for an interval, unless they are noted."""
        visit: Visit = decode(await self._link.run(VISIT, [self._keys.kinds], encode([interval, limit])), _VISIT)
        return visit

    async def visited(self, kind: str, *, own_until: int, next_visit: int | None) -> None:
        """When a kind is to be visited next, or that there is nothing of it; unless it was noted meanwhile."""
        await self._link.run(AGENDA, [self._keys.kinds], encode([kind, own_until, next_visit]))

    async def reserve(self, wanted: Sequence[tuple[str, str]]) -> list[Owner]:
        """For each (id, kind) the kind that the id belongs to, this one if it was free."""
        found = [str(kind) for kind in await self._ask(wanted)]
        return [Owner(kind.removeprefix("/"), kind.startswith("/")) for kind in found]

    async def take_over(self, task_id: str, kind: str, instead_of: str) -> str:
        """The kind that an id belongs to; this one, where it belonged to one that does not have the task."""
        (found,) = await self._ask([(task_id, kind, instead_of)])
        return str(found).removeprefix("/")

    async def find(self, ids: Sequence[str]) -> list[str | None]:
        """The kind of each id, None where it is unknown."""
        return [kind if isinstance(kind, str) else None for kind in await self._ask([(one,) for one in ids])]

    async def want(self, waits: Sequence[tuple[str, str]], *, is_over: bool = False) -> list[str | None]:
        """For each (id, who waits for it) the id's kind; where it has none, who waits is noted, or no longer so."""
        found = await self._ask(
            [(one, who, is_over) for one, who in waits], WANT, (self._keys.register, self._keys.wanted)
        )
        return [kind if isinstance(kind, str) else None for kind in found]

    async def forget(self, ids: Sequence[str]) -> None:
        """These ids are free again."""
        parts: dict[int, list[str]] = {}
        for task_id in ids:
            parts.setdefault(self._keys.part(task_id), []).append(task_id)
        for part, some in parts.items():
            await self._link.command("HDEL", self._keys.register[part], *some)

    async def _ask(
        self,
        items: Sequence[tuple[Any, ...]],
        script: Script = REGISTER,
        tables: tuple[tuple[bytes, ...], ...] | None = None,
    ) -> list[str | bool]:
        """One round trip; in a cluster one for each part, at once. `tables`: which keys of a part the script takes."""
        tables = tables or (self._keys.register,)
        groups: dict[int, list[int]] = {}
        parts = [self._keys.part(item[0]) for item in items]
        for position, part in enumerate(parts):
            groups.setdefault(part if self._link.address.is_cluster else 0, []).append(position)
        answers: list[str | bool] = [False] * len(items)

        async def ask(positions: Sequence[int]) -> None:
            distinct = dict.fromkeys(parts[at] for at in positions)
            numbers = {part: 1 + number * len(tables) for number, part in enumerate(distinct)}
            keys = [table[part] for part in numbers for table in tables]
            argument = encode([(numbers[parts[at]], *items[at]) for at in positions])
            found: list[str | bool] = decode(await self._link.run(script, keys, argument), _KINDS)
            if len(found) != len(positions):
                raise ProtocolError(f"Redis gave {len(found)} kinds for {len(positions)} ids")
            for at, kind in zip(positions, found, strict=True):
                answers[at] = kind

        if len(groups) <= 1:
            for positions in groups.values():
                await ask(positions)
        else:
            await asyncio.gather(*(ask(positions) for positions in groups.values()))
        return answers

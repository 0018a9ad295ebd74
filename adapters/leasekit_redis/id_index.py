"""The register: all kinds, and the kind of each id.

An id stands for one task whatever its kind, and calls name a task by its id alone; but each kind is in a slot of its
own. So ids are looked up in a register, whose parts are in slots of their own. An id is registered before its task is
made, and forgotten before its task is deleted: a registered id without a task was never made, or is about to be. A
task may be deleted between the look-up of its id and the making of another one: then the id is registered again.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import msgpack

from leasekit.errors import ProtocolError
from leasekit_redis.client import Link, in_parts
from leasekit_redis.errors import FullMemory
from leasekit_redis.lru import LRU
from leasekit_redis.records import DueKinds, decode, encode
from leasekit_redis.scripts import DUE_KINDS, NOTE_ID_WAITS, REGISTER, RESCHEDULE_KIND, Script

_LATELY = 60.0  # seconds after a note within which maintenance of the kind does not become rare
_DUE_KINDS = msgpack.Decoder(DueKinds)
_KINDS = msgpack.Decoder(list[str | bool])


class Owner(NamedTuple):
    """The kind that an id belongs to. `is_new`: the id was registered just now; `is_wanted`: tasks wait for it too."""

    kind: str
    is_new: bool
    is_wanted: bool


class IdIndex:
    """The register of one service."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._noted: LRU[float] = LRU()  # kind → when it was noted last

    async def kinds(self) -> list[str]:
        await self.find([""])  # fails on a replica, which may not know all kinds
        return sorted(kind.decode() for kind in await self._link.command("ZRANGE", self._link.keys.kinds, 0, -1))

    async def note(self, kinds: Iterable[str]) -> None:
        """Make these kinds due for maintenance now; call this before tasks of them are made."""
        at, kinds = time.monotonic(), list(kinds)
        await self._link.command("ZADD", self._link.keys.kinds, "LT", *(word for kind in kinds for word in (0, kind)))
        for kind in kinds:
            self._noted[kind] = at

    def not_noted(self, kinds: Iterable[str]) -> set[str]:
        """Return the kinds that this client has not noted lately: their maintenance may be rare by now."""
        lately = time.monotonic() - _LATELY
        return {kind for kind in kinds if self._noted.get(kind, -math.inf) < lately}

    async def due_kinds(self, *, interval: int, limit: int) -> DueKinds:
        """Return the kinds that are due for maintenance. Other clients get them an interval later, or when noted."""
        raw = await self._link.run(DUE_KINDS, [self._link.keys.kinds], encode([interval, limit]))
        due: DueKinds = decode(raw, _DUE_KINDS)
        return due

    async def reschedule_kind(self, kind: str, *, own_until: int, due_at: int | None) -> None:
        """Set when a kind, got with this `own_until`, is due next, unless it was noted since; `None`: remove it."""
        await self._link.run(RESCHEDULE_KIND, [self._link.keys.kinds], encode([kind, own_until, due_at]))

    async def reserve(self, wanted: Sequence[tuple[str, str]]) -> list[Owner]:
        """Register each (id, kind) whose id is free; return the kind that each id belongs to."""
        kinds = [str(kind) for kind in await self._ask(wanted)]
        return [Owner(kind.lstrip("/"), kind.startswith("/"), kind.startswith("//")) for kind in kinds]

    async def take_over(self, task_id: str, kind: str, instead_of: str) -> str:
        """Move an id to `kind` if it still belongs to `instead_of`, which has no such task; return its kind."""
        (owner,) = await self._ask([(task_id, kind, instead_of)])
        return str(owner).lstrip("/")

    async def find(self, ids: Sequence[str]) -> list[str | None]:
        return [kind if isinstance(kind, str) else None for kind in await self._ask([(task_id,) for task_id in ids])]

    async def note_waits(self, waits: Sequence[tuple[str, str]], *, is_over: bool = False) -> list[str | None]:
        """Return each id's kind at once. If it has none, note its waiting task, or remove the note (`is_over`)."""
        items = [(task_id, waiting, is_over) for task_id, waiting in waits]
        kinds = await self._ask(items, NOTE_ID_WAITS, (self._link.keys.register, self._link.keys.wanted))
        return [kind if isinstance(kind, str) else None for kind in kinds]

    async def forget(self, kind: str, ids: Sequence[str]) -> None:
        """Free these ids where they still belong to this kind: another kind may have got one meanwhile."""
        await self._ask([(task_id, None, kind) for task_id in ids])

    async def _ask(
        self,
        items: Sequence[tuple[Any, ...]],
        script: Script = REGISTER,
        tables: tuple[tuple[bytes, ...], ...] | None = None,
    ) -> list[str | bool]:
        """Run a script of the register; in a cluster, one per part. `tables`: its keys of a part."""
        tables = tables or (self._link.keys.register,)
        groups: dict[int, list[int]] = {}
        parts = [self._link.keys.part(item[0]) for item in items]
        for position, part in enumerate(parts):
            groups.setdefault(part if self._link.address.is_cluster else 0, []).append(position)
        answers: list[str | bool] = [False] * len(items)

        async def ask(positions: Sequence[int]) -> None:
            try:
                for some in in_parts(positions):
                    found = await self._run(script, tables, [parts[at] for at in some], [items[at] for at in some])
                    for at, kind in zip(some, found, strict=True):
                        answers[at] = kind
            except FullMemory:
                # An id that was registered just now would stay for ever without its task.
                fresh = [items[at] for at in positions if len(items[at]) == 2 and answers[at] == f"/{items[at][1]}"]
                await self._ask([(task_id, None, kind) for task_id, kind in fresh])
                raise

        await asyncio.gather(*map(ask, groups.values()))
        return answers

    async def _run(
        self,
        script: Script,
        tables: tuple[tuple[bytes, ...], ...],
        parts: Sequence[int],
        items: Sequence[tuple[Any, ...]],
    ) -> list[str | bool]:
        """Run a script on items, each with its part of the register, and return what it says of each."""
        numbers = {part: 1 + number * len(tables) for number, part in enumerate(dict.fromkeys(parts))}
        keys = [table[part] for part in numbers for table in tables]
        argument = encode([(numbers[part], *item) for part, item in zip(parts, items, strict=True)])
        found: list[str | bool] = decode(await self._link.run(script, keys, argument), _KINDS)
        if len(found) != len(items):
            raise ProtocolError(f"Redis gave {len(found)} kinds for {len(items)} ids")
        return found

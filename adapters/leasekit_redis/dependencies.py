"""Tasks that run after others: submitted in any order, kept in any slot.

A task that is scheduled `after` others is made at once, in its kind's slot, and enters a lane only when all of them
have succeeded. The awaited tasks may be in other slots, or not exist yet, so no script sees both sides. Three rules
make sure that no end is missed:

1. A waiting task leaves its name where the awaited task is: in the slot of that task's kind, by the script that checks
   whether the task has ended (`note_waits.lua`); or, if the id has no kind yet, beside the register, by the script that
   looks the id up (`note_id_waits.lua`). The client that registers the id later carries the names to the kind
   (`adopt`).
2. The script that ends an awaited task notes it in its own slot, until the waiting tasks were released: at once by the
   client that has ended the task, or by the next maintenance (`release`).
3. Any step may be lost with its client, and is repeated by another client: repeats have no effect. Maintenance asks
   again, more and more rarely, for every waiting task (`ask_again`).

If an awaited task ends other than in success, the tasks that wait for it are dropped with a reason that names it, and
so are the tasks that wait for these.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import msgpack

from leasekit.errors import ProtocolError
from leasekit.task import Status
from leasekit_redis.client import Link
from leasekit_redis.dependency_cycles import find_cycle
from leasekit_redis.id_index import IdIndex
from leasekit_redis.records import Gated, decode, status_of
from leasekit_redis.scripts import NOTE_WAITS, RESOLVE_DEPENDENCY

_PATIENCE = 180 * 86400.0  # seconds, at least, for which a task waits for a task that was not scheduled
_SUSPECT = 86400.0  # seconds for which a waiting task is checked for a cycle
_PAGE = 500  # waiting tasks that are handled at once
_ROUNDS = 100  # generations of tasks that one call drops; maintenance drops the next ones
_WORDS = msgpack.Decoder(list[str | bool])
_IDS = msgpack.Decoder(list[str])


class Wait(NamedTuple):
    """The wait of a task for the end of another task, `name`."""

    id: str
    kind: str
    name: str


Resolution = tuple[Wait, str | None]  # a wait that is over, and why its task can never run; None: it can
Place = tuple[str, str]  # a kind and an id


class Dependencies:
    """The dependencies between the tasks of one service."""

    def __init__(self, link: Link, register: IdIndex) -> None:
        self._link = link
        self._register = register

    async def ask(self, waits: Sequence[Wait]) -> list[Wait]:
        """Register each wait; resolve it at once if the awaited task has ended. Return the waits for unknown ids."""
        unknown: list[Wait] = []
        for first in range(0, len(waits), _PAGE):
            unknown += await self._ask_page(waits[first : first + _PAGE])
        return unknown

    async def _ask_page(self, waits: Sequence[Wait]) -> list[Wait]:
        kinds = await self._register.note_waits([(wait.name, f"{wait.id}/{wait.kind}") for wait in waits])
        groups: dict[str, list[Wait]] = {}
        for wait, kind in zip(waits, kinds, strict=True):
            if kind is not None:
                groups.setdefault(kind, []).append(wait)
        told = await asyncio.gather(*(self._note_waits(kind, some) for kind, some in groups.items()))
        await self._release_in_turn(await self._resolve([wait for part in told for wait in part]))
        return [wait for wait, kind in zip(waits, kinds, strict=True) if kind is None]

    async def ask_again(self, kind: str, gated: Sequence[Gated], *, retention: float) -> None:
        """Register waits again in case a step was lost; drop tasks in a cycle, or too long after unknown ids."""
        waits = [Wait(task.id, kind, name) for task in gated for name in task.after]
        unknown = await self.ask(waits)
        patience = max(_PATIENCE, retention)
        impatient = {task.id for task in gated if task.age > 1000 * patience}
        reason = (
            f"which it was to run after, is unknown after {patience / 86400:.0f} days: it was never scheduled, or "
            "ended so long ago that it was forgotten"
        )
        told: list[Resolution] = [(wait, f'"{wait.name}", {reason}') for wait in unknown if wait.id in impatient]
        cycles = await asyncio.gather(*(self._resolutions_of_cycle(kind, task) for task in gated))
        told += [wait for cycle in cycles for wait in cycle]
        await self._release_in_turn(await self._resolve(told))

    async def _resolutions_of_cycle(self, kind: str, gated: Gated) -> list[Resolution]:
        if gated.age > 1000 * _SUSPECT:
            return []
        way = await find_cycle(self._link, self._register, gated.id, gated.after)
        if way is None:
            return []
        cycle = " after ".join(f'"{name}"' for name in [gated.id, *way, gated.id])
        return [(Wait(gated.id, kind, way[0]), f"it was to run after itself: {cycle}")]

    async def adopt(self, name: str, kind: str) -> None:
        """Carry the waits for an id to the kind that the id was registered for."""
        notes = self._link.keys.wanted[self._link.keys.part(name)]
        while members := await self._page_of_waits(notes, name):
            waits = [wait for one in members if (wait := _parse_wait(one))]
            await self._release_in_turn(await self._resolve(await self._note_waits(kind, waits)))
            await self._link.command("ZREM", notes, *members)

    async def release(self, kind: str, names: Iterable[str]) -> None:
        """Resolve the waits for these tasks if they have ended, and for tasks that this drops, `_ROUNDS` deep."""
        await self._release_in_turn([(kind, name) for name in names])

    async def withdraw(self, kind: str, unmet: Sequence[Gated]) -> None:
        waits = [Wait(task.id, kind, name) for task in unmet for name in task.after]
        if not waits:
            return
        named = [(wait.name, f"{wait.id}/{wait.kind}") for wait in waits]
        kinds = await self._register.note_waits(named, is_over=True)
        for (name, waiting), place in zip(named, kinds, strict=True):
            if place is not None:
                await self._link.command("ZREM", self._link.keys.one(place, "awaited"), f"{name}/{waiting}")

    async def _note_waits(self, kind: str, waits: Sequence[Wait]) -> list[Resolution]:
        """Register waits for tasks of this kind; return the waits that are over already."""
        argument = [(wait.name, f"{wait.id}/{wait.kind}") for wait in waits]
        words: list[str | bool] = decode(await self._link.run_for(kind, NOTE_WAITS, argument), _WORDS)
        if len(words) != len(waits):
            raise ProtocolError(f"Redis gave {len(words)} answers for {len(waits)} waiting tasks")
        return [(wait, _reason(wait, word)) for wait, word in zip(waits, words, strict=True) if isinstance(word, str)]

    async def _resolve(self, resolutions: Sequence[Resolution]) -> list[Place]:
        """Resolve these waits; return the tasks that were dropped by it and that other tasks wait for."""
        groups: dict[str, list[Resolution]] = {}
        for wait, reason in resolutions:
            groups.setdefault(wait.kind, []).append((wait, reason))

        async def resolve(kind: str, some: Sequence[Resolution]) -> list[Place]:
            argument = [(wait.id, wait.name, reason) for wait, reason in some]
            ids: list[str] = decode(await self._link.run_for(kind, RESOLVE_DEPENDENCY, argument), _IDS)
            return [(kind, task_id) for task_id in ids]

        found = await asyncio.gather(*(resolve(kind, some) for kind, some in groups.items()))
        return [place for places in found for place in places]

    async def _release_in_turn(self, ended: Sequence[Place]) -> None:
        for _ in range(_ROUNDS):
            if not ended:
                return
            found = await asyncio.gather(*(self._release_one(kind, name) for kind, name in ended))
            ended = [place for places in found for place in places]

    async def _release_one(self, kind: str, name: str) -> list[Place]:
        """Resolve the waits for a task if it has ended; return the awaited tasks that were dropped by it."""
        status = status_of(await self._link.command("HGET", self._link.keys.one(kind, "state"), name))
        after: list[Place] = []
        if status is not None and status.ended:  # it may have been redriven meanwhile
            names = self._link.keys.one(kind, "awaited")
            while members := await self._page_of_waits(names, name):
                waits = [wait for one in members if (wait := _parse_wait(one))]
                after += await self._resolve([(wait, _reason(wait, status)) for wait in waits])
                await self._link.command("ZREM", names, *members)
                if len(members) < _PAGE:  # no wait is left at a task that has ended
                    break
        await self._link.command("ZREM", self._link.keys.one(kind, "ending"), name)
        return after

    async def _page_of_waits(self, key: bytes, name: str) -> list[bytes]:
        # `0` is the character after `/`, and no id contains `/`.
        found: list[bytes] = await self._link.command("ZRANGEBYLEX", key, f"[{name}/", f"({name}0", "LIMIT", 0, _PAGE)
        return found


def _parse_wait(member: bytes) -> Wait | None:
    """Parse a wait; None if it cannot be read: maintenance registers the wait again anyway."""
    try:
        name, task_id, kind = member.decode().split("/")
    except ValueError:
        return None
    return Wait(task_id, kind, name)


def _reason(wait: Wait, status: str) -> str | None:
    return None if status == Status.SUCCESS else f'"{wait.name}", which it was to run after, ended as {status}'

"""Tasks that run after others: submitted in any order, kept in any slot.

A task that is scheduled `after` others is made at once, in its kind's slot, and stands in no lane before each of them
has succeeded. What it waits for may be kept elsewhere, or not be there yet, so no script sees both sides. This is how
they never miss one another:

1. Who waits leaves a name where the other is: in the slot of its kind, in the script that looks whether it has ended;
   or, where its id is of no kind yet, beside the register, in the script that looks for it. Whoever registers that id
   is told, and carries the names to the kind (`adopt`).
2. A task that others wait for is noted in its own slot by the script that ends it, until those were told: by whoever
   has ended it, at once, or by the next mover (`release`).
3. Each step may be lost with the client that makes it, and be made again by another: to be told twice has no effect. A
   mover asks again, more and more rarely, for every task that waits (`ask_again`).

One whose other ended otherwise than in success is dropped, with a reason that names it; so are those after it in turn.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import msgpack

from leasekit.errors import ProtocolError
from leasekit.task import Status
from leasekit_redis.circles import find_circle
from leasekit_redis.keys import Keys
from leasekit_redis.link import Link
from leasekit_redis.records import Gated, decode, encode, status_of
from leasekit_redis.register import Register
from leasekit_redis.scripts import AWAIT, MEET

__all__ = ["Dependencies", "Wait"]

_PATIENCE = 180 * 86400.0  # seconds for which a task waits at least for one that nobody has scheduled
_SUSPECT = 86400.0  # seconds for which a task that waits is looked at as one that may have closed a circle
_PAGE = 500  # names that are carried, or told, at once
_ROUNDS = 100  # generations that one call tells; those after them are told by movers
_WORDS = msgpack.Decoder(list[str | bool])
_IDS = msgpack.Decoder(list[str])


class Wait(NamedTuple):
    """One task waits for the end of another, `name`."""

    id: str
    kind: str
    name: str


Told = tuple[Wait, str | None]  # with the reason why it will never be met; None: it is
Place = tuple[str, str]  # a kind and an id


class Dependencies:
    """Who waits for whom, in one service."""

    def __init__(self, link: Link, keys: Keys, register: Register) -> None:
        self._link = link
        self._keys = keys
        self._register = register

    async def ask(self, waits: Sequence[Wait]) -> list[Wait]:
        """Have each of these told when what it waits for ends, at once where it has. Gives those for unknown ids."""
        unknown: list[Wait] = []
        for first in range(0, len(waits), _PAGE):
            unknown += await self._ask(waits[first : first + _PAGE])
        return unknown

    async def _ask(self, waits: Sequence[Wait]) -> list[Wait]:
        kinds = await self._register.want([(wait.name, f"{wait.id}/{wait.kind}") for wait in waits])
        groups: dict[str, list[Wait]] = {}
        for wait, kind in zip(waits, kinds, strict=True):
            if kind is not None:
                groups.setdefault(kind, []).append(wait)
        told = await asyncio.gather(*(self._await(kind, some) for kind, some in groups.items()))
        await self._release(await self._tell([one for some in told for one in some]))
        return [wait for wait, kind in zip(waits, kinds, strict=True) if kind is None]

    async def ask_again(self, kind: str, gated: Sequence[Gated], *, retention: float) -> None:
        """What was lost on its way is made up for; who has waited too long for what nobody knows is dropped."""
        waits = [Wait(one.id, kind, name) for one in gated for name in one.after]
        unknown = await self.ask(waits)
        patience = max(_PATIENCE, retention)
        impatient = {one.id for one in gated if one.age > 1000 * patience}
        reason = (
            f"which it was to run after, is unknown after {patience / 86400:.0f} days: it was never scheduled, or "
            "ended so long ago that it was forgotten"
        )
        told: list[Told] = [(wait, f'"{wait.name}", {reason}') for wait in unknown if wait.id in impatient]
        circles = await asyncio.gather(*(self._circle(kind, one) for one in gated))
        told += [one for some in circles for one in some]
        await self._release(await self._tell(told))

    async def _circle(self, kind: str, gated: Gated) -> list[Told]:
        if gated.age > 1000 * _SUSPECT:
            return []
        way = await find_circle(self._link, self._keys, self._register, gated.id, gated.after)
        if way is None:
            return []
        circle = " after ".join(f'"{name}"' for name in [gated.id, *way, gated.id])
        return [(Wait(gated.id, kind, way[0]), f"it was to run after itself: {circle}")]

    async def adopt(self, name: str, kind: str) -> None:
        """Carry the names of those who waited for an id to the kind that it belongs to by now."""
        notes = self._keys.wanted[self._keys.part(name)]
        while members := await self._page(notes, name):
            waits = [wait for one in members if (wait := _wait(one))]
            await self._release(await self._tell(await self._await(kind, waits)))
            await self._link.command("ZREM", notes, *members)

    async def release(self, kind: str, names: Iterable[str]) -> None:
        """Tell those who wait for these tasks, which have ended; and those after them, where that is their end too."""
        await self._release([(kind, name) for name in names])

    async def withdraw(self, kind: str, unmet: Sequence[Gated]) -> None:
        """These wait no more: their names are left nowhere."""
        waits = [Wait(one.id, kind, name) for one in unmet for name in one.after]
        if not waits:
            return
        who = [f"{wait.id}/{wait.kind}" for wait in waits]
        named = [(wait.name, one) for wait, one in zip(waits, who, strict=True)]
        for (name, one), place in zip(named, await self._register.want(named, is_over=True), strict=True):
            if place is not None:
                await self._link.command("ZREM", self._keys.one(place, "awaited"), f"{name}/{one}")

    async def _await(self, kind: str, waits: Sequence[Wait]) -> list[Told]:
        """Leave the names of who waits for tasks of this kind; gives those for whom it is over."""
        argument = encode([(wait.name, f"{wait.id}/{wait.kind}") for wait in waits])
        words: list[str | bool] = decode(await self._link.run(AWAIT, self._keys.of_kind(kind), argument), _WORDS)
        if len(words) != len(waits):
            raise ProtocolError(f"Redis gave {len(words)} answers on {len(waits)} tasks that wait")
        return [(wait, _reason(wait, word)) for wait, word in zip(waits, words, strict=True) if isinstance(word, str)]

    async def _tell(self, told: Sequence[Told]) -> list[Place]:
        """Tell these; gives those of them that have ended by it, and are waited for in turn."""
        groups: dict[str, list[Told]] = {}
        for one in told:
            groups.setdefault(one[0].kind, []).append(one)

        async def tell(kind: str, some: Sequence[Told]) -> list[Place]:
            argument = encode([(wait.id, wait.name, reason) for wait, reason in some])
            ids: list[str] = decode(await self._link.run(MEET, self._keys.of_kind(kind), argument), _IDS)
            return [(kind, task_id) for task_id in ids]

        found = await asyncio.gather(*(tell(kind, some) for kind, some in groups.items()))
        return [place for places in found for place in places]

    async def _release(self, ended: Sequence[Place]) -> None:
        for _ in range(_ROUNDS):
            if not ended:
                return
            found = await asyncio.gather(*(self._release_one(kind, name) for kind, name in ended))
            ended = [place for places in found for place in places]

    async def _release_one(self, kind: str, name: str) -> list[Place]:
        status = status_of(await self._link.command("HGET", self._keys.one(kind, "state"), name))
        after: list[Place] = []
        if status is not None and status.ended:  # it may have been redriven meanwhile
            names = self._keys.one(kind, "awaited")
            while members := await self._page(names, name):
                waits = [wait for one in members if (wait := _wait(one))]
                after += await self._tell([(wait, _reason(wait, status)) for wait in waits])
                await self._link.command("ZREM", names, *members)
                if len(members) < _PAGE:  # nobody leaves a name with what has ended
                    break
        await self._link.command("ZREM", self._keys.one(kind, "ending"), name)
        return after

    async def _page(self, key: bytes, name: str) -> list[bytes]:
        # `0` comes after `/`, which is in no name.
        found: list[bytes] = await self._link.command("ZRANGEBYLEX", key, f"[{name}/", f"({name}0", "LIMIT", 0, _PAGE)
        return found


def _wait(member: bytes) -> Wait | None:
    """Who waits; None: nobody can tell, and a task that waits is asked for again all the same."""
    try:
        name, task_id, kind = member.decode().split("/")
    except ValueError:
        return None
    return Wait(task_id, kind, name)


def _reason(wait: Wait, status: str) -> str | None:
    return None if status == Status.SUCCESS else f'"{wait.name}", which it was to run after, ended as {status}'

"""Chains: what each task came from, and the cancel of all tasks that came from one.

The tasks of a chain may be in any slots. So a task keeps its parent and its root, and a sorted set in a slot of its own
names the tasks of each chain. Three rules make sure that no accepted task is missed:

1. A task is noted in its chain before it is made, and is made as *cancelled* if the chain is cancelled by then.
2. A cancel marks the chain first, and cancels then what is noted. Whoever made a task looks at the mark once more
   before the task is accepted: a cancel in between has perhaps not found it.
3. What is noted and was never made, because its client has died or its id belonged to another task, is forgotten when
   the chain is listed.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import MsgspecError, msgpack

from leasekit_redis.client import Link, in_parts
from leasekit_redis.id_index import IdIndex
from leasekit_redis.keys import is_name
from leasekit_redis.lru import LRU
from leasekit_redis.records import Left, NewRecord, decode, encode
from leasekit_redis.scripts import CHAIN_JOIN, CHAIN_LEAVE

_MARK = "/"  # no id and no kind is empty, so no member is this
_FLAG = msgpack.Decoder(bool)
_STATE = msgpack.Decoder()


class Member(NamedTuple):
    """A task of a chain, and its place there."""

    id: str
    kind: str
    place: int

    def __str__(self) -> str:
        return f"{self.id}/{self.kind}"


class Chains:
    """The chains of one service."""

    def __init__(self, link: Link, register: IdIndex) -> None:
        self._link = link
        self._register = register
        self._roots: LRU[str] = LRU()  # of tasks that this client knows of

    async def join(self, records: Sequence[NewRecord], kinds: Sequence[str]) -> list[int]:
        """Note the chains of tasks that are about to be made; return the positions of those to `settle`."""
        named = {record.id for record in records}
        parents = {record.id: record.parent for record in records if record.parent is not None}
        roots = await self.roots(set(parents.values()) - named)
        chained = [at for at, record in enumerate(records) if record.parent is not None]
        groups: dict[str, list[int]] = {}
        for at in chained:
            records[at].root = root = _root(records[at].id, parents, roots)
            groups.setdefault(root, []).append(at)

        async def note(root: str, positions: Sequence[int]) -> None:
            for some in in_parts(positions):
                members = [f"{records[at].id}/{kinds[at]}" for at in some]
                raw = await self._link.run(CHAIN_JOIN, [self._link.keys.chain(root)], encode(members))
                for at in some if decode(raw, _FLAG) else ():
                    records[at].is_over = True

        await asyncio.gather(*(note(root, positions) for root, positions in groups.items()))
        for at in chained:
            self._roots[records[at].id] = records[at].root or records[at].id
        return [at for at in chained if not records[at].is_over]

    async def cancelled(self, roots: Iterable[str]) -> set[str]:
        """Return those of these roots whose chains are cancelled."""
        names = list(roots)
        scores = await asyncio.gather(
            *(self._link.command("ZSCORE", self._link.keys.chain(root), _MARK) for root in names)
        )
        return {root for root, score in zip(names, scores, strict=True) if score is not None}

    async def mark(self, root: str) -> None:
        """Note that a chain is cancelled."""
        await self._link.command("ZADD", self._link.keys.chain(root), 0, _MARK)

    async def roots(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the roots of these tasks; an unknown task is its own root."""
        found = {task_id: self._roots[task_id] for task_id in ids if task_id in self._roots}
        unknown = [task_id for task_id in ids if task_id not in found]
        kinds = await self._register.find(unknown) if unknown else []
        groups: dict[str, list[str]] = {}
        for task_id, kind in zip(unknown, kinds, strict=True):
            if kind is None:
                found[task_id] = task_id
            else:
                groups.setdefault(kind, []).append(task_id)
        for kind, some in groups.items():
            states = await self._link.command("HMGET", self._link.keys.one(kind, "state"), *some)
            for task_id, state in zip(some, states, strict=True):
                found[task_id] = root = _root_in(state) or task_id
                if state is not None:
                    self._roots[task_id] = root
        return found

    async def members(self, root: str, *, after: int | None, newest: bool, limit: int) -> list[Member]:
        """Return the first tasks of a chain after this place; the root, if it is known, is the oldest."""
        command, least, most = ("ZREVRANGEBYSCORE", "+inf", "(0") if newest else ("ZRANGEBYSCORE", "(0", "+inf")
        first = least if after is None else f"({after}"
        key = self._link.keys.chain(root)
        found = await self._link.command(command, key, first, most, "WITHSCORES", "LIMIT", 0, limit)
        named = [_member(found[at], found[at + 1]) for at in range(0, len(found), 2)]
        members = [member for member in named if member is not None]
        if (after is None and not newest) or (newest and after != 0 and len(members) < limit):
            (kind,) = await self._register.find([root])
            of_root = [] if kind is None else [Member(root, kind, 0)]
            members = members + of_root if newest else of_root + members
        return members[:limit]

    async def leave(self, left: Sequence[Left], kind: str) -> None:
        """Forget tasks of this kind that were deleted, or never made."""
        groups: dict[str, list[str]] = {}
        for task in left:
            groups.setdefault(task.root, []).append(f"{task.id}/{kind}")
        for root, members in groups.items():
            await self._link.run(CHAIN_LEAVE, [self._link.keys.chain(root)], encode(members))


def parent_of(task_id: str, kind: str, parent: str | None, after: Sequence[str]) -> str | None:
    """Return the parent of a new task: the task whose run scheduled it, or else the first task that it waits for."""
    if is_name(kind):
        return None
    parent = parent or (after[0] if after else None)
    return None if parent == task_id else parent


def _root(task_id: str, parents: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Return the root of a task, whose parents may be new too."""
    way = [task_id]
    while way[-1] in parents and parents[way[-1]] not in way:
        way.append(parents[way[-1]])
    return known.get(way[-1], way[-1])


def _root_in(state: bytes | None) -> str | None:
    try:
        root = _STATE.decode(state or b"")["root"]
    except (MsgspecError, ValueError, KeyError, TypeError):
        return None
    return root if isinstance(root, str) else None


def _member(member: bytes, score: bytes) -> Member | None:
    """Parse a member; None if it is the mark, or cannot be read."""
    try:
        task_id, kind = member.decode().split("/")
        place = int(float(score))
    except (ValueError, OverflowError):
        return None
    return Member(task_id, kind, place) if task_id and kind else None

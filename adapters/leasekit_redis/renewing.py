"""Heartbeats and results of lease holders: one script for each kind.

The kind is part of the token, so a batch is one round trip; only a kind that is too long for a token is looked up.
Each name is a kind, and a process may hold a thousand: where one server has all keys, one script renews many kinds.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType, msgpack
from msgspec.structs import replace

from leasekit.errors import BackendError, ProtocolError
from leasekit.task import Verdict
from leasekit.wire import BeatItem, SettlementItem
from leasekit_redis import decoding
from leasekit_redis.client import LARGE, MOST, Link, in_parts
from leasekit_redis.clocks import Clocks
from leasekit_redis.dependencies import Dependencies
from leasekit_redis.id_index import IdIndex
from leasekit_redis.keys import is_name
from leasekit_redis.records import Heard, Result, decode, encode
from leasekit_redis.scripts import BEAT, BEAT_EACH, SETTLE, Script

_HEARD = msgpack.Decoder(Heard)
_HEARD_EACH = msgpack.Decoder(list[Heard | None])
_SUCCESSORS = uuid.UUID("6c656173-656b-5974-8000-7265646973ff")
_NULL = b"null"

Positions = Sequence[int]  # of items in a batch
Ask = Callable[[str, Positions], Awaitable[list[Verdict]]]


class Renewing:
    """Renew and settle the leases of one worker. `deliver(kind, outbox)` schedules successors."""

    def __init__(
        self,
        link: Link,
        clocks: Clocks,
        register: IdIndex,
        *,
        worker: str,
        deliver: Callable[[str, Sequence[str]], Awaitable[None]],
        dependencies: Dependencies,
        chance: random.Random,
    ) -> None:
        self._link = link
        self._clocks = clocks
        self._register = register
        self._worker = worker
        self._deliver = deliver
        self._dependencies = dependencies
        self._random = chance
        self._retention = round(1000 * link.address.retention)

    async def beat(self, beats: Sequence[BeatItem]) -> list[Verdict]:
        items: list[tuple[Any, ...]] = [
            (beat.id, beat.token, beat.started)
            + (() if beat.progress is UNSET else _numbered(bytes(beat.progress).decode(), beat.progress_seq))
            for beat in beats
        ]

        async def ask(kind: str, some: Positions) -> list[Verdict]:
            batch = items if len(some) == len(items) else [items[at] for at in some]
            words = await self._run(BEAT, kind, "beats", batch)
            return decoding.beaten([item[0] for item in batch], words)

        groups = await self._by_kind(beats)
        if len(groups) == 1 or not self._link.is_one_server:
            return await self._each_kind(beats, groups, ask)
        return await self._beat_many_kinds(beats, items, groups, ask)

    async def _beat_many_kinds(
        self, beats: Sequence[BeatItem], items: Sequence[tuple[Any, ...]], groups: dict[str, list[int]], ask: Ask
    ) -> list[Verdict]:
        """Renew leases in few scripts; ask alone for a kind that is large, or whose part of a script failed.

        A proxy in front of several servers refuses such scripts, or the keys that they make: they are not tried again.
        """
        answered: dict[str, list[Verdict]] = {}

        async def part(arguments: dict[str, bytes]) -> None:
            asked_at = time.monotonic()
            keys = [self._link.keys.one(kind, "meta") for kind in arguments]
            try:
                answer = decode(await self._link.run(BEAT_EACH, keys, *arguments.values()), _HEARD_EACH)
            except ProtocolError:
                self._link.is_one_server = False
                return
            except BackendError as error:
                why = str(error)
                answered.update({kind: _failed(beats, groups[kind], why) for kind in arguments})
                return
            self._link.is_one_server &= any(answer)
            for kind, heard in zip(arguments, answer, strict=True):
                if heard is not None:
                    self._clocks.told(kind, heard.now, asked_at=asked_at, steps_back=heard.steps_back)
                    answered[kind] = decoding.beaten([beats[at].id for at in groups[kind]], heard.words)

        await asyncio.gather(*(part(arguments) for arguments in self._parts(items, groups)))
        return await self._each_kind(beats, groups, ask, answered)

    def _parts(self, items: Sequence[tuple[Any, ...]], groups: dict[str, list[int]]) -> Iterator[dict[str, bytes]]:
        """Yield the arguments of the kinds of each script; a kind that is too large for a script is left out."""
        part: dict[str, bytes] = {}
        room, space = MOST, LARGE
        for kind, positions in groups.items():
            argument = self._argument(kind, "beats", [items[at] for at in positions])
            work = 1 + len(positions)  # a kind costs about as much as a lease
            if work > MOST or len(argument) > LARGE:
                continue
            if work > room or len(argument) > space:
                yield part
                part, room, space = {}, MOST, LARGE
            part[kind] = argument
            room, space = room - work, space - len(argument)
        if part:
            yield part

    async def settle(self, settlements: Sequence[SettlementItem]) -> list[Verdict]:
        async def ask(kind: str, some: Positions) -> list[Verdict]:
            batch = [self._result(settlements[at]) for at in some]
            words = await self._run(SETTLE, kind, "results", batch)
            verdicts = decoding.settled([result.id for result in batch], words)
            accepted = [(result, word) for result, word in zip(batch, words, strict=True) if word in (1, 2)]
            # At once; maintenance repeats what fails here, because Redis keeps the successors and the ids.
            with contextlib.suppress(BackendError):
                await self._deliver(kind, [text for result, _ in accepted for text in result.successors or ()])
            with contextlib.suppress(BackendError):
                await self._dependencies.release(kind, [result.id for result, word in accepted if word == 2])
            return verdicts

        return await self._each_kind(settlements, await self._by_kind(settlements), ask)

    async def _run(self, script: Script, kind: str, field: str, batch: Sequence[Any]) -> list[decoding.Word]:
        """Run a script on each part of a batch; a part that is too large is split once more."""
        if len(batch) > MOST:
            return [word for part in in_parts(batch) for word in await self._run(script, kind, field, part)]
        asked_at = time.monotonic()
        argument = self._argument(kind, field, batch)
        if len(argument) > LARGE and len(batch) > 1:
            half = len(batch) // 2
            return [
                word for part in (batch[:half], batch[half:]) for word in await self._run(script, kind, field, part)
            ]
        heard: Heard = decode(await self._run_one(script, kind, argument), _HEARD)
        self._clocks.told(kind, heard.now, asked_at=asked_at, steps_back=heard.steps_back)
        return heard.words

    async def _run_one(self, script: Script, kind: str, argument: bytes) -> bytes | None:
        """Run a script on a kind. The settling of a name on a single server also gets the keys that all kinds share."""
        if script is SETTLE and is_name(kind) and self._link.is_one_server:
            with contextlib.suppress(ProtocolError):
                return await self._link.run_for_name(kind, script, [self._link.keys.kinds], argument)
        return await self._link.run(script, self._link.keys.of_kind(kind), argument)

    def _argument(self, kind: str, field: str, batch: Sequence[Any]) -> bytes:
        name = {"name": kind, "retention": self._retention} if is_name(kind) else {}
        return encode({"worker": self._worker, **self._clocks.known(kind), **name, field: batch})

    async def _each_kind(
        self,
        items: Sequence[BeatItem | SettlementItem],
        groups: dict[str, list[int]],
        ask: Ask,
        answered: Mapping[str, list[Verdict]] = MappingProxyType({}),
    ) -> list[Verdict]:
        """Make one request for each kind that is not answered, concurrently; if one fails, the other answers count."""
        if len(groups) == 1:
            ((kind, positions),) = groups.items()
            if len(positions) == len(items):
                return await ask(kind, positions)
        found = [Verdict(id=item.id, verdict="gone", reason="unknown") for item in items]

        async def part(kind: str, positions: Positions) -> None:
            try:
                verdicts = answered[kind] if kind in answered else await ask(kind, positions)
            except BackendError as error:
                if len(groups) == 1:
                    raise
                verdicts = _failed(items, positions, str(error))
            for at, verdict in zip(positions, verdicts, strict=True):
                found[at] = verdict

        await asyncio.gather(*(part(kind, positions) for kind, positions in groups.items()))
        return found

    async def _by_kind(self, items: Sequence[BeatItem | SettlementItem]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for position, item in enumerate(items):
            groups.setdefault(item.token.partition(".")[2], []).append(position)
        if strangers := groups.pop("", None):
            kinds = await self._register.find([items[at].id for at in strangers])
            for at, kind in zip(strangers, kinds, strict=True):
                if kind is not None:
                    groups.setdefault(kind, []).append(at)
        return groups

    def _result(self, item: SettlementItem) -> Result:
        return Result(
            id=item.id,
            token=item.token,
            outcome=item.outcome,
            digest=_digest(item),
            chance=self._random.random(),
            result=_text(item.result),
            error=_text(item.error),
            retry_after=None if item.retry_after is None else round(1000 * item.retry_after),
            progress=None if isinstance(item.progress, UnsetType) else bytes(item.progress).decode(),
            progress_seq=item.progress_seq,
            successors=_successors(item) or None,
        )


def _failed(items: Sequence[BeatItem | SettlementItem], positions: Positions, why: str) -> list[Verdict]:
    return [Verdict(id=items[at].id, verdict="failed", reason=why) for at in positions]


def _numbered(progress: str, number: int | None) -> tuple[Any, ...]:
    return (progress,) if number is None else (progress, number)


def _successors(item: SettlementItem) -> list[str]:
    # A report of one claim always names the same ids, so that its repeat makes no second successor.
    return [
        msgspec.json.encode(
            replace(
                task,
                id=task.id or str(uuid.uuid5(_SUCCESSORS, f"{item.id}/{item.token}/{position}")),
                parent=item.id,
            )
        ).decode()
        for position, task in enumerate(item.then)
    ]


def _digest(item: SettlementItem) -> str:
    progress = None if item.progress is UNSET else [item.progress]
    body = [item.outcome, item.result, item.error, item.retry_after, progress, item.then]
    return blake2b(msgspec.json.encode(body), digest_size=16).hexdigest()


def _text(value: Raw) -> str | None:
    raw = bytes(value)
    return None if raw == _NULL else raw.decode()

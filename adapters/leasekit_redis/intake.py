"""Scheduling of tasks: register their ids, then run one script for each kind."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

from msgspec import msgpack

from leasekit.backend import payload_digest
from leasekit.errors import BackendError, ProtocolError, Unavailable
from leasekit.ids import uuid7s
from leasekit.task import DEFAULTS, Scheduled, Status, effective
from leasekit.wire import NewTaskItem, traceparent
from leasekit_redis.chains import Chains, parent_of
from leasekit_redis.client import LARGE, Link, by_kind, in_parts
from leasekit_redis.dependencies import Dependencies, Wait
from leasekit_redis.errors import FullMemory
from leasekit_redis.id_index import IdIndex, Owner
from leasekit_redis.keys import is_name
from leasekit_redis.records import Added, NewRecord, Stored, decode, encode, json_text, status_of
from leasekit_redis.scripts import CANCEL, SCHEDULE

_ANSWERS = msgpack.Decoder(list[Added | bool])
_LATEST = 253402214400000  # the end of the year 9999, less a day: expressible in every zone


class Intake:
    """Accept tasks, each once: the same id, or a live dedupe key, makes no second task."""

    def __init__(self, link: Link, register: IdIndex, dependencies: Dependencies, chains: Chains) -> None:
        self._link = link
        self._register = register
        self._dependencies = dependencies
        self._chains = chains

    async def schedule(self, tasks: Sequence[NewTaskItem]) -> list[Scheduled]:
        """Schedule tasks; return an answer for each, in order. They are then as durable as anything in this Redis."""
        made_up = iter(uuid7s(sum(task.id is None for task in tasks), time.time()))
        records = [new_record(task, task.id or next(made_up)) for task in tasks]
        kinds = [task.kind for task in tasks]
        chained = await self._chains.join(records, kinds) if any(record.parent for record in records) else []
        answers: list[Scheduled | None] = [None] * len(tasks)
        # First, so that a repeat with a dedupe key takes no place in the register.
        await self._answer(records, kinds, [at for at, one in enumerate(records) if one.dedupe], answers, peek=True)
        owners: dict[int, Owner] = {}
        try:
            owners = await self._add(records, kinds, answers)
        except Unavailable:  # memory may be full: tasks that exist already need no room
            await self._answer_for_known(records, kinds, answers)
            if None in answers:
                raise
        scheduled = [answer for answer in answers if answer is not None]
        # Ids that were registered before: a purge may have removed their earlier tasks since, and forgotten the ids.
        late = [at for at, owner in owners.items() if scheduled[at].created and not owner.is_new]
        if late:
            await self._register.reserve([(records[at].id, kinds[at]) for at in late])
        await self._introduce(records, kinds, [at for at, owner in owners.items() if owner.is_wanted], scheduled)
        await self._cancel_late(records, kinds, chained)
        return scheduled

    async def _cancel_late(self, records: Sequence[NewRecord], kinds: Sequence[str], positions: Sequence[int]) -> None:
        """Cancel the tasks at these positions whose chains were cancelled since the tasks were noted there."""
        if not positions:
            return
        over = await self._chains.cancelled({records[at].root or "" for at in positions})
        late = [at for at in positions if records[at].root in over]
        for kind, places in by_kind([kinds[at] for at in late]):
            argument = {"ids": [records[late[at]].id for at in places], "channels": self._link.keys.cancels("")}
            await self._link.run_for(kind, CANCEL, argument)

    async def _answer_for_known(
        self, records: Sequence[NewRecord], kinds: Sequence[str], answers: list[Scheduled | None]
    ) -> None:
        """Answer for the tasks that exist, of those without an answer.

        Their ids are registered again: another client may have made such a task just before its id was freed here.
        """
        unknown = [at for at, known in enumerate(answers) if known is None]
        await self._answer(records, kinds, unknown, answers, peek=True)
        if found := [(records[at].id, kinds[at]) for at in unknown if answers[at] is not None]:
            await self._register.reserve(found)

    async def _add(
        self, records: Sequence[NewRecord], kinds: Sequence[str], answers: list[Scheduled | None]
    ) -> dict[int, Owner]:
        """Add the tasks that have no answer yet. Return their positions, with the kinds that their ids belonged to."""
        new = [at for at, known in enumerate(answers) if known is None]
        if not new:
            return {}
        reserving = self._register.reserve([(records[at].id, kinds[at]) for at in new])
        noting = self._register.note(dict.fromkeys(kinds))
        noted, owners = await asyncio.gather(noting, reserving, return_exceptions=True)
        if isinstance(owners, BaseException):
            raise owners
        strangers = [(at, owner.kind) for at, owner in zip(new, owners, strict=True) if owner.kind != kinds[at]]
        others = {at for at, _ in strangers}
        fresh = {at for at, owner in zip(new, owners, strict=True) if owner.is_new and not owner.is_wanted}
        if isinstance(noted, BaseException):
            await self._free(records, kinds, fresh)
            raise noted
        await self._answer(records, kinds, [at for at in new if at not in others], answers, peek=False, fresh=fresh)
        if strangers:  # last: the owner of an id may be in this same batch, and exists by now
            for at, owner in strangers:
                answers[at] = await self._conflict(records[at], kinds[at], owner)
            await self._answer(records, kinds, [at for at, _ in strangers if answers[at] is None], answers, peek=False)
        return dict(zip(new, owners, strict=True))

    async def _introduce(
        self, records: Sequence[NewRecord], kinds: Sequence[str], awaited: Sequence[int], scheduled: Sequence[Scheduled]
    ) -> None:
        """Connect tasks with the tasks that wait for them (`awaited`: their positions), and with those they wait for.

        The waits of repeats are noted too, because the first submitter may have died before it did so. The tasks are
        accepted, so a `BackendError` is ignored: maintenance repeats what failed.
        """
        known = [at for at in awaited if scheduled[at].id == records[at].id]
        waits = [
            Wait(record.id, kind, name)
            for record, kind, answer in zip(records, kinds, scheduled, strict=True)
            if record.after and answer.id == record.id and answer.status is Status.NEW and not answer.conflict
            for name in record.after
        ]
        if known or waits:
            with contextlib.suppress(BackendError):
                await asyncio.gather(*(self._dependencies.adopt(records[at].id, kinds[at]) for at in known))
                await self._dependencies.ask(waits)

    async def _answer(
        self,
        records: Sequence[NewRecord],
        kinds: Sequence[str],
        positions: Sequence[int],
        answers: list[Scheduled | None],
        *,
        peek: bool,
        fresh: Container[int] = (),
    ) -> None:
        """Schedule the tasks at these positions, and set their answers; `peek`: only answer for tasks that exist.

        `fresh`: the positions of ids that were registered just now, which are freed if their tasks have no room.
        """
        groups: dict[str, list[int]] = {}
        for at in positions:
            groups.setdefault(kinds[at], []).append(at)
        batch = _Batch(records, kinds, answers, peek, fresh)
        asking = (self._ask_in_parts(batch, kind, some) for kind, some in groups.items())
        # All have ended before an error is raised: an id that is freed later could belong to a repeat's task by then.
        for error in await asyncio.gather(*asking, return_exceptions=True):
            if error is not None:
                raise error

    async def _ask_in_parts(self, batch: "_Batch", kind: str, positions: Sequence[int]) -> None:
        """Schedule the tasks of one kind at these positions, so many at a time as Redis runs in one script."""
        parts = list(in_parts(positions))
        for number, part in enumerate(parts):
            try:
                await self._ask(batch, kind, part)
            except FullMemory:
                rest = [at for later in parts[number:] for at in later]
                left = [at for at in rest if at in batch.fresh and batch.answers[at] is None]
                await self._free(batch.records, batch.kinds, left)
                raise

    async def _ask(self, batch: "_Batch", kind: str, positions: Sequence[int]) -> None:
        """Schedule the tasks of one kind at these positions in one script, or in halves if they are large."""
        argument = encode({"tasks": [batch.records[at] for at in positions], "peek": batch.peek})
        if len(argument) > LARGE and len(positions) > 1:
            half = len(positions) // 2
            await self._ask(batch, kind, positions[:half])
            await self._ask(batch, kind, positions[half:])
            return
        added_tasks = decode(await self._link.run(SCHEDULE, self._link.keys.of_kind(kind), argument), _ANSWERS)
        if len(added_tasks) != len(positions):
            raise ProtocolError(f"Redis gave {len(added_tasks)} answers for {len(positions)} tasks")
        for at, added in zip(positions, added_tasks, strict=True):
            if isinstance(added, Added):
                batch.answers[at] = answer_of(added)

    async def _free(self, records: Sequence[NewRecord], kinds: Sequence[str], positions: Collection[int]) -> None:
        """Free the ids at these positions: no task was made of them, and the register would grow with each try."""
        for kind in {kinds[at] for at in positions}:
            await self._register.forget(kind, [records[at].id for at in positions if kinds[at] == kind])

    async def _conflict(self, record: NewRecord, kind: str, owner: str) -> Scheduled | None:
        """Answer for a task whose id belongs to another kind; None if that kind lacks the task: `kind` gets the id.

        A submitter may have died between the registration of an id and the making of its task. (A submitter that is
        just between the two loses its id: two kinds under one id, submitted in the same millisecond, are a mistake that
        is then not reported.)
        """
        raw = await self._link.command("HGET", self._link.keys.one(owner, "state"), record.id)
        if raw is None and await self._register.take_over(record.id, kind, owner) == kind:
            return None
        status = Status.NEW if raw is None else status_of(raw) or Status.DROPPED
        return Scheduled(id=record.id, created=False, status=status, conflict=True)


class _Batch(NamedTuple):
    """Tasks that are scheduled together, and the answers to them so far."""

    records: Sequence[NewRecord]
    kinds: Sequence[str]
    answers: list[Scheduled | None]
    peek: bool  # only tasks that exist are answered for
    fresh: Container[int]  # the positions of ids that were registered just now


def answer_of(added: Added) -> Scheduled:
    """Return the answer for a task; raise `ProtocolError` if its status is not known."""
    try:
        status = Status(added.status)
    except ValueError:
        raise ProtocolError(f"task {added.id!r} has an unknown status in Redis: {added.status!r}") from None
    return Scheduled(id=added.id, created=added.created, status=status, conflict=added.conflict)


def new_record(task: NewTaskItem, task_id: str) -> NewRecord:
    """Return the record of a task that is to be scheduled under this id."""
    settings = effective(task)
    stored = Stored(payload=task.payload, collection=task.collection, traceparent=traceparent(task.traceparent))
    return NewRecord(
        id=task_id,
        stored=json_text(stored),
        digest=payload_digest(bytes(task.payload)).hex(),
        due=None if task.at is None else min(max(_ms(task.at.timestamp()), 0), _LATEST),
        delay=None if task.delay is None else _ms(task.delay),
        priority=settings.priority,
        collection=task.collection,
        dedupe=task.dedupe_key,
        window=None if settings.dedupe_window is None else _ms(settings.dedupe_window),
        max_attempts=settings.max_attempts,
        max_crashes=settings.max_crashes,
        max_runtime=None if settings.max_runtime is None else _ms(settings.max_runtime),
        expiry=None if settings.expiry == "crash" else settings.expiry,
        claim_ttl=_ms(settings.claim_ttl),
        beat_ttl=_ms(settings.heartbeat_timeout),
        retry=None if settings.retry == DEFAULTS.retry else settings.retry,
        after=list(dict.fromkeys(task.after)) or None,
        parent=parent_of(task_id, task.kind, task.parent, task.after),
        is_name=task_id == task.kind and is_name(task.kind),
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)

"""Maintenance: the regular work on the kinds in Redis, shared by all clients.

Every client waits `interval × (1/2 + random) × clients`, so that the fleet as a whole runs maintenance once in an
interval, whatever its size, and clients do not act in step. Claims expire leases too; maintenance does it for kinds
that no worker claims.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import msgpack

from leasekit.errors import BackendError, ProtocolError
from leasekit.wire import NewTaskItem
from leasekit_redis import decoding
from leasekit_redis.chains import Chains
from leasekit_redis.client import Link, in_parts
from leasekit_redis.clocks import Clocks
from leasekit_redis.dependencies import Dependencies
from leasekit_redis.id_index import IdIndex
from leasekit_redis.intake import Intake
from leasekit_redis.keys import is_name
from leasekit_redis.records import Dropped, MaintenanceWork, decode, encode
from leasekit_redis.scripts import ASIDE, COUNT_CLIENTS, DROP, FORGET_EACH, MAINTAIN

logger = logging.getLogger("leasekit")

INTERVAL = 15.0  # seconds between two runs of maintenance, over the whole fleet
_SEEN_FOR = 3_600.0  # seconds for which a worker that holds nothing is listed
_ROUNDS = 100  # scripts for one kind in one run: the rest is left to the next run
_KINDS = 1000  # kinds that are looked up at once
_DROPPED = 50  # tasks that one script deletes: some 2 ms
_COUNT = msgpack.Decoder(int)
_FORGOTTEN = msgpack.Decoder(list[bool | None])
_DROPPED_ANSWER = msgpack.Decoder(Dropped)
_WORK = msgpack.Decoder(MaintenanceWork)
_successor = msgspec.json.Decoder(NewTaskItem).decode


class Maintenance:
    """The maintenance that one client does."""

    def __init__(
        self,
        link: Link,
        clocks: Clocks,
        register: IdIndex,
        intake: Intake,
        dependencies: Dependencies,
        chains: Chains,
        *,
        name: str,
    ) -> None:
        self._link = link
        self._clocks = clocks
        self._register = register
        self._intake = intake
        self._dependencies = dependencies
        self._chains = chains
        self._name = name
        self._clients = 1
        self._retention = round(1000 * link.address.retention)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL * (0.5 + random.random()) * self._clients)  # noqa: S311
            try:
                await self.once()
            except BackendError as error:
                logger.debug("maintenance of Redis failed and is tried again: %s", error)

    async def once(self) -> None:
        """Maintain every kind that is due; at the end raise the first error. A kind that fails stops no other."""
        interval = round(1000 * INTERVAL)
        argument = encode([self._name, interval])
        self._clients = decode(await self._link.run(COUNT_CLIENTS, [self._link.keys.clients], argument), _COUNT)
        failures: list[BackendError] = []
        while (due := await self._register.due_kinds(interval=interval, limit=_KINDS)).kinds:
            for kind in await self._delete_old_named_leases(due.kinds):
                try:
                    due_at = await self.maintain(kind)
                except BackendError as error:  # a part of a cluster may be away for long: the other parts go on
                    failures.append(error)
                    continue
                if due_at is None or due_at > due.own_until:
                    await self._register.reschedule_kind(kind, own_until=due.own_until, due_at=due_at)
        if failures:
            raise failures[0]

    async def _delete_old_named_leases(self, kinds: Sequence[str]) -> Sequence[str]:
        """Delete the named leases among these kinds that ended, or were last free, longer than `retention` ago.

        Many go in one script. Return the other kinds, which `maintain` is for; on several servers those are all.
        """
        keys, gone = self._link.keys, set[str]()
        for names in in_parts([kind for kind in kinds if is_name(kind)] if self._link.is_one_server else ()):
            arguments = [{"name": name, "retention": self._retention, "part": keys.part(name) + 1} for name in names]
            script_keys = (*(keys.one(name, "meta") for name in names), keys.kinds, *keys.register)
            try:
                answers = decode(await self._link.run(FORGET_EACH, script_keys, *map(encode, arguments)), _FORGOTTEN)
            except ProtocolError:
                self._link.is_one_server = False
                break
            gone.update(name for name, is_forgotten in zip(names, answers, strict=True) if is_forgotten)
        return [kind for kind in kinds if kind not in gone]

    async def maintain(self, kind: str) -> int | None:
        """Expire leases, wake claims, schedule successors, release waiting tasks, and delete old tasks of a kind.

        Return when the kind may need maintenance again, in milliseconds by the clock of Redis; None: nothing is left.
        """
        failures: list[BackendError] = []
        handed_out: set[str] = set()
        began_at = time.monotonic()
        for _ in range(_ROUNDS):
            due = await self._due_work(kind)
            failures += await self._do(kind, due)
            if due.is_done and not failures:
                return due.next
            queued = {*due.outbox, *due.ending}
            # New items queue behind those that have failed, so go on; but not for long, because other kinds wait too.
            goes_on = queued - handed_out and time.monotonic() < began_at + INTERVAL
            if failures and not due.old and not goes_on:
                break
            handed_out |= queued
        if failures:
            raise failures[0]
        return 0

    async def _due_work(self, kind: str) -> MaintenanceWork:
        """Run the script of maintenance; return what is left for this client to do."""
        asked_at = time.monotonic()
        asked = {
            "retention": self._retention,
            "seen_for": 1000 * _SEEN_FOR,
            "name": kind if is_name(kind) else None,
            **self._clocks.known(kind),
        }
        due: MaintenanceWork = decode(await self._link.run_for(kind, MAINTAIN, asked), _WORK)
        self._clocks.told(kind, due.now, asked_at=asked_at, steps_back=due.steps_back)
        for task in due.damaged:
            logger.error("%s", decoding.damage(task.id, kind, task.damage))
        return due

    async def _do(self, kind: str, due: MaintenanceWork) -> list[BackendError]:
        """Do what is due. Each piece of work is done by itself, so that a failure holds up no other: return the errors.

        Deletions come first and do not depend on the rest, because full memory refuses successors: they raise.
        """
        await self._dependencies.withdraw(kind, due.unmet)
        await self.drop(kind, due.old, self._retention)
        if due.is_free:
            await self._drop_name(kind, self._retention)
        failures: list[BackendError] = []
        for work in (
            partial(self._dependencies.release, kind, due.ending),
            partial(self._deliver_apart, kind, due.outbox),
            partial(self._dependencies.ask_again, kind, due.gated, retention=self._link.address.retention),
        ):
            try:
                await work()
            except BackendError as error:
                failures.append(error)
        return failures

    async def _deliver_apart(self, kind: str, outbox: Sequence[str]) -> None:
        """Schedule successors together; if that fails, each by itself. Raises the first error."""
        try:
            await self.deliver(kind, outbox)
        except BackendError:
            errors = await asyncio.gather(*(self.deliver(kind, [item]) for item in outbox), return_exceptions=True)
            for error in errors:
                if error is not None:
                    raise error from None

    async def deliver(self, kind: str, outbox: Sequence[str]) -> None:
        """Schedule the successors in this kind's outbox, each by its id, then remove them; set damaged ones aside."""
        if not outbox:
            return
        successors: dict[str, NewTaskItem] = {}
        damaged: list[tuple[str, str]] = []
        for text in outbox:
            try:
                successors[text] = _successor(text)
            except (msgspec.MsgspecError, ValueError) as error:
                damaged.append((text, f"successor: {error}"))
        if damaged:
            await self._link.run_for(kind, ASIDE, {"tasks": [], "successors": damaged})
        await self._intake.schedule(list(successors.values()))
        key = self._link.keys.one(kind, "outbox")
        for text in successors:
            await self._link.command("LREM", key, -1, text)  # from the tail, where the script has put it

    async def drop(self, kind: str, ids: Sequence[str], retention: int) -> list[str]:
        """Delete these tasks if they ended at least `retention` milliseconds ago; return how each had ended."""
        statuses: list[str] = []
        for first in range(0, len(ids), _DROPPED):
            some = ids[first : first + _DROPPED]
            # In this order: an id must not be registered for a task that does not exist (see `id_index`).
            await self._register.forget(kind, some)
            raw = await self._link.run_for(kind, DROP, {"ids": some, "retention": retention})
            dropped: Dropped = decode(raw, _DROPPED_ANSWER)
            if dropped.kept:  # they live again, or have ended anew
                await self._register.reserve([(task_id, kind) for task_id in dropped.kept])
            await self._chains.leave(dropped.left, kind)
            statuses += dropped.statuses
        return statuses

    async def _drop_name(self, name: str, retention: int) -> None:
        """Delete the task of a name, then free its id, unless the name was asked for meanwhile: then both stay."""
        argument = {"ids": [name], "retention": retention, "is_name": True}
        dropped: Dropped = decode(await self._link.run_for(name, DROP, argument), _DROPPED_ANSWER)
        if dropped.statuses:
            await self._register.forget(name, [name])

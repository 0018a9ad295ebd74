"""A backend that logs the requests and answers of a worker or a scheduler as events of `harness.history`.

    with Log("worker-1.jsonl", who="worker-1") as log:
        client = leasekit.connect(Recorded(open_backend(url, worker="worker-1"), log))

The backend sees requests and answers, not the keeper's conclusions: put it outermost, around the faults of
`leasekit.testing.faults` if there are any. Handlers log their own events.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast

import msgspec

from harness import history
from harness.history import Log, boottime
from leasekit._forwarding import ForwardingScheduler
from leasekit._lifecycle.sameness import payload_digest
from leasekit.backend import Backend, Scheduler, TicketSource
from leasekit.task import Beat, Claimed, NewTask, Scheduled, Settlement, Ticket, Verdict, effective
from leasekit.task.words import PREFER_FOR

V = TypeVar("V")

_SCHEDULING = frozenset({"schedule", "cancel", "redrive", "purge", "get", "stats", "list_tasks", "list_dead"})
_REMEMBERED = 100_000  # fences of leases, and first requests of claims


class Recorded(ForwardingScheduler):
    """A `Backend` with a log, and a `Scheduler` where the wrapped one is. `now` is the clock of the log.

    `wall` is the clock by which tasks say when they are due.
    """

    def __init__(
        self, backend: Backend, log: Log, *, now: Callable[[], float] = boottime, wall: Callable[[], float] = time.time
    ) -> None:
        self.backend = backend
        self.capabilities = backend.capabilities
        self._log = log
        self._now = now
        self._wall = wall
        self._fences: OrderedDict[str, int] = OrderedDict()  # by token
        self._asked: OrderedDict[str, float] = OrderedDict()  # by claim id: when its first request left
        if not isinstance(backend, Scheduler):
            # A protocol ignores methods that are None: isinstance(recorded, Scheduler) agrees with the wrapped backend.
            own = type(self)
            missing = dict.fromkeys(_SCHEDULING)
            self.__class__ = cast("type[Self]", type(own.__name__, (own,), missing))

    async def claim(self, kinds: Sequence[str], *, limit: int, wait: float, claim_id: str, **more: Any) -> Claimed:
        asked_at = self._asked.get(claim_id)
        if asked_at is None:
            asked_at = _keep(self._asked, claim_id, self._now())
        claimed = await self.backend.claim(kinds, limit=limit, wait=wait, claim_id=claim_id, **more)
        self._log_grants(claimed, claim_id, asked_at)
        return claimed

    async def claim_tickets(
        self, kinds: Sequence[str], tickets: Sequence[Ticket], *, limit: int, claim_id: str
    ) -> Claimed:
        asked_at = self._asked.get(claim_id)
        if asked_at is None:
            asked_at = _keep(self._asked, claim_id, self._now())
        backend = cast("TicketSource", self.backend)
        claimed = await backend.claim_tickets(kinds, tickets, limit=limit, claim_id=claim_id)
        self._log_grants(claimed, claim_id, asked_at)
        return claimed

    def _log_grants(self, claimed: Claimed, claim_id: str, asked_at: float) -> None:
        at = self._now()  # one moment for all tasks of an answer: it distinguishes them from those of a repeat's answer
        for task in claimed.tasks:
            _keep(self._fences, task.token, task.fence)
            self._log.add(
                history.Granted, at=at, asked_at=asked_at, claim=claim_id, task=task.id, fence=task.fence, ttl=task.ttl,
                token=task.token, attempt=task.attempt, kind=task.kind, priority=task.priority,
                progress=_number(task.progress),
            )  # fmt: skip

    async def beat(self, beats: Sequence[Beat]) -> list[Verdict]:
        asked_at = self._now()
        verdicts = await self.backend.beat(beats)
        for beat, verdict in _answers(beats, verdicts):
            fence = self.fence_of(beat.id, beat.token)
            lease = {"task": beat.id, "fence": fence, "asked_at": asked_at}
            if fence is None or verdict.id != beat.id:
                continue
            if verdict.verdict == "renewed":
                self._log.add(history.Renewed, **lease, ttl=verdict.ttl, progress=_number(beat.progress))
            elif verdict.verdict == "gone":
                self._log.add(history.Refused, **lease, reason=verdict.reason or "")
        return verdicts

    async def settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        reports = [self._report(settlement) for settlement in settlements]
        for report in reports:
            if report["fence"] is not None:
                self._log.add(history.SettleAsked, **report)
        asked_at = self._now()
        verdicts = await self.backend.settle(settlements)
        for report, verdict in _answers(reports, verdicts):
            # A verdict on another task is refused by its reader.
            is_heard = verdict.id == report["task"] and verdict.verdict in ("settled", "gone")
            if report["fence"] is not None and is_heard:
                answer = {"verdict": verdict.verdict, "reason": verdict.reason or ""}
                self._log.add(history.SettleAnswered, **report, **answer, asked_at=asked_at)
        return verdicts

    def fence_of(self, task_id: str, token: str) -> int | None:
        """The fence of a lease; `None` where its grant was not seen here: such a lease is left out of the log."""
        return self._fences.get(token)

    def _report(self, settlement: Settlement) -> dict[str, Any]:
        return {
            "task": settlement.id,
            "fence": self.fence_of(settlement.id, settlement.token),
            "outcome": settlement.outcome,
            "digest": digest(settlement),
            "then": sum(successor.id is None for successor in settlement.then),
        }

    async def schedule(self, tasks: Sequence[NewTask]) -> list[Scheduled]:
        for task in tasks:
            if task.id is not None:  # a client gives every task an id before sending
                self._log.add(history.Asked, **_asked(task, self._now() - self._wall()))
        answers = await super().schedule(tasks)
        for task, answer in zip(tasks, answers, strict=False):
            if task.id is not None:
                details = {"created": answer.created, "conflict": answer.conflict, "replaced": answer.replaced}
                self._log.add(history.Acknowledged, asked=task.id, task=answer.id, **details)
        return answers

    async def cancel(self, task_ids: Sequence[str]) -> list[Verdict]:
        for task_id in task_ids:
            self._log.add(history.CancelAsked, task=task_id)
        verdicts = await super().cancel(task_ids)
        for task_id, verdict in zip(task_ids, verdicts, strict=False):
            self._log.add(history.CancelAnswered, task=task_id, verdict=verdict.verdict)
        return verdicts

    async def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        return await getattr(self.backend, name)(*args, **options)

    async def aclose(self) -> None:
        """Close the wrapped backend; the log stays open."""
        await self.backend.aclose()


def _answers(asked: Sequence[V], verdicts: Sequence[Verdict]) -> list[tuple[V, Verdict]]:
    """Return what was asked, each with its verdict. Of an answer of another length, its reader believes none."""
    return list(zip(asked, verdicts, strict=True)) if len(asked) == len(verdicts) else []


def digest(settlement: Settlement) -> str:
    """A digest that is equal for equal settlements, and does not disclose their content."""
    return hashlib.blake2s(msgspec.json.encode(settlement), digest_size=8).hexdigest()


def digest_of(payload: Any) -> str:
    """A digest that is equal for equal payloads, and does not disclose their content."""
    return payload_digest(msgspec.json.encode(payload)).hex()[:12]


def _number(progress: Any) -> float | None:
    value = msgspec.json.decode(progress) if isinstance(progress, msgspec.Raw) else progress
    return value if isinstance(value, float) else None


def _keep(known: "OrderedDict[str, V]", key: str, value: V) -> V:
    known[key] = value
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
    return value


def _asked(task: NewTask, offset: float) -> dict[str, Any]:
    """The fields of `Asked` for a task; `offset` is by how much the history's clock is ahead of Unix time."""
    names = ("priority", "dedupe_window", "max_attempts", "max_crashes", "max_runtime", "expiry", "heartbeat_timeout")
    settings = effective(task)
    fields = {name: getattr(task, name) for name in ("kind", "collection", "key", "requires", "dedupe_key", "debounce")}
    fields |= {name: getattr(settings, name) for name in names}
    if task.prefers:
        fields |= {"prefers": task.prefers, "prefer_for": task.prefer_for or PREFER_FOR}
    fields |= {"after": tuple(task.after), "start_deadline": settings.start_deadline, "dedupe_scope": task.dedupe_scope}
    if task.debounce is not None:
        fields["payload"] = digest_of(task.payload)
    return {**fields, "task": task.id, "due_at": None if task.at is None else task.at.timestamp() + offset}

"""The rules of what operators set, A1-A6, A14, A15, and of labels, A11: functions of a history.

For those of operators the store has written the history. Changes are judged in the order of commits: an event of the
store stands where its transaction has taken effect.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from harness import history as log
from harness.checker.index import Lease, Life, Lives
from harness.checker.rules import Rules, Violation

_OPEN = "open"
_ROUNDED = 1e-3  # of a token: instants are floats
_DROPPED = "dropped"  # how the reason of a task begins that a gate has ended


def admission(lives: Lives, rules: Rules) -> list[Violation]:
    of_limits = (found for scope in _SCOPES for check in (_concurrency, _rate) for found in check(lives, scope))
    of_workers = (*_a11_labels(lives), *_a11_preferred(lives, rules), *_a15_drained(lives))
    return [*_a1_closed(lives), *_a2_dropped(lives), *of_limits, *_a14_order(lives), *of_workers]


class _Gates:
    """The gates as of the last change, and the tasks that are behind each."""

    def __init__(self, lives: Lives) -> None:
        self._changes: dict[tuple[str, str], log.GateChanged] = {}
        self._collections: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        for task, life in lives.tasks.items():
            if len({(asked.kind, asked.collection) for asked in life.asked}) == 1:
                self._kinds[task], self._collections[task] = life.asked[0].kind, life.asked[0].collection or ""

    def change(self, event: log.GateChanged) -> None:
        self._changes[event.scope, event.name] = event

    def closed(self, task: str, kind: str = "") -> list[log.GateChanged]:
        """Return the closed gates of a task, also those that may have opened by themselves."""
        keys = (("kind", kind or self._kinds.get(task, "")), ("collection", self._collections.get(task, "")))
        gates = (self._changes.get(key) for key in keys)
        return [gate for gate in gates if gate is not None and gate.mode != _OPEN]


def _a1_closed(lives: Lives) -> Iterator[Violation]:
    """No task is granted behind a closed gate: from the commit of the change until it is opened, or opens by itself."""
    gates = _Gates(lives)
    for event in lives.events:
        match event:
            case log.GateChanged():
                gates.change(event)
            case log.Issued(by_store=float() as at):
                closed = [
                    gate for gate in gates.closed(event.task, event.kind) if gate.until is None or at < gate.until
                ]
                for gate in closed:
                    why = f"it was granted behind the gate of the {gate.scope} {gate.name}"
                    yield Violation(rule="A1", task=event.task, why=why, events=[gate, event])
            case _:
                pass


def _a2_dropped(lives: Lives) -> Iterator[Violation]:
    """No gate but one that drops tasks ends a task that is not cancelled, and the reason of the task says so."""
    gates = _Gates(lives)
    for event in lives.events if lives.gates else ():  # a history without any may be of a store that writes none
        match event:
            case log.GateChanged():
                gates.change(event)
            case log.Closed(status="cancelled") if _is_dropped(event, lives):
                closed = gates.closed(event.task)
                if not any(gate.mode == "drop" for gate in closed):
                    yield Violation(rule="A2", task=event.task, why="nothing has dropped it", events=[*closed, event])
                elif not event.reason.startswith(_DROPPED):
                    why = f"a gate has dropped it, and its reason is {event.reason!r}"
                    yield Violation(rule="A2", task=event.task, why=why, events=[*closed, event])
            case _:
                pass


def _is_dropped(end: log.Closed, lives: Lives) -> bool:
    """Whether a gate must have ended this task: neither its client nor a holder has asked for its cancel."""
    life = lives.of(end.task)
    asks = [ask for lease in life.leases.values() for ask in lease.settle_asked if ask.outcome == "cancelled"]
    return bool(life.asked) and not any(ask.at <= end.at for ask in (*life.cancel_asked, *asks))


class _Limit(NamedTuple):
    """The limits of a kind, or of each of its keys, as of one change."""

    change: log.KindChanged
    concurrency: int | None
    rate: float | None
    burst: int


class _Scope(NamedTuple):
    """The limits of kinds, or those of keys, and the rules that are about them."""

    concurrency_rule: str
    rate_rule: str
    of: Callable[[log.Issued, Lives], str | None]
    """Return what the task of a grant is of, as a text for messages; None: it has no such limit."""
    limit: Callable[[log.KindChanged], _Limit]


def _a11_labels(lives: Lives) -> Iterator[Violation]:
    """No task is granted to a worker, or starts there, without the labels that all schedules of the task require."""
    for life in lives.tasks.values():
        required = life.asked[0].requires if life.asked else {}
        if not required or any(asked.requires != required for asked in life.asked):
            continue
        for event in (event for lease in life.leases.values() for event in (*lease.granted, *lease.started)):
            began = lives.process(event.who).began
            if began is not None and not required.items() <= began.labels.items():
                why = f"it requires {required}, and {event.who} has {began.labels}"
                yield Violation(rule="A11", task=life.task, why=why, events=[began, life.asked[0], event])


def _a15_drained(lives: Lives) -> Iterator[Violation]:
    """No task is granted to a worker that drains: from the commit of its drain until that is taken back, or over."""
    drains: dict[str, log.DrainChanged] = {}
    for event in lives.events if lives.drains else ():
        match event:
            case log.DrainChanged(is_draining=True):
                drains[event.worker] = event
            case log.DrainChanged():
                drains.pop(event.worker, None)
            case log.Issued() if (drain := drains.get(event.holder)) is not None:
                why = f"it was granted to {event.holder}, which drains"
                yield Violation(rule="A15", task=event.task, why=why, events=[drain, event])
            case _:
                pass


def _a11_preferred(lives: Lives, rules: Rules) -> Iterator[Violation]:
    """No worker that lacks the labels which a task prefers gets it before it has been due for `prefer_for` seconds."""
    for life in lives.tasks.values() if rules.due_slack is not None else ():
        if not life.asked or not life.asked[0].prefers or not life.is_simple:
            continue
        if any(_preference(asked) != _preference(life.asked[0]) for asked in life.asked):
            continue
        for lease in life.known:
            yield from _a11_too_early(life, lease, lives, rules)


def _preference(asked: log.Asked) -> tuple[dict[str, str], float]:
    return asked.prefers, asked.prefer_for


def _a11_too_early(life: Life, lease: Lease, lives: Lives, rules: Rules) -> Iterator[Violation]:
    asked, grant = life.asked[0], lease.grant
    began = lives.process(lease.holder).began if lease.holder else None
    if began is None or asked.prefers.items() <= began.labels.items():
        return
    ends = [end.at for of_task in life.leases.values() for end in of_task.closed if end.at <= grant.at]
    redrives = [redrive.at for redrive in life.redriven if redrive.at <= grant.at]
    due_at = max([asked.at if asked.due_at is None else asked.due_at, *ends, *redrives])  # or later
    early = due_at + asked.prefer_for * (1 - rules.drift) - (rules.due_slack or 0.0) - grant.at
    if early > 0:
        why = (
            f"it prefers {asked.prefers} for {asked.prefer_for:g} s, and {lease.holder} got it {early:.1f} s too early"
        )
        yield Violation(rule="A11", task=life.task, why=why, events=[began, asked, grant])


def _kind_of(grant: log.Issued, lives: Lives) -> str:
    return f"the kind {grant.kind}"


def _key_of(grant: log.Issued, lives: Lives) -> str | None:
    """Name the key of a task, if all schedules of the task agree on it."""
    keys = {asked.key for asked in lives.of(grant.task).asked}
    (key,) = keys if len(keys) == 1 else (None,)
    return None if key is None else f"the key {key} of the kind {grant.kind}"


_SCOPES = (
    _Scope("A3", "A4", _kind_of, lambda change: _Limit(change, change.concurrency, change.rate, change.burst)),
    _Scope(
        *("A5", "A6", _key_of),
        lambda change: _Limit(change, change.key_concurrency, change.key_rate, change.key_burst),
    ),
)


def _concurrency(lives: Lives, scope: _Scope) -> Iterator[Violation]:
    """A3, A5: no task is granted while its kind, or its key, has as many leases as its limit.

    A limit that is lowered ends no run.
    """
    limits: dict[str, _Limit] = {}
    held: dict[str, set[str]] = {}  # kind or key → tasks under a lease
    granted: list[log.Issued] = []  # at one moment: leases that end in the same transaction make room for these
    for event in lives.events if lives.kinds else ():
        if granted and (event.at > granted[0].at or isinstance(event, log.KindChanged)):
            yield from _too_many(granted, limits, held, lives, scope)
            granted = []
        match event:
            case log.KindChanged():
                limits[event.kind] = scope.limit(event)
            case log.Issued() if (name := scope.of(event, lives)) is not None:
                held.setdefault(name, set()).add(event.task)
                granted.append(event)
            case log.Closed():
                for tasks in held.values():
                    tasks.discard(event.task)
            case _:
                pass
    yield from _too_many(granted, limits, held, lives, scope)


def _too_many(
    granted: list[log.Issued], limits: dict[str, _Limit], held: dict[str, set[str]], lives: Lives, scope: _Scope
) -> Iterator[Violation]:
    for grant in granted:
        limit, name = limits.get(grant.kind), scope.of(grant, lives) or ""
        if limit is not None and limit.concurrency is not None and len(held[name]) > limit.concurrency:
            why = f"{len(held[name])} tasks of {name} have leases: {limit.concurrency} may"
            yield Violation(rule=scope.concurrency_rule, task=grant.task, why=why, events=[limit.change, grant])


def _a14_order(lives: Lives) -> Iterator[Violation]:
    """While the keys of a kind are ordered, no task is granted before one of its key that has begun has ended.

    Of tasks that were granted before the keys were ordered, several may run at once, and those do not count.
    """
    ordered: dict[str, bool] = {}
    in_order: set[str] = set()  # tasks that were granted since their keys are ordered
    begun: dict[str, dict[str, log.Closed]] = {}  # key → tasks that will run again
    granted: list[log.Issued] = []  # at one moment
    for event in lives.events if lives.kinds else ():
        if granted and (event.at > granted[0].at or isinstance(event, log.KindChanged)):
            yield from _out_of_order(granted, begun, lives)
            granted = []
        match event:
            case log.KindChanged():
                ordered[event.kind] = event.ordered
                in_order.clear()
                begun = {name: tasks for name, tasks in begun.items() if not name.endswith(f" {event.kind}")}
            case log.Issued() if ordered.get(event.kind) and _ordered_key_of(event.task, event.kind, lives):
                granted.append(event)
                in_order.add(event.task)
            case log.Closed():
                for tasks in begun.values():
                    tasks.pop(event.task, None)
                kind = next((asked.kind for asked in lives.of(event.task).asked), "")
                if event.task in in_order and not event.ended and (name := _ordered_key_of(event.task, kind, lives)):
                    begun.setdefault(name, {})[event.task] = event
            case _:
                pass
    yield from _out_of_order(granted, begun, lives)


def _ordered_key_of(task: str, kind: str, lives: Lives) -> str | None:
    """Name the key of a task, if all schedules of the task agree on it, and none requires labels."""
    asked = lives.of(task).asked
    keys = {asking.key for asking in asked}
    (key,) = keys if len(keys) == 1 else (None,)
    return None if key is None or any(asking.requires for asking in asked) else f"{key} of {kind}"


def _out_of_order(
    granted: list[log.Issued], begun: dict[str, dict[str, log.Closed]], lives: Lives
) -> Iterator[Violation]:
    for grant in granted:
        name = _ordered_key_of(grant.task, grant.kind, lives) or ""
        for task, end in begun.get(name, {}).items():
            if task != grant.task and end.at < grant.at:
                why = f"it was granted while {task}, of the same key {name}, was to run again"
                yield Violation(rule="A14", task=grant.task, why=why, events=[end, grant])


@dataclass(slots=True)
class _Bucket:
    """A bucket as the checker keeps it: full at the last change of the limit, and never below zero."""

    limit: _Limit
    tokens: float
    at: float | None = None  # when a task started last, by the store's clock
    starts: list[log.Issued] = field(default_factory=list[log.Issued])

    def start(self, grant: log.Issued, now: float, rate: float) -> None:
        if self.at is not None:
            self.tokens = min(float(self.limit.burst), self.tokens + max(0.0, now - self.at) * rate)
        self.at = now
        self.tokens -= 1
        self.starts.append(grant)


def _rate(lives: Lives, scope: _Scope) -> Iterator[Violation]:
    """A4, A6: tasks of a kind, or of a key, are granted at most burst + rate * t times, over any time t.

    The time is that of the store's clock.
    """
    limits: dict[str, _Limit] = {}
    buckets: dict[str, _Bucket] = {}
    for event in lives.events if lives.kinds else ():
        match event:
            case log.KindChanged():
                limits[event.kind] = scope.limit(event)
                buckets = {name: bucket for name, bucket in buckets.items() if bucket.limit.change.kind != event.kind}
            case log.Issued(by_store=float() as now) if event.kind in limits:
                limit, name = limits[event.kind], scope.of(event, lives)
                if name is None or limit.rate is None:
                    continue
                bucket = buckets.setdefault(name, _Bucket(limit, limit.burst))
                bucket.start(event, now, limit.rate)
                if bucket.tokens < -_ROUNDED:
                    why = f"more tasks of {name} were granted than {limit.rate:g}/s and {limit.burst}"
                    events = [limit.change, *bucket.starts[-8:]]
                    yield Violation(rule=scope.rate_rule, task=event.task, why=why, events=events)
            case _:
                pass

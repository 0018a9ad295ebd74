"""A history sorted by tasks, their leases, and the processes that held them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import get_args, get_origin

from harness import history as log

_SHORTEST_TTL = 2.0  # seconds that a lease can last


@dataclass(slots=True, eq=False)
class Lease:
    """A grant of a task and all events of it. Each list is by time."""

    task: str
    fence: int
    issued: list[log.Issued] = field(default_factory=list[log.Issued])
    granted: list[log.Granted] = field(default_factory=list[log.Granted])
    renewed: list[log.Renewed] = field(default_factory=list[log.Renewed])
    extended: list[log.Extended] = field(default_factory=list[log.Extended])
    refused: list[log.Refused] = field(default_factory=list[log.Refused])
    closed: list[log.Closed] = field(default_factory=list[log.Closed])
    served: list[log.Served] = field(default_factory=list[log.Served])
    lost: list[log.Lost] = field(default_factory=list[log.Lost])
    started: list[log.Started] = field(default_factory=list[log.Started])
    effects: list[log.Effect] = field(default_factory=list[log.Effect])
    stopped: list[log.Stopped] = field(default_factory=list[log.Stopped])
    settle_asked: list[log.SettleAsked] = field(default_factory=list[log.SettleAsked])
    settle_answered: list[log.SettleAnswered] = field(default_factory=list[log.SettleAnswered])

    @property
    def is_known(self) -> bool:
        return bool(self.issued or self.granted)

    @property
    def grant(self) -> log.Issued | log.Granted:
        return self.issued[0] if self.issued else self.granted[0]

    @property
    def ttl(self) -> float:
        return self.grant.ttl

    @property
    def holder(self) -> str:
        """The process that received the lease; empty: none."""
        return self.granted[0].who if self.granted else ""

    @property
    def asked_at(self) -> float:
        """A moment before which the lease was not granted."""
        return self.issued[0].at if self.issued else self.granted[0].asked_at

    def surely_until(self, drift: float) -> float:
        """The earliest end: before it the ttl cannot have passed by the service's clock, however fast that runs."""
        until = self.asked_at + self.ttl * (1 - drift)
        ttl = self.ttl
        for beat in self.renewed:
            ttl = beat.ttl or ttl
            until = max(until, beat.asked_at + ttl * (1 - drift))
        return until

    def at_most_until(self, drift: float) -> float:
        """The latest end: after it the ttl has passed by the service's clock, and the task may be granted again."""
        grant = self.grant
        until = grant.at + self.ttl * (1 + drift)
        ttl = self.ttl
        for beat in self.renewed:
            ttl = beat.ttl or ttl
            until = max(until, beat.at + ttl * (1 + drift))
        for more in self.extended:
            until = max(until, more.at + more.ttl * (1 + drift))
        return until


@dataclass(slots=True, eq=False)
class Life:
    """The life of one task: all events of it, each list in the order of time."""

    task: str
    asked: list[log.Asked] = field(default_factory=list[log.Asked])
    acknowledged: list[log.Acknowledged] = field(default_factory=list[log.Acknowledged])
    """The answers that name this task, whichever id was asked for."""
    cancel_asked: list[log.CancelAsked] = field(default_factory=list[log.CancelAsked])
    cancel_answered: list[log.CancelAnswered] = field(default_factory=list[log.CancelAnswered])
    reschedule_asked: list[log.RescheduleAsked] = field(default_factory=list[log.RescheduleAsked])
    reschedule_answered: list[log.RescheduleAnswered] = field(default_factory=list[log.RescheduleAnswered])
    redriven: list[log.Redriven] = field(default_factory=list[log.Redriven])
    rescheduled: list[log.Rescheduled] = field(default_factory=list[log.Rescheduled])
    replaced: list[log.Replaced] = field(default_factory=list[log.Replaced])
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])
    final: log.Final | None = None

    def lease(self, fence: int) -> Lease:
        if fence not in self.leases:
            self.leases[fence] = Lease(self.task, fence)
        return self.leases[fence]

    @property
    def known(self) -> list[Lease]:
        return [self.leases[fence] for fence in sorted(self.leases) if self.leases[fence].is_known]

    @property
    def lives(self) -> list["Life"]:
        """The lives of the task, each with its own leases: a redrive ends one, and begins the next."""
        return [
            replace(
                self,
                leases={at: lease for at, lease in self.leases.items() if self.number_of(at) == number},
                final=self.final if number == len(self.redriven) else None,
            )
            for number in range(len(self.redriven) + 1)
        ]

    def number_of(self, fence: int) -> int:
        """The number of the life that this lease belongs to."""
        return sum(redrive.fence <= fence for redrive in self.redriven)

    @property
    def longest_ttl(self) -> float:
        """How long a restart of the service extends the leases of this task at most, without their spread."""
        return max([*(asked.heartbeat_timeout for asked in self.asked), *(lease.ttl for lease in self.known)])

    @property
    def is_simple(self) -> bool:
        """Whether the task waited for its due time only, as it was scheduled: not for others, and not rescheduled."""
        return not self.reschedule_asked and not any(
            asked.after or asked.start_deadline or asked.debounce for asked in self.asked
        )

    @property
    def is_durable(self) -> bool:
        return any(answer.created or answer.task == answer.asked for answer in self.acknowledged)


@dataclass(slots=True, eq=False)
class Process:
    """An incarnation of a process."""

    who: str
    began: log.Began | None = None
    ended: log.Ended | None = None
    drains_at: float = math.inf  # when the worker was asked to end
    stood: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When the process was paused or frozen."""
    frozen: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


class Lives:
    """The tasks and processes of a history."""

    def __init__(self, events: Sequence[log.Event]) -> None:
        self.events = events
        self.tasks: dict[str, Life] = {}
        self.processes: dict[str, Process] = {}
        self.faults: list[log.Fault] = []
        self.gates: list[log.GateChanged] = []
        self.kinds: list[log.KindChanged] = []
        self.drains: list[log.DrainChanged] = []
        self.periodics: list[log.PeriodicSet] = []
        self.bulk_asked: list[log.BulkAsked] = []
        self.bulk_answered: list[log.BulkAnswered] = []
        self.over_at: float | None = None
        self.last_at = events[-1].at if events else 0.0
        self.sees_store = False
        self._standing: dict[tuple[str, str], float] = {}
        for event in events:
            self._take(event)
        for (who, how), since in self._standing.items():
            self._stood(who, how, since, self.last_at)
        for act in self.bulk_asked:
            self._spread(act)

    def of(self, task: str) -> Life:
        if task not in self.tasks:
            self.tasks[task] = Life(task)
        return self.tasks[task]

    def process(self, who: str) -> Process:
        if who not in self.processes:
            self.processes[who] = Process(who)
        return self.processes[who]

    def has_ended(self, who: str, by: float) -> bool:
        ended = self.processes[who].ended if who in self.processes else None
        return ended is not None and ended.at <= by

    def was_frozen(self, who: str, since: float, until: float) -> bool:
        """Whether the machine of this process stood still in between: then exclusion is not promised."""
        return who in self.processes and any(
            begin <= until and end >= since for begin, end in self.processes[who].frozen
        )

    @property
    def leases(self) -> list[Lease]:
        return [lease for life in self.tasks.values() for lease in life.known]

    @cached_property
    def servers(self) -> list[Process]:
        return [server for server in self.processes.values() if server.began and server.began.role == "server"]

    @cached_property
    def restarts(self) -> list[tuple[float, float]]:
        starts = sorted(server.began.at for server in self.servers if server.began is not None)
        stops = sorted(server.ended.at for server in self.servers if server.ended is not None)
        return [(stop, min(start for start in starts if start >= stop)) for stop in stops if stop <= starts[-1]]

    @cached_property
    def unserved(self) -> list[tuple[float, float]]:
        """The times between the end of the last server that ran and the start of the next one."""
        ran = [
            (server.began.at, math.inf if server.ended is None else server.ended.at)
            for server in self.servers
            if server.began is not None
        ]
        gaps: list[tuple[float, float]] = []
        until = -math.inf
        for began_at, ended_at in (*sorted(ran), (math.inf, math.inf)):
            if began_at > until > -math.inf:
                gaps.append((until, began_at))
            until = max(until, ended_at)
        return gaps

    @cached_property
    def _readings(self) -> list[tuple[float, float]]:
        """The store's wall clock, as grants tell it: when, and what it showed."""
        issued = (event for lease in self.leases for event in lease.issued)
        return sorted((event.at, event.by_store) for event in issued if event.by_store is not None)

    def latest_by_store(self, since: float, grant: log.Issued) -> float:
        """Return the latest time that the store's wall clock may have shown from `since` until this grant.

        Somebody may have set it back: a task that was due by then stays due.
        """
        until = bisect_right(self._readings, (grant.at, math.inf))
        first = max(0, bisect_left(self._readings, (since, -math.inf)) - 1)
        shown = [by_store + then - at for (at, by_store), (then, _) in pairwise(self._readings[first:until])]
        return max([*shown, math.inf if grant.by_store is None else grant.by_store])

    @cached_property
    def may_extend(self) -> list[float]:
        """When the service may have extended all leases: its starts, its stalls, and the failures of its disk."""
        starts = [server.began.at for server in self.servers if server.began is not None]
        stalls = [end for server in self.servers for _, end in server.stood]
        outages = [fault.at + (fault.lasts or 0.0) for fault in self.faults if fault.name.startswith("store")]
        return starts + stalls + outages

    def _take(self, event: log.Event) -> None:
        match event:
            case log.Renewed(ttl=float() as ttl) if not _SHORTEST_TTL <= ttl < math.inf:
                pass  # a garbled answer, which no holder believes
            case log.Redriven():
                self.of(event.task).redriven.append(event)
            case log.LeaseEvent():
                self.sees_store |= isinstance(event, log.Issued | log.Closed)
                getattr(self.of(event.task).lease(event.fence), _LISTS[type(event)]).append(event)
            case (
                log.Asked()
                | log.Acknowledged()
                | log.CancelAsked()
                | log.CancelAnswered()
                | log.RescheduleAsked()
                | log.RescheduleAnswered()
                | log.Rescheduled()
                | log.Replaced()
            ):
                getattr(self.of(event.task), _LISTS[type(event)]).append(event)
            case log.Final():
                self.of(event.task).final = event
            case log.GateChanged():
                self.gates.append(event)
            case log.KindChanged():
                self.kinds.append(event)
            case log.DrainChanged():
                self.drains.append(event)
            case log.PeriodicSet():
                self.periodics.append(event)
            case log.BulkAsked():
                self.bulk_asked.append(event)
            case log.BulkAnswered():
                self.bulk_answered.append(event)
            case log.Fault():
                self.faults.append(event)
            case log.FaultsOver():
                self.over_at = event.at
            case _:
                self._take_process(event)

    def _spread(self, act: log.BulkAsked) -> None:
        """Note a bulk act as asked of each task that it may change: those that were there when its dry run ended."""
        for task, life in self.tasks.items():
            if life.asked and (life.asked[0].kind != act.kind or life.asked[0].at > act.counted_until):
                continue
            has_ended = any(end.ended and end.at < act.at for lease in life.leases.values() for end in lease.closed)
            if has_ended and not life.redriven:
                continue
            if act.act == "cancel":
                life.cancel_asked.append(log.CancelAsked(at=act.at, who=act.who, task=task))
                life.cancel_asked.sort(key=lambda ask: ask.at)
            else:
                life.reschedule_asked.append(log.RescheduleAsked(at=act.at, who=act.who, task=task))
                life.reschedule_asked.sort(key=lambda ask: ask.at)

    def _take_process(self, event: log.Event) -> None:
        match event:
            case log.Began():
                self.process(event.who).began = event
            case log.Ended():
                self.process(event.who).ended = event
                for how in ("paused", "frozen"):
                    self._go_on(event.who, how, event.at)
            case log.Draining():
                self.process(event.who).drains_at = event.at
            case log.Paused():
                self._standing.setdefault((event.who, "paused"), event.at)
            case log.Frozen():
                self._standing.setdefault((event.who, "frozen"), event.at)
            case log.Resumed():
                self._go_on(event.who, "paused", event.at)
            case log.Thawed():
                self._go_on(event.who, "frozen", event.at)
            case _:
                raise TypeError(f"{type(event).__name__} is no event of a history")

    def _go_on(self, who: str, how: str, at: float) -> None:
        since = self._standing.pop((who, how), None)
        if since is not None:
            self._stood(who, how, since, at)

    def _stood(self, who: str, how: str, since: float, until: float) -> None:
        process = self.process(who)
        process.stood.append((since, until))
        if how == "frozen":
            process.frozen.append((since, until))


_LISTS: dict[type[log.Event], str] = {
    get_args(field.default_factory)[0]: field.name
    for owner in (Lease, Life)
    for field in fields(owner)
    if get_origin(field.default_factory) is list
}
"""The field that holds the events of a type."""

"""A history, sorted by what it is about: tasks, their leases, and the processes that held them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness import history as log

__all__ = ["Lease", "Life", "Lives", "Process"]

_SHORTEST_TTL = 2.0  # seconds that a lease can last


@dataclass(slots=True, eq=False)
class Lease:
    """One grant of a task, and all that was said of it. Each list is by time."""

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
        """Somebody saw it granted."""
        return bool(self.issued or self.granted)

    @property
    def grant(self) -> log.Issued | log.Granted:
        """The event that shows that it was granted, as near to the moment as there is one."""
        return self.issued[0] if self.issued else self.granted[0]

    @property
    def ttl(self) -> float:
        return self.grant.ttl

    @property
    def holder(self) -> str:
        """Who received it; empty: nobody did."""
        return self.granted[0].who if self.granted else ""

    @property
    def asked_at(self) -> float:
        """It was not granted before."""
        return self.issued[0].at if self.issued else self.granted[0].asked_at

    def surely_until(self, drift: float) -> float:
        """Before that its ttl cannot have passed at the service, whose clock may be this much faster."""
        until = self.asked_at + self.ttl * (1 - drift)
        ttl = self.ttl
        for beat in self.renewed:
            ttl = beat.ttl or ttl
            until = max(until, beat.asked_at + ttl * (1 - drift))
        return until

    def at_most_until(self, drift: float) -> float:
        """After that its ttl has passed, as far as anybody can know: it may be granted to another."""
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
    """One task."""

    task: str
    asked: list[log.Asked] = field(default_factory=list[log.Asked])
    acknowledged: list[log.Acknowledged] = field(
        default_factory=list[log.Acknowledged]
    )  # as the task that was answered
    cancel_asked: list[log.CancelAsked] = field(default_factory=list[log.CancelAsked])
    cancel_answered: list[log.CancelAnswered] = field(default_factory=list[log.CancelAnswered])
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])
    final: log.Final | None = None

    def lease(self, fence: int) -> Lease:
        """The one with this fence."""
        found = self.leases.get(fence)
        if found is None:
            found = self.leases[fence] = Lease(self.task, fence)
        return found

    @property
    def known(self) -> list[Lease]:
        """Those that somebody saw granted, by fence."""
        return [self.leases[fence] for fence in sorted(self.leases) if self.leases[fence].is_known]

    @property
    def longest_ttl(self) -> float:
        """For how long at most a restart of the service extends its leases, but for their spread."""
        return max([*(asked.heartbeat_timeout for asked in self.asked), *(lease.ttl for lease in self.known)])

    @property
    def is_durable(self) -> bool:
        """Somebody was told that it is kept."""
        return any(answer.created or answer.task == answer.asked for answer in self.acknowledged)


@dataclass(slots=True, eq=False)
class Process:
    """One incarnation of a process."""

    who: str
    began: log.Began | None = None
    ended: log.Ended | None = None
    drains_at: float = math.inf  # from then on it claims no more
    stood: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # paused or frozen
    frozen: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


class Lives:
    """All tasks and processes of a history."""

    def __init__(self, events: Sequence[log.Event]) -> None:
        self.events = events
        self.tasks: dict[str, Life] = {}
        self.processes: dict[str, Process] = {}
        self.faults: list[log.Fault] = []
        self.over_at: float | None = None
        self.last_at = events[-1].at if events else 0.0
        self.sees_store = False
        self._standing: dict[tuple[str, str], float] = {}
        for event in events:
            self._take(event)
        for (who, how), since in self._standing.items():
            self._stood(who, how, since, self.last_at)

    def of(self, task: str) -> Life:
        """The life of this task."""
        found = self.tasks.get(task)
        if found is None:
            found = self.tasks[task] = Life(task)
        return found

    def process(self, who: str) -> Process:
        """This incarnation."""
        found = self.processes.get(who)
        if found is None:
            found = self.processes[who] = Process(who)
        return found

    def was_frozen(self, who: str, since: float, until: float) -> bool:
        """The machine of this process stood still in between: then exclusion is not promised."""
        return who in self.processes and any(
            begin <= until and end >= since for begin, end in self.processes[who].frozen
        )

    @property
    def leases(self) -> list[Lease]:
        """All that somebody saw granted."""
        return [lease for life in self.tasks.values() for lease in life.known]

    @property
    def servers(self) -> list[Process]:
        """The incarnations of the service, in the order in which they began."""
        return [one for one in self.processes.values() if one.began is not None and one.began.role == "server"]

    def _take(self, event: log.Event) -> None:
        match event:
            case log.Renewed(ttl=float() as ttl) if not _SHORTEST_TTL <= ttl < math.inf:
                pass  # a garbled answer: no holder goes by it
            case (
                log.Effect() | log.Renewed() | log.Started() | log.Stopped() | log.Granted() | log.Refused()
                | log.Lost() | log.SettleAsked() | log.SettleAnswered() | log.Extended() | log.Served()
            ):  # fmt: skip
                getattr(self.of(event.task).lease(event.fence), _LISTS[type(event)]).append(event)
            case log.Issued() | log.Closed():
                self.sees_store = True
                getattr(self.of(event.task).lease(event.fence), _LISTS[type(event)]).append(event)
            case log.Asked() | log.Acknowledged() | log.CancelAsked() | log.CancelAnswered():
                getattr(self.of(event.task), _LISTS[type(event)]).append(event)
            case log.Final():
                self.of(event.task).final = event
            case log.Fault():
                self.faults.append(event)
            case log.FaultsOver():
                self.over_at = event.at
            case _:
                self._take_process(event)

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
    log.Asked: "asked",
    log.Acknowledged: "acknowledged",
    log.CancelAsked: "cancel_asked",
    log.CancelAnswered: "cancel_answered",
    log.Issued: "issued",
    log.Granted: "granted",
    log.Renewed: "renewed",
    log.Extended: "extended",
    log.Refused: "refused",
    log.Closed: "closed",
    log.Served: "served",
    log.Lost: "lost",
    log.Started: "started",
    log.Effect: "effects",
    log.Stopped: "stopped",
    log.SettleAsked: "settle_asked",
    log.SettleAnswered: "settle_answered",
}

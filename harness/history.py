"""A history: an append-only log of events that every process writes and `harness.checker` reads.

    with Log("worker-1.jsonl", who="worker-1") as log:          # one file a process, or one for all: both are safe
        log.add(Started, task=task.id, fence=task.fence)         # stamped with the time and the writer
        log.add(Effect, task=task.id, fence=task.fence)
        log.add(Stopped, task=task.id, fence=task.fence, how="finished")

    problems = check(read("worker-1.jsonl", "worker-2.jsonl", "harness.jsonl"), Rules(ttl=300))

The format: one JSON object a line, `{"event": "Started", "at": 81.25, "who": "worker-1", "task": "a", "fence": 1}`.
Fields with their default are left out. A line that was cut off by a kill is skipped.

`at` is in seconds of one true clock: CLOCK_BOOTTIME where all processes are on one machine, world time in a simulation.
`who` names one incarnation of a process: a process that is started again after a kill has another name. A task and a
fence name a lease; only the first six characters of its token are ever written.

Which component writes which event, and at which moment:

  a scheduling client      Asked before a schedule leaves, Acknowledged when its answer arrives; CancelAsked and
                           CancelAnswered, RescheduleAsked and RescheduleAnswered, BulkAsked and BulkAnswered likewise;
                           PeriodicSet when answered
  a worker                 Granted, Renewed, Refused, SettleAnswered when the answer arrives, with `asked_at`, when the
                           request left (of a claim: the first one under its id); SettleAsked before it leaves; Lost
  a handler                Started before its first line, Effect before each side effect, Stopped after its last line
  what observes processes  Began, Ended (reaped: no code of the process runs from here on), Draining, Paused, Resumed,
                           Frozen, Thawed
  the store, if it can     Issued, Extended, Closed, Redriven, Rescheduled, Replaced as they are committed; GateChanged,
                           KindChanged, DrainChanged, after the leases of the same transaction; Served: each item that
                           was answered
  the harness              Fault when a fault has taken effect, FaultsOver, and after a full drain a Final for each task

A component leaves out what it cannot see: the checker judges by the events that exist. Without the store's events the
exact moments of grants are unknown; then the workers' events give the bounds.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
from msgspec import Struct

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the first
_TOKEN = 6  # characters of a token that may be written


def boottime() -> float:
    """The true clock of a history: seconds since this machine was started."""
    return time.clock_gettime(_CLOCK)


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="event", gc=False):
    """An entry of a history."""

    at: float
    who: str


class LeaseEvent(Event, frozen=True, kw_only=True):
    """An event of one lease."""

    task: str
    fence: int


class Began(Event, frozen=True, kw_only=True):
    """A process has started."""

    role: Literal["worker", "server", "scheduler", "harness"]
    slots: int = 0  # how many handlers a worker runs at once
    kinds: tuple[str, ...] = ()  # the kinds that a worker serves; empty: all
    labels: dict[str, str] = {}  # those that a worker claims with


class Ended(Event, frozen=True, kw_only=True):
    """No code of the process `who` runs any more: the process was reaped."""

    how: Literal["killed", "exited"]
    """`killed`: by a signal or its timer; `exited`: by itself, after it released what it held."""


class Paused(Event, frozen=True, kw_only=True):
    """A process stands still (SIGSTOP, a stall), while its clock goes on."""


class Resumed(Event, frozen=True, kw_only=True):
    """A paused process goes on."""


class Draining(Event, frozen=True, kw_only=True):
    """A worker was asked to end: it stops claiming, and its handlers run to their ends."""


class Frozen(Event, frozen=True, kw_only=True):
    """The whole machine of a process stands still, including its clocks: exclusion is not promised then."""


class Thawed(Event, frozen=True, kw_only=True):
    """A frozen machine goes on; its clock is behind by as long as it stood still."""


class Asked(Event, frozen=True, kw_only=True):
    """A task is about to be scheduled, or to be scheduled again."""

    task: str  # the id of the task, chosen by the scheduling code
    kind: str
    priority: int = 2
    collection: str | None = None
    key: str | None = None
    requires: dict[str, str] = {}  # the labels that a worker must have
    prefers: dict[str, str] = {}  # those that it must have too, until the task has been due for `prefer_for` seconds
    prefer_for: float = 0.0
    due_at: float | None = None  # the moment before which the task must not be granted, by the true clock
    dedupe_key: str | None = None
    dedupe_window: float | None = None
    dedupe_scope: str = "kept"
    debounce: float | None = None
    payload: str = ""  # a digest of the payload, where it may replace another
    max_attempts: int | None = None
    max_crashes: int = 5
    max_runtime: float | None = None
    expiry: str = "crash"  # what a run that times out counts as
    heartbeat_timeout: float = 0.0  # the ttl that a heartbeat grants; zero: unknown
    after: tuple[str, ...] = ()  # the tasks that must have succeeded before this one is granted
    start_deadline: float | None = None  # seconds after its due time until which the task must have begun


class Acknowledged(Event, frozen=True, kw_only=True):
    """A schedule was answered: the task is durable."""

    asked: str  # the id in the request
    task: str  # the id in the answer: another one where a task with the dedupe key existed
    created: bool = True
    conflict: bool = False
    replaced: bool = False  # the task has the payload and the due time of this request


class CancelAsked(Event, frozen=True, kw_only=True):
    """A task is about to be cancelled."""

    task: str


class CancelAnswered(Event, frozen=True, kw_only=True):
    """A cancel was answered."""

    task: str
    verdict: str  # `cancelled`, `cancel_requested` or `gone`


class RescheduleAsked(Event, frozen=True, kw_only=True):
    """A waiting task is about to be given another due time."""

    task: str
    request: str = ""  # the id of the request; empty: a bulk act's
    due_by_store: float | None = None  # the due time by the store's clock


class RescheduleAnswered(Event, frozen=True, kw_only=True):
    """The service has given a waiting task another due time: now, or when the request came for the first time."""

    task: str
    asked_at: float


class BulkAsked(Event, frozen=True, kw_only=True):
    """A bulk act is about to cancel or reschedule all tasks of a kind that a dry run has counted."""

    act: Literal["cancel", "reschedule"]
    kind: str
    counted_from: float  # when the dry run was asked: it has counted the tasks that were there
    counted_until: float  # when the dry run was answered: tasks that are scheduled later are not touched


class BulkAnswered(Event, frozen=True, kw_only=True):
    """A bulk act has come to its end."""

    act: Literal["cancel", "reschedule"]
    kind: str
    asked_at: float
    counted_from: float
    due_by_store: float | None = None  # the new due time by the store's clock


class PeriodicSet(Event, frozen=True, kw_only=True):
    """A periodic task fires from now on at each multiple of `every` seconds; 0: it fires no more."""

    name: str
    every: int


class Granted(LeaseEvent, frozen=True, kw_only=True):
    """A claim was answered with this task."""

    token: str  # the first six characters of the token
    attempt: int
    ttl: float
    asked_at: float  # when the first request under this claim's id left
    kind: str = ""
    priority: int = 2
    claim: str = ""  # the claim's id, where it is known
    progress: float | None = None  # the progress of the run before, where that is a number


class Renewed(LeaseEvent, frozen=True, kw_only=True):
    """A heartbeat was acknowledged."""

    asked_at: float
    ttl: float | None = None  # the ttl that was granted; `None`: that of the grant
    progress: float | None = None  # the progress in the heartbeat, where that is a number


class Refused(LeaseEvent, frozen=True, kw_only=True):
    """A heartbeat was answered *gone*."""

    asked_at: float
    reason: str = ""


class Lost(LeaseEvent, frozen=True, kw_only=True):
    """A holder lost its lease: by its own judgement (`expired`, `strikes`), else by the service's answer."""

    reason: str


class SettleAsked(LeaseEvent, frozen=True, kw_only=True):
    """A settlement is about to be reported, for the first time or again."""

    outcome: str
    digest: str = ""  # a digest of the whole settlement: equal ones are repeats
    then: int = 0  # the number of successors without an id of their own


class SettleAnswered(LeaseEvent, frozen=True, kw_only=True):
    """A settlement was answered *settled* or *gone*."""

    outcome: str
    asked_at: float
    verdict: str
    digest: str = ""
    reason: str = ""
    then: int = 0


class Started(LeaseEvent, frozen=True, kw_only=True):
    """The handler of a task is about to run its first line."""

    idle_timeout: float | None = None
    payload: str = ""  # a digest of the payload that the handler has


class Effect(LeaseEvent, frozen=True, kw_only=True):
    """A handler is about to make a side effect."""

    progress: bool = False  # whether the handler reports progress with the effect
    reported: float | None = None  # the reported progress, where that is a number that grows


class Stopped(LeaseEvent, frozen=True, kw_only=True):
    """The handler has run its last line."""

    how: str = "finished"


class Issued(LeaseEvent, frozen=True, kw_only=True):
    """A lease was granted, whether or not the answer arrives."""

    token: str
    attempt: int
    ttl: float
    holder: str = ""
    claim: str = ""  # the id of the claim, where the store knows it
    kind: str = ""
    by_store: float | None = None  # the moment by the store's clock, by which tasks are due


class Extended(LeaseEvent, frozen=True, kw_only=True):
    """A lease lasts for at least `ttl` seconds from now."""

    ttl: float


class Closed(LeaseEvent, frozen=True, kw_only=True):
    """A lease is over."""

    status: str  # the status of the task
    expired: bool = False  # whether the lease expired; else its holder ended it
    ended: bool = False  # whether `status` is final
    reason: str = ""  # why the task ended so, in the words of the store


class Redriven(LeaseEvent, frozen=True, kw_only=True):
    """An operator's redrive has begun a new life of the task: leases with greater fences belong to it."""


class Rescheduled(Event, frozen=True, kw_only=True):
    """A task has another due time or priority, which a request has brought."""

    task: str
    request: str  # the id of the request


class Replaced(Event, frozen=True, kw_only=True):
    """A task has another payload and another due time, which a later request has brought."""

    task: str
    payload: str  # a digest
    due_by_store: float  # the due time by the store's clock
    put_off: float  # seconds from the moment at which the task was scheduled to the due time


class GateChanged(Event, frozen=True, kw_only=True):
    """The gate of a kind or of a collection was closed, opened, or changed."""

    scope: Literal["kind", "collection"]
    name: str
    mode: str  # pause, drop or open
    until: float | None = None  # the moment by the store's clock at which a closed gate opens by itself


class KindChanged(Event, frozen=True, kw_only=True):
    """The limits of a kind and of each of its keys were changed; `None`: there is no limit."""

    kind: str
    concurrency: int | None = None
    rate: float | None = None
    burst: int = 1
    key_concurrency: int | None = None
    key_rate: float | None = None
    key_burst: int = 1
    ordered: bool = False

    @property
    def limits_keys(self) -> bool:
        return self.key_concurrency is not None or self.key_rate is not None


class DrainChanged(Event, frozen=True, kw_only=True):
    """An operator drains a worker, or no longer."""

    worker: str
    is_draining: bool = True


class Served(LeaseEvent, frozen=True, kw_only=True):
    """A beat or a settlement was answered, whether or not the answer arrives. Fence 0: its token was never granted."""

    what: Literal["beat", "settle"]
    verdict: str
    outcome: str = ""
    digest: str = ""


class Fault(Event, frozen=True, kw_only=True):
    """A fault has taken effect."""

    name: str
    target: str = ""  # the incarnation that the fault hits; empty: all
    lasts: float = 0.0  # seconds, counted from `at`


class FaultsOver(Event, frozen=True, kw_only=True):
    """No fault happens from here on, and all tasks are drained."""


class Final(Event, frozen=True, kw_only=True):
    """The state of a task at the end."""

    task: str
    status: str
    kind: str = ""
    attempt: int = 0
    crashes: int = 0
    fence: int = 0


_Any = (
    Began | Ended | Draining | Paused | Resumed | Frozen | Thawed | Asked | Acknowledged | CancelAsked | CancelAnswered
    | RescheduleAsked | RescheduleAnswered | BulkAsked | BulkAnswered | PeriodicSet
    | Granted | Renewed | Refused | Lost | SettleAsked | SettleAnswered | Started | Effect | Stopped | Issued | Extended
    | Closed | Redriven | Rescheduled | Replaced | GateChanged | KindChanged | DrainChanged | Served | Fault
    | FaultsOver | Final
)  # fmt: skip

E = TypeVar("E", bound=Event)
_decoder: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)

encode = msgspec.json.Encoder().encode  # an event as one line of JSON, without its end


def decode(line: bytes) -> Event:
    return _decoder.decode(line)


class Log:
    """The events of one process, appended to a file by any thread; an added event survives a kill of the process."""

    def __init__(self, path: str | os.PathLike[str], *, who: str, now: Callable[[], float] = boottime) -> None:
        self.who = who  # the incarnation of the process that writes
        self._now = now
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, event: type[E], **fields: Any) -> E:
        """Append an event. `at` defaults to now, and `who` to this process."""
        if "token" in fields:
            fields["token"] = fields["token"][:_TOKEN]
        stamped: dict[str, Any] = {"at": self._now(), "who": self.who, **fields}
        entry = event(**stamped)
        # One write for the line: a kill leaves all of it or nothing, and processes that share a file do not mix lines.
        os.write(self._file, encode(entry) + b"\n")
        return entry

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read(*paths: str | os.PathLike[str]) -> list[Event]:
    """The events of all these files, by time; events of one file and one moment keep their order."""
    return merge(_lines(Path(path)) for path in paths)


def merge(logs: Iterable[Iterable[Event]]) -> list[Event]:
    return sorted((event for log in logs for event in log), key=lambda event: event.at)


def _lines(path: Path) -> Iterable[Event]:
    *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: this is no event: {error}") from error
    if rest:  # no end of line: the writer was killed, or the disk was full
        try:
            yield decode(rest)
        except msgspec.DecodeError:
            return

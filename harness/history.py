"""What happened, as an append-only log that every process writes and `harness.checker` reads.

    with Log("worker-1.jsonl", who="worker-1") as log:          # one file a process, or one for all: both are safe
        log.add(Started, task=task.id, fence=task.fence)         # stamped with the time and the writer
        log.add(Effect, task=task.id, fence=task.fence)
        log.add(Stopped, task=task.id, fence=task.fence, how="finished")

    problems = check(read("worker-1.jsonl", "worker-2.jsonl", "harness.jsonl"), Rules(ttl=300))

The format: one JSON object a line, `{"event": "Started", "at": 81.25, "who": "worker-1", "task": "a", "fence": 1}`.
Fields with their default are left out. A line that was cut off by a kill is skipped.

`at` is in seconds of one true clock: CLOCK_BOOTTIME of the machine where all processes are on one (all processes of a
machine share it), world time in a simulation. `who` names one incarnation of a process: who comes back after a kill is
somebody else. A lease is named by its task and fence; of its token only the first six characters are ever written.

Who writes what, and when it is stamped:

  everyone who schedules   Asked before a schedule leaves, Acknowledged when its answer is there; CancelAsked and
                           CancelAnswered alike
  a worker                 Granted, Renewed, Refused, SettleAnswered when the answer is there, with `asked_at`, when the
                           request left (of a claim: the first one under its id); SettleAsked before it leaves; Lost
  a body                   Started before its first line, Effect before each side effect, Stopped after its last line
  whoever sees it          Began, Ended (seen reaped: nothing of it runs from here on), Draining, Paused, Resumed,
                           Frozen, Thawed
  the store, if it can     Issued, Extended, Closed: leases as they are committed; Served: each item that was answered
  the harness              Fault when one has taken effect, FaultsOver, and after a full drain one Final for each task

What a component cannot see it leaves out: the checker judges by what is there. Without the store's events it knows
less (when exactly something was granted), and takes the bounds that the workers' events give.
"""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec
from msgspec import Struct

__all__ = [
    "Acknowledged", "Asked", "Began", "CancelAnswered", "CancelAsked", "Closed", "Draining", "Effect", "Ended", "Event",
    "Extended", "Fault", "FaultsOver", "Final", "Frozen", "Granted", "Issued", "Log", "Lost", "Paused", "Refused",
    "Renewed", "Resumed", "Served", "SettleAnswered", "SettleAsked", "Started", "Stopped", "Thawed", "decode", "encode",
    "merge", "read",
]  # fmt: skip

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # only Linux has the first
_TOKEN = 6  # characters of a token that may be written


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="event", gc=False):
    """Something that happened."""

    at: float
    who: str


# Processes ------------------------------------------------------------------------------------------------------


class Began(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A process is there."""

    role: Literal["worker", "server", "scheduler", "harness"]
    slots: int = 0
    """How many bodies a worker runs at once."""
    kinds: tuple[str, ...] = ()
    """The kinds that a worker serves; empty: all."""


class Ended(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Nothing of a process runs any more: it was seen reaped. `who` is the process that ended."""

    how: Literal["killed", "exited"]
    """`killed`: by a signal or its timer; `exited`: by itself, after it gave back what it held."""


class Paused(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A process stands still (SIGSTOP, a stall), while its clock goes on."""


class Resumed(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """It goes on."""


class Draining(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A worker was asked to end: it claims no more, and its bodies go on to their ends."""


class Frozen(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The whole machine of a process stands still, its clocks included: exclusion is not promised then."""


class Thawed(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """It goes on, and its clock is behind by as much."""


# Scheduling -----------------------------------------------------------------------------------------------------


class Asked(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A task is about to be scheduled, or to be scheduled again."""

    task: str
    """The id of the task, made up by the scheduling code."""
    kind: str
    priority: int = 2
    collection: str | None = None
    due_at: float | None = None
    """The task must not be granted before, by the true clock."""
    dedupe_key: str | None = None
    dedupe_window: float | None = None
    max_attempts: int | None = None
    max_crashes: int = 5
    max_runtime: float | None = None
    heartbeat_timeout: float = 0.0
    """The ttl that a beat grants; zero: unknown."""


class Acknowledged(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A schedule was answered: the task is durable."""

    asked: str
    """The id that was asked for."""
    task: str
    """The id that was answered: another one where the dedupe key had a first task already."""
    created: bool = True
    conflict: bool = False


class CancelAsked(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A task is about to be cancelled."""

    task: str


class CancelAnswered(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A cancel was answered: `cancelled`, `ordered`, `gone`."""

    task: str
    verdict: str


# Leases, as their holders see them ------------------------------------------------------------------------------


class Granted(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A claim was answered with this task."""

    task: str
    fence: int
    token: str
    """The first six characters of the token."""
    attempt: int
    ttl: float
    asked_at: float
    """When the first request under this claim's id left."""
    kind: str = ""
    priority: int = 2
    claim: str = ""
    """The claim's id, where it is known."""
    progress: float | None = None
    """What the last holder left, where that is a number."""


class Renewed(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A beat was acknowledged."""

    task: str
    fence: int
    asked_at: float
    ttl: float | None = None
    """What was granted; None: the ttl of the grant."""
    progress: float | None = None
    """What the beat brought, where that is a number."""


class Refused(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A beat was answered *gone*."""

    task: str
    fence: int
    asked_at: float
    reason: str = ""


class Lost(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A holder gave up its lease: `expired` and `strikes` by its own judgement, else because the service said so."""

    task: str
    fence: int
    reason: str


class SettleAsked(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A settlement is about to be reported, for the first time or again."""

    task: str
    fence: int
    outcome: str
    digest: str = ""
    """A digest of all that the settlement says; equal digests are repeats."""
    then: int = 0
    """How many successors without an id of their own come with it."""


class SettleAnswered(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A settlement was answered: `settled`, or `gone`."""

    task: str
    fence: int
    outcome: str
    asked_at: float
    verdict: str
    digest: str = ""
    reason: str = ""
    then: int = 0


# Bodies ---------------------------------------------------------------------------------------------------------


class Started(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The body of a task is about to run its first line."""

    task: str
    fence: int
    idle_timeout: float | None = None


class Effect(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A body is about to do something that others see."""

    task: str
    fence: int
    progress: bool = False
    """True: the body reported progress with it."""
    reported: float | None = None
    """What the body reported, where that is a number that grows."""


class Stopped(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """The body has run its last line."""

    task: str
    fence: int
    how: str = "finished"


# Leases, as the store commits them ------------------------------------------------------------------------------


class Issued(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A lease was granted, whether or not anybody hears of it."""

    task: str
    fence: int
    token: str
    attempt: int
    ttl: float
    holder: str = ""
    claim: str = ""
    """The id of the claim that was answered with the lease, where the store knows it."""


class Extended(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A lease lasts for `ttl` seconds from now, at least."""

    task: str
    fence: int
    ttl: float


class Closed(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A lease is over; `status` is that of its task, `ended` where it is a last one."""

    task: str
    fence: int
    status: str
    expired: bool = False
    """True: the lease ran out; else its holder ended it."""
    ended: bool = False


class Served(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A beat or a settlement was answered, whether or not anybody hears of it."""

    task: str
    fence: int
    """The fence of the item's token; 0: one that was never granted."""
    what: Literal["beat", "settle"]
    verdict: str
    outcome: str = ""
    digest: str = ""


# The harness ----------------------------------------------------------------------------------------------------


class Fault(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """A fault has taken effect."""

    name: str
    target: str = ""
    """The incarnation that the fault hits; empty: all."""
    lasts: float = 0.0
    """Seconds, counted from `at`."""


class FaultsOver(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """From here on all is well, and everything is to be drained."""


class Final(Event, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """How a task stands at the end."""

    task: str
    status: str
    kind: str = ""
    attempt: int = 0
    crashes: int = 0
    fence: int = 0


_Any = (
    Began | Ended | Draining | Paused | Resumed | Frozen | Thawed | Asked | Acknowledged | CancelAsked | CancelAnswered
    | Granted | Renewed | Refused | Lost | SettleAsked | SettleAnswered | Started | Effect | Stopped | Issued | Extended
    | Closed | Served | Fault | FaultsOver | Final
)  # fmt: skip

E = TypeVar("E", bound=Event)
_decoder: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)

encode = msgspec.json.Encoder().encode
"""An event as one line of JSON, without its end."""


def decode(line: bytes) -> Event:
    """One line as an event. Raises `msgspec.DecodeError` where it is none."""
    return _decoder.decode(line)


class Log:
    """One process's events, appended to a file. Any thread; what is added has survived a kill of this process."""

    def __init__(self, path: str | os.PathLike[str], *, who: str, now: Callable[[], float] | None = None) -> None:
        self.who = who
        """The incarnation of a process that writes."""
        self._now = now or (lambda: time.clock_gettime(_CLOCK))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, event: type[E], **fields: Any) -> E:
        """Append an event of this moment and of this process, unless `at` or `who` say otherwise."""
        if "token" in fields:
            fields["token"] = fields["token"][:_TOKEN]
        stamped: dict[str, Any] = {"at": self._now(), "who": self.who, **fields}
        made = event(**stamped)
        # One call for the line: who is killed leaves a whole one or none, and processes that share a file do not mix.
        os.write(self._file, encode(made) + b"\n")
        return made

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read(*paths: str | os.PathLike[str]) -> list[Event]:
    """The events of all these files, by time; what was written into one file at one moment keeps its order."""
    return merge(_lines(Path(path)) for path in paths)


def merge(logs: Iterable[Iterable[Event]]) -> list[Event]:
    """The events of several logs, by time."""
    return sorted((event for log in logs for event in log), key=lambda event: event.at)


def _lines(path: Path) -> Iterable[Event]:
    *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number}: this is no event: {error}") from error
    if rest:  # without its end: the writer was killed, or the disk full
        try:
            yield decode(rest)
        except msgspec.DecodeError:
            return

"""The checker's expectations of a history, and the violations that it finds."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from harness.checker.index import Life, Lives
from harness.history import Event, encode
from leasekit.config import DRIFT, Heartbeats

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The expectations of one history. Times are in seconds; `None`: not checked."""

    drift: float = DRIFT  # how far a clock may run from the true one
    regrant_delay: float = 0.0  # G: how long after the end of a lease its task is held back
    sweep: float = 1.0  # how often the service looks for expired leases
    jitter: float = 0.5  # how late a scheduler, a kernel timer or a log may be
    start_within: float | None = None
    """L1, L2: a ready task is granted within this time, while a worker has a free slot and nothing is wrong."""
    heartbeats: Heartbeats | None = None
    """L3: no lease is lost in a stretch of faults shorter than the outage that these survive with the lease's ttl."""
    bridge: float = 15.0
    """L3: faults no further apart count as one stretch: the timeout of a call and the wait before the next try."""
    fresh: float | None = None
    """L7: the next holder gets progress that was reported at least this long before the end of a run without faults.
    L5: a holder without faults is told of the end of its runtime within this time."""
    lost_claim: float | None = None
    """L4: the repeat of a claim brings the leases whose answer was lost in a shorter stretch of faults."""
    claims_once: bool = True  # S7: the repeat of a claim that was granted tasks is granted no others
    spread: float = 0.1  # L6: the part of its ttl by which a restart may extend a lease further
    due_slack: float | None = None
    """S11: how long before `due_at` a task may be granted: the difference between the clocks."""
    ordered: bool = True  # S11: the service hands out the most urgent task first
    restarts_extend: bool = True  # L6: a restart gives every live lease its whole ttl again
    least_settled: int = 1  # the least number of answered settlements that proves something
    faults: Collection[str] = ()  # the names of faults that must have fired

    def outage(self, ttl: float) -> float:
        """Return the longest outage that a lease of this ttl has to survive; 0.0: not checked."""
        return self.heartbeats.for_ttl(ttl).outage_survived if self.heartbeats else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that a history breaks, and the events that show it."""

    rule: str  # S1-S11, L1-L7, A1-A15, `queue`, `traffic` or `faults`
    why: str  # what is wrong, in one sentence
    task: str = ""  # the id of the task, where the promise is about one
    events: Sequence[Event] = ()  # the events that show the violation

    def __str__(self) -> str:
        lines = [f"{self.rule} {self.task}: {self.why}" if self.task else f"{self.rule}: {self.why}"]
        shown = sorted(self.events, key=lambda event: event.at)[:_SHOWN]
        return "\n".join([*lines, *(f"    {encode(event).decode()}" for event in shown)])


Found = Iterator[tuple[str, Sequence[Event]]]  # why a promise about a task is broken, and the events that show it
Check = Callable[[Life, Lives, Rules], Found]


def violations(lives: Lives, rules: Rules, checks: Sequence[tuple[str, Check]]) -> list[Violation]:
    return [
        Violation(rule=rule, why=why, task=life.task, events=events)
        for life in lives.tasks.values()
        for rule, check in checks
        for why, events in check(life, lives, rules)
    ]

"""What a checker is told to expect, and what it finds."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.history import Event, encode
from leasekit.config import DRIFT, Heartbeats

__all__ = ["Rules", "Violation"]

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is to be expected. Times in seconds; None: not checked."""

    drift: float = DRIFT
    """How far a clock may run from the true one."""
    regrant_delay: float = 0.0
    """G: how long after the end of a lease its task is held back."""
    sweep: float = 1.0
    """The time between two looks of the service for leases that have ended."""
    jitter: float = 0.5
    """How late a scheduler, a kernel timer or a log may be."""
    start_within: float | None = None
    """L1, L2: a ready task is granted within this time, while a worker has a free slot and nothing is wrong."""
    outage: float | None = None
    """L3: a lease is not lost for fewer seconds of faults in one stretch."""
    bridge: float = 15.0
    """L3: how near two faults may be to count as one stretch: a call's timeout and the wait before the next try."""
    fresh: float | None = None
    """L7: what a body reported as its progress this long before its end, while nothing was wrong, is with the next
    holder."""
    lost_claim: float | None = None
    """L4: a lease that its claim's answer did not bring, for fewer seconds of faults, is brought by the claim's
    repeat."""
    claims_once: bool = True
    """S7: nothing is granted for the repeat of a claim that was granted something."""
    spread: float = 0.1
    """L6: the part of its ttl by which a lease may be extended further after a restart."""
    due_slack: float | None = None
    """S11: how long before `due_at` a task may be granted: what the clocks may differ."""
    ordered: bool = True
    """S11: the service hands out the most urgent task first."""
    restarts_extend: bool = True
    """L6: after a restart every live lease gets its whole ttl anew."""
    least_settled: int = 1
    """The number of answered settlements below which nothing was proved."""
    faults: Collection[str] = ()
    """The names of faults that must have fired."""

    @classmethod
    def for_heartbeats(cls, heartbeats: Heartbeats) -> "Rules":
        """Those of holders that beat so; `dataclasses.replace` sets the rest."""
        return cls(outage=heartbeats.outage_survived, bridge=heartbeats.call_timeout + heartbeats.retry_wait + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that a history breaks, and the events that show it."""

    rule: str
    """S1-S11, L1-L7, `queue`, `traffic` or `faults`."""
    why: str
    """What is wrong, in one sentence."""
    task: str = ""
    """The id of the task, where one is concerned."""
    events: Sequence[Event] = ()
    """The events that show it."""

    def __str__(self) -> str:
        lines = [f"{self.rule} {self.task}: {self.why}" if self.task else f"{self.rule}: {self.why}"]
        shown = sorted(self.events, key=lambda event: event.at)[:_SHOWN]
        return "\n".join([*lines, *(f"    {encode(event).decode()}" for event in shown)])

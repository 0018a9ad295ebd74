"""What a checker is told to expect, and what it finds."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leasekit.config import DRIFT, Beats
from leasekit.testing.history import Event, encode

__all__ = ["Rules", "Violation"]

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is to be expected. Times in seconds; None: not checked."""

    drift: float = DRIFT  # how far a clock may run from the true one
    regrant_delay: float = 0.0  # G: how long after the end of a lease its task is held back
    sweep: float = 1.0  # between two looks of the service for leases that have ended
    jitter: float = 0.5  # how late a scheduler, a kernel timer or a log may be
    # L1, L2: a ready task is granted within this time, while a worker has a free slot and nothing is wrong.
    start_within: float | None = None
    # L3: a lease is not lost for fewer seconds of faults in one stretch; `bridge` is how near two of them may be to
    # count as one: a call's time-out and the wait before the next try.
    outage: float | None = None
    bridge: float = 15.0
    # L7: what a body reported as its progress this long before its end, while nothing was wrong, is with the next.
    fresh: float | None = None
    # L4: a lease that its claim's answer did not bring, for fewer seconds of faults, is brought by the claim's repeat.
    lost_claim: float | None = None
    claims_once: bool = True  # S7: nothing is granted for the repeat of a claim that was granted something
    spread: float = 0.1  # by this part of its ttl a lease may be extended further after a restart (L6)
    due_slack: float | None = None  # S11: how much before `due_at` a task may be granted: what the clocks may differ
    ordered: bool = True  # S11: the service hands out the most urgent first
    restarts_extend: bool = True  # L6: after a restart every live lease gets its whole ttl anew
    least_settled: int = 1  # answered settlements below which nothing was proved
    faults: Collection[str] = ()  # that must have fired

    @classmethod
    def for_beats(cls, beats: Beats) -> "Rules":
        """Those of holders that beat so; `dataclasses.replace` sets the rest."""
        return cls(outage=beats.outage_survived, bridge=beats.call_timeout + beats.retry_wait + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that a history breaks, and the events that show it."""

    rule: str  # S1-S11, L1-L7, queue, traffic, faults
    why: str
    task: str = ""
    events: Sequence[Event] = ()

    def __str__(self) -> str:
        lines = [f"{self.rule} {self.task}: {self.why}" if self.task else f"{self.rule}: {self.why}"]
        shown = sorted(self.events, key=lambda event: event.at)[:_SHOWN]
        return "\n".join([*lines, *(f"    {encode(event).decode()}" for event in shown)])

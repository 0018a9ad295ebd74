"""One lease's trust: until when it may be believed in.

The rule that safety rests on: a grant is believed in from when its request *left*, for `ttl·(1 − 2ρ) − margin`, by a
clock that also counts while the machine is suspended. Whatever the service answers, it cannot have counted from
earlier than that, so it cannot give the task to another before this process has stopped believing. A slow answer buys
nothing, and neither does a request that is sent again.

    granted_at ─────────── trust ────────────┬── margin ──┐
        │                              lost_at    trusted_until   the service may grant it again
        └─ last acknowledged beat        └─ grace ─┘

Strikes are an early exit on top, never the guard.
"""

from typing import Any

from leasekit.config import DRIFT, Beats

__all__ = ["Term", "granted_at"]


def granted_at(asked_at: float, waited: float | None, *, answered_at: float) -> float:
    """The earliest moment, by our clock, at which a claim that left at `asked_at` can have been granted.

    `waited` is how long the service says that the claim had waited by then: by its clock, which may be the faster one.
    Whatever it says, it was granted before it was answered: an answer is bad input too.
    """
    return min(answered_at, asked_at + max(0.0, waited or 0.0) * (1 - 2 * DRIFT))


class Term:
    """The trust in one lease. `key` is its owner's business; `beats` are those of the ttl that was granted.

    A term that is not `confirmed` may be over already (nobody said when it was granted, or too little of it is left):
    it cannot be lost, because it must not be begun before a beat of it is acknowledged.
    """

    __slots__ = (
        "beats", "confirmed", "granted_at", "has_news", "key", "not_before", "place", "retries", "strikes",
    )  # fmt: skip

    def __init__(self, key: Any, beats: Beats, *, granted_at: float, confirmed: bool = True) -> None:
        self.key = key
        self.beats = beats
        self.granted_at = granted_at  # of the last acknowledged beat, or of the claim
        self.confirmed = confirmed
        self.strikes = 0  # failed beats in a row
        self.retries = 0  # of these, in this cycle
        self.not_before = 0.0  # when it may be tried again
        self.has_news = False  # since its last beat left: the next may come early
        self.place: object | None = None  # the one place of the cycle that it is in

    @property
    def trusted_until(self) -> float:
        """No code that relies on the lease may run from here on."""
        return self.granted_at + self.beats.trust

    @property
    def lost_at(self) -> float:
        """Here the body is told to stop, so that it can end in time."""
        return self.granted_at + self.beats.slack

    def renewed(self, asked_at: float) -> None:
        """A beat that left at `asked_at` was acknowledged. Answers may overtake one another: trust never moves back."""
        self.granted_at = max(self.granted_at, asked_at)
        self.strikes = 0
        self.retries = 0
        self.confirmed = True

    def failed(self, asked_at: float) -> bool:
        """A beat that left at `asked_at` failed; True when the lease must be given up."""
        self.strikes += 1
        self.retries += 1
        if self.strikes < self.beats.max_failures:
            return False
        return not self.confirmed or asked_at - self.granted_at >= self.beats.strikes_from

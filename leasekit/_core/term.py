"""Trust in one lease: until when code may rely on it.

Safety rests on one rule: a lease is trusted from when its request *left*, for `ttl·(1 − 2ρ) − margin`, by a clock that
also counts while the machine is suspended. Whatever the service answers, the service cannot have counted the ttl from
an earlier instant, so it cannot grant the task to another process before this process has stopped trusting the lease.
A slow answer does not extend trust, and neither does a request that is sent again.

    granted_at ─────────── trust ────────────┬── margin ──┐
        │                              lost_at    trusted_until   the service may grant it again
        └─ last acknowledged beat        └─ grace ─┘

Failed heartbeats in a row (strikes) can end a lease earlier; they are never the guard.
"""

from typing import Any

from leasekit.config import DRIFT, Heartbeats

__all__ = ["Term", "granted_at"]


def granted_at(asked_at: float, waited: float | None, *, answered_at: float) -> float:
    """Return the earliest instant, by this process's clock, at which a claim sent at `asked_at` can have been granted.

    `waited` is how long the claim had waited by then, as the service says, by its own clock, which may run faster.
    Whatever the service says, the grant came before its answer: an answer is bad input too.
    """
    return min(answered_at, asked_at + max(0.0, waited or 0.0) * (1 - 2 * DRIFT))


class Term:
    """Track the trust in one lease. `key` identifies the lease to its owner; `heartbeats` are the settings for its ttl.

    A term that is not `confirmed` may be over already (the service did not say when the lease was granted, or too
    little of it is left). Such a term cannot be lost: its task must not begin before a heartbeat is acknowledged.
    """

    __slots__ = (
        "confirmed", "granted_at", "has_news", "heartbeats", "key", "not_before", "place", "retries", "strikes",
    )  # fmt: skip

    def __init__(self, key: Any, heartbeats: Heartbeats, *, granted_at: float, confirmed: bool = True) -> None:
        self.key = key
        self.heartbeats = heartbeats
        self.granted_at = granted_at  # when the last acknowledged heartbeat, or the claim, was sent
        self.confirmed = confirmed
        self.strikes = 0  # failed heartbeats in a row
        self.retries = 0  # failed heartbeats in this cycle
        self.not_before = 0.0  # when the next heartbeat may be tried
        self.has_news = False  # there is news since the last heartbeat left: the next may come early
        self.place: object | None = None  # the one place of the cycle that holds this term

    @property
    def trusted_until(self) -> float:
        """The instant from which no code that relies on the lease may run."""
        return self.granted_at + self.heartbeats.trust

    @property
    def lost_at(self) -> float:
        """The instant at which code under the lease is told to stop, so that it can end in time."""
        return self.granted_at + self.heartbeats.slack

    def renewed(self, asked_at: float) -> None:
        """Record that a heartbeat sent at `asked_at` was acknowledged. Trust never moves back, though answers may."""
        self.granted_at = max(self.granted_at, asked_at)
        self.strikes = 0
        self.retries = 0
        self.confirmed = True

    def failed(self, asked_at: float) -> bool:
        """Record that a heartbeat sent at `asked_at` failed. Return whether the lease must be given up."""
        self.strikes += 1
        self.retries += 1
        if self.strikes < self.heartbeats.max_failures:
            return False
        return not self.confirmed or asked_at - self.granted_at >= self.heartbeats.strikes_from

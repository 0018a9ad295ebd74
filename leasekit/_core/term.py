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

from dataclasses import dataclass, field
from typing import Any

from leasekit.config import DRIFT, Heartbeats


def granted_at(asked_at: float, waited: float | None, *, answered_at: float) -> float:
    """Return the earliest instant, by this process's clock, at which a claim sent at `asked_at` can have been granted.

    `waited` is how long the claim had waited by then, as the service says, by its own clock, which may run faster.
    Whatever the service says, the grant came before its answer: an answer is bad input too.
    """
    return min(answered_at, asked_at + max(0.0, waited or 0.0) * (1 - 2 * DRIFT))


@dataclass(slots=True, eq=False, repr=False)
class Term:
    """Track the trust in one lease. `key` identifies the lease to its owner; `heartbeats` are the settings for its ttl.

    A term that is not `confirmed` may be over already, or just have been granted: its task must not begin before a
    heartbeat is acknowledged. Such a term does not expire, and only strikes that last as long as a lease end it.
    """

    key: Any
    heartbeats: Heartbeats
    granted_at: float = field(kw_only=True)  # when the last acknowledged heartbeat, or the claim, was sent
    confirmed: bool = field(default=True, kw_only=True)
    strikes: int = field(default=0, init=False)  # failed heartbeats in a row …
    failing_from: float = field(default=0.0, init=False)  # … and when the first of them was sent
    retries: int = field(default=0, init=False)  # failed heartbeats in this cycle
    not_before: float = field(default=0.0, init=False)  # when the next heartbeat may be tried
    has_news: bool = field(default=False, init=False)  # came since the last heartbeat left: the next may come early
    place: Any = field(default=None, init=False)  # the one place of the cycle that holds this term

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
        self.strikes = self.retries = 0
        self.confirmed = True

    def failed(self, asked_at: float) -> bool:
        """Count a heartbeat, sent at `asked_at`, as failed; return whether `max_failures` in a row end the lease."""
        self.failing_from = self.failing_from if self.strikes else asked_at
        self.strikes += 1
        self.retries += 1
        since = self.granted_at if self.confirmed else self.failing_from
        return self.strikes >= self.heartbeats.max_failures and asked_at - since >= self.heartbeats.strikes_from

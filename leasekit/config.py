"""How often to beat, and how long to believe: the numbers of a keeper, and the sums that follow from them."""

import math
from dataclasses import dataclass, fields, replace

from leasekit.errors import ConfigError

__all__ = ["DRIFT", "Beats"]

DRIFT = 0.001
"""ρ, the bound on how much faster one clock may run than another: twice NTP's largest slew."""

_SHORTEST_TTL = 2.0
_SHORTEST_CYCLE = 0.01
_SLOTS_PER_CYCLE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """The rhythm of heartbeats for leases of one `ttl`. It cannot exist in a contradictory state.

    Durations are seconds. `for_ttl` makes the numbers for another ttl; `budget` shows how they add up.

    Raises `ConfigError` where the numbers contradict one another, with the one to change.
    """

    ttl: float = 300.0  # what the service grants; its answer is the truth, this is what to expect
    cycle: float = 120.0  # every lease beats once in each
    rate: float = 1.0  # slots a second, at most, for the leases of one ttl: each has a cycle of its own
    batch: int = 100  # leases in one slot, at most; less where the service takes less
    in_flight: int = 4  # calls under way at once, likewise for the leases of one ttl
    margin: float = 15.0  # what may still be on its way when the body is stopped
    grace: float = 10.0  # how long a body may take to end once it was told to
    call_timeout: float = 10.0  # one try
    retry_wait: float = 5.0  # before a failed lease is tried again
    retries_per_cycle: int = 3
    max_failures: int = 3  # strikes: failed beats in a row
    # Strikes end nothing before this long after the last acknowledged beat; None: until no further try makes sense.
    strike_after: float | None = None
    burst: float = 3.0  # after a stall: at most this many times the even pace

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name}={value!r} is no number of zero or more: set {field.name}")
        for name in ("cycle", "rate", "call_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}=0 would never beat: raise {name}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} is below the smallest possible: raise it to {least:g}")
        for name in ("batch", "in_flight", "max_failures", "retries_per_cycle"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name}={getattr(self, name)!r} counts something: set {name} to a whole number")
        if self.rate * self.cycle < 1:
            raise ConfigError(f"rate={self.rate:g} has no slot in a cycle: raise rate to {1 / self.cycle:g} or more")
        if self.ttl < 2 * self.cycle:
            raise ConfigError(
                f"ttl={self.ttl:g} does not cover one whole cycle in any phase: "
                f"lower cycle from {self.cycle:g} to {self.ttl / 2:g} or less, or use Beats().for_ttl({self.ttl:g})"
            )
        spent = self.cycle + self.call_timeout + self.margin + self.grace
        drift = 2 * DRIFT
        if spent >= self.ttl * (1 - drift):
            room = self.ttl * (1 - drift) - spent + self.cycle
            advice = f"lower cycle below {room:g}" if room > _SHORTEST_CYCLE else f"use Beats().for_ttl({self.ttl:g})"
            raise ConfigError(
                f"cycle + call_timeout + margin + grace = {spent:g} leaves nothing of ttl={self.ttl:g}, "
                f"less {drift:.1%} of drift: {advice}, or raise ttl above {spent / (1 - drift):g}"
            )

    def for_ttl(self, ttl: float) -> "Beats":
        """The same choices for leases of another ttl: the durations follow it, the counts stay.

        Raises `ConfigError` below 2 s: no beat could be lost and tried again in time.
        """
        if ttl == self.ttl:
            return self
        if not (math.isfinite(ttl) and ttl >= _SHORTEST_TTL):
            raise ConfigError(f"ttl={ttl!r} is too short to be kept: raise it to {_SHORTEST_TTL:g} or more")
        cycle = ttl / 3
        return replace(
            self,
            ttl=ttl,
            cycle=cycle,
            rate=max(self.rate, _SLOTS_PER_CYCLE / cycle),
            margin=max(min(15.0, ttl / 10), ttl / 20),
            grace=min(10.0, ttl / 20),
            call_timeout=min(10.0, ttl / 12),
            retry_wait=min(5.0, ttl / 60),
            strike_after=None if self.strike_after is None else self.strike_after * ttl / self.ttl,
        )

    @property
    def trust(self) -> float:
        """For how long a grant is believed in, from when its request left: `ttl·(1 − 2ρ) − margin`."""
        return self.ttl * (1 - 2 * DRIFT) - self.margin

    @property
    def slack(self) -> float:
        """From an acknowledged beat to the moment when the body is told to stop: `trust − grace`."""
        return self.trust - self.grace

    @property
    def strikes_from(self) -> float:
        """Seconds after the last acknowledged beat before which strikes end nothing."""
        if self.strike_after is not None:
            return min(self.strike_after, self.slack)
        return self.slack - self.call_timeout

    @property
    def capacity(self) -> int:
        """How many leases can be held: `batch` in each of the whole slots of a cycle."""
        return int(self.rate * self.cycle + 1e-6) * self.batch

    @property
    def outage_survived(self) -> float:
        """How long no beat may get through, at any phase, without a lease being lost.

        It counts from when the first call left that got no answer (one that was under way, say), until a call is
        answered again. It holds for up to `capacity` leases, as long as calls that get through are answered within
        `in_flight / rate` seconds: slower answers leave less than `rate` slots a second.
        """
        strikes = max(self.strikes_from - self.cycle, (self.max_failures - 1) * self.retry_wait)
        return max(0.0, min(self._last_try, strikes))

    @property
    def _last_try(self) -> float:
        """The longest outage after which one more try can still be answered in time; negative where there is none."""
        return self.slack - self.call_timeout - max(self.retry_wait, 1 / self.rate) - self.cycle

    def budget(self) -> str:
        """The whole sum, a line each, for people."""
        rows = [
            ("ttl", self.ttl, "what the service grants"),
            ("− clock drift", -2 * DRIFT * self.ttl, f"two clocks, each within {DRIFT:.1%}"),
            ("− margin", -self.margin, "what may be on its way when a body is stopped"),
            ("= trust", self.trust, "from when the request left; then the process ends where it is guarded"),
            ("− grace", -self.grace, "for a body to end by itself"),
            ("= slack", self.slack, "here the lease is lost and the body told to stop"),
            ("− cycle", -self.cycle, "between two beats"),
            ("− call_timeout", -self.call_timeout, "a try that hangs"),
            ("− retry_wait", -self.retry_wait, "before the try that gets through"),
        ]
        if 1 / self.rate > self.retry_wait:
            rows[-1] = ("− 1 / rate", -1 / self.rate, "before the next slot, in which a try gets through")
        if self._last_try < 0:
            rows.append(
                (
                    "+ missing",
                    -self._last_try,
                    "one beat that fails may cost a lease: lower cycle or retry_wait, or raise rate",
                )
            )
        elif self.outage_survived < self._last_try:
            early = self.outage_survived - self._last_try
            rows.append(("− strikes", early, f"{self.max_failures} in a row end a lease early, from strike_after on"))
        rows.append(("= outage survived", self.outage_survived, "of any cause, at any phase"))
        lines = [f"{name:<18}{value:>9.1f} s  {why}" for name, value, why in rows]
        pace = f"{self.rate:g} slots/s × {self.batch} leases × {self.cycle:g} s"
        prompt = f"if answers take {self.in_flight / self.rate:g} s at most"
        return "\n".join([*lines, f"{'capacity':<18}{self.capacity:>9,d}    {pace}, {prompt}"])


_LEAST = {"ttl": _SHORTEST_TTL, "cycle": _SHORTEST_CYCLE, "batch": 1, "in_flight": 1, "max_failures": 1, "burst": 1}

"""Settings of heartbeats: how often leases are renewed and for how long they are trusted, with the resulting sums."""

import math
import re
from dataclasses import dataclass, fields, replace

from leasekit.errors import ConfigError

__all__ = ["DRIFT", "Heartbeats", "check_number", "duration"]

DRIFT = 0.001
"""ρ, the bound on how much faster one clock may run than another: twice NTP's largest slew."""

LONGEST = 10 * 365 * 86400.0  # seconds; no longer duration is accepted
_SHORTEST_TTL = 2.0
_SHORTEST_CYCLE = 0.01
_SLOTS_PER_CYCLE = 12


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([smhd]?)", re.ASCII)


def duration(name: str, text: str, *, least: float = 0.0) -> float:
    """Return the seconds that `text` means: a number, or one with s, m, h or d behind it. Raises `ConfigError`."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not least <= seconds <= 100 * 365 * 86400:
        bounds = "from a minute to 100 years" if least == 60 else f"from {least:g} s to 100 years"
        raise ConfigError(f"{name} must be {bounds}: a number of seconds, or one with s, m, h or d behind (180d)")
    return seconds


def check_number(
    name: str,
    value: object,
    *,
    unit: str = " of seconds",
    least: float = 0.0,
    most: float = LONGEST,
    whole: bool = False,
    or_infinity: bool = False,
    or_none: bool = False,
) -> None:
    """Raise `ConfigError` if `value` is not a number from `least` to `most`: NaN, text and bools are refused too.

    `name` is the argument that has this value, for the message. `whole`: a float is refused. `or_infinity`, `or_none`:
    these values are accepted as well.
    """
    if (or_none and value is None) or (or_infinity and value == math.inf):
        return
    if isinstance(value, int if whole else int | float) and not isinstance(value, bool) and least <= value <= most:
        return
    also = ", or math.inf" * or_infinity + ", or None" * or_none
    what = f"a{' whole' * whole} number{unit} from {least:,.15g} to {most:,.15g}{also}"
    raise ConfigError(f"{name} must be {what}, got {value!r:.100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeats:
    """The rhythm of heartbeats for leases of one `ttl`. Contradictory settings are refused.

    Durations are seconds. `for_ttl` computes the settings for another ttl; `budget` shows how they add up.

    Raises `ConfigError` if the settings contradict one another, with the one to change.
    """

    ttl: float = 300.0
    """The ttl that the service is expected to grant; the ttl in its answer is what counts."""
    cycle: float = 120.0
    """Every lease is renewed once in each cycle."""
    rate: float = 1.0
    """Slots a second, at most, for the leases of one ttl: each ttl has a cycle of its own."""
    batch: int = 100
    """Leases in one slot, at most; fewer if the service allows fewer."""
    in_flight: int = 4
    """Calls in progress at once, for the leases of one ttl."""
    margin: float = 15.0
    """Time for operations that are still on their way when the handler is stopped."""
    grace: float = 10.0
    """Time that a handler may take to end once it was told to."""
    call_timeout: float = 10.0
    """Time that one call may take."""
    retry_wait: float = 5.0
    """Time that a lease waits after a failed heartbeat before the next try."""
    retries_per_cycle: int = 3
    """The number of tries after a failed heartbeat before the lease waits for the next cycle."""
    max_failures: int = 3
    """Strikes: the number of failed heartbeats in a row that end a lease."""
    strike_after: float | None = None
    """Strikes end no lease before this time after its last acknowledged heartbeat; None: while a try is useful."""
    burst: float = 3.0
    """After a stall, heartbeats leave at most this many times as fast as the even pace."""

    def __post_init__(self) -> None:
        for field in fields(self):
            is_seconds = field.type is not int and field.name not in ("rate", "burst")
            check_number(
                field.name,
                getattr(self, field.name),
                unit=" of seconds" if is_seconds else "",
                least=_LEAST.get(field.name, 0),
                whole=field.type is int,
                or_none=field.default is None,
            )
        self._check_cycle()
        self._check_sum()

    def _check_cycle(self) -> None:
        if self.call_timeout <= 0:
            raise ConfigError("call_timeout=0 would never send a heartbeat: raise call_timeout")
        if self.rate * self.cycle < 1 - 1e-9:
            raise ConfigError(f"rate={self.rate:g} has no slot in a cycle: raise rate to {1 / self.cycle:g} or more")
        if self.ttl < 2 * self.cycle:
            raise ConfigError(
                f"ttl={self.ttl:g} does not cover one whole cycle in any phase: "
                f"lower cycle from {self.cycle:g} to {self.ttl / 2:g} or less, "
                f"or use Heartbeats().for_ttl({self.ttl:g})"
            )

    def _check_sum(self) -> None:
        spent = self._spent
        drift = 2 * DRIFT
        if spent >= self.ttl * (1 - drift):
            room = self.ttl * (1 - drift) - spent + self.cycle
            advice = (
                f"lower cycle below {room:g}" if room > _SHORTEST_CYCLE else f"use Heartbeats().for_ttl({self.ttl:g})"
            )
            raise ConfigError(
                f"cycle + call_timeout + margin + grace = {spent:g} leaves nothing of ttl={self.ttl:g}, "
                f"less {drift:.1%} of drift: {advice}, or raise ttl above {spent / (1 - drift):g}"
            )

    def for_ttl(self, ttl: float) -> "Heartbeats":
        """Return the same choices for leases of another ttl: durations follow the ttl, counts stay.

        A duration that is half the default becomes half the default for that ttl. If the sum of all would take a
        larger part of the ttl than here, `margin`, `grace` and `call_timeout` are cut to fit.

        Raises `ConfigError` below 2 s: no heartbeat could be lost and tried again in time.
        """
        if ttl == self.ttl:
            return self
        check_number("ttl", ttl, least=_SHORTEST_TTL)
        here, there = _durations(self.ttl), _durations(ttl)
        scaled = {name: getattr(self, name) * there[name] / here[name] for name in there}
        cycle = scaled["cycle"] = max(_SHORTEST_CYCLE, min(scaled["cycle"], ttl / 2))
        # Neither more of the ttl than was chosen (or 0.6, which leaves enough), nor all of it.
        part = min(max(self._spent / self.ttl, 0.6), (1 - 2 * DRIFT) * (1 - 1e-9))
        room, others = part * ttl - cycle, sum(scaled[name] for name in _SPENT)
        if others > room:
            scaled |= {name: scaled[name] * room / others for name in _SPENT}
        slots = min(self.rate * self.cycle, _SLOTS_PER_CYCLE)
        return replace(
            self,
            ttl=ttl,
            rate=max(self.rate, slots / cycle),
            strike_after=None if self.strike_after is None else min(self.strike_after * ttl / self.ttl, ttl),
            **scaled,
        )

    @property
    def _spent(self) -> float:
        """The part of the ttl that one failed heartbeat takes, without `retry_wait`."""
        return self.cycle + self.margin + self.grace + self.call_timeout

    @property
    def trust(self) -> float:
        """Seconds for which a grant is trusted, from when its request left: `ttl·(1 − 2ρ) − margin`."""
        return self.ttl * (1 - 2 * DRIFT) - self.margin

    @property
    def slack(self) -> float:
        """Seconds from an acknowledged heartbeat until the handler is told to stop: `trust − grace`."""
        return self.trust - self.grace

    @property
    def strikes_from(self) -> float:
        """Seconds after the last acknowledged heartbeat before which strikes end no lease."""
        if self.strike_after is not None:
            return min(self.strike_after, self.slack)
        return self.slack - self.call_timeout

    @property
    def capacity(self) -> int:
        """The number of leases that can be held: `batch` in each of the whole slots of a cycle."""
        return int(self.rate * self.cycle + 1e-6) * self.batch

    @property
    def outage_survived(self) -> float:
        """The longest outage, in seconds and at any phase, in which no lease is lost.

        An outage counts from when the first call left that got no answer (a call in progress, say), until a call is
        answered again. This holds for up to `capacity` leases, as long as calls that get through are answered within
        `in_flight / rate` seconds: slower answers leave less than `rate` slots a second.
        """
        strikes = max(self.strikes_from - self.cycle, (self.max_failures - 1) * self.retry_wait)
        return max(0.0, min(self._last_try, strikes))

    @property
    def _last_try(self) -> float:
        """The longest outage after which one more try can still be answered in time; negative if no try can."""
        return self.slack - self.call_timeout - max(self.retry_wait, 1 / self.rate) - self.cycle

    def budget(self) -> str:
        """Return the whole sum, one line each, for people."""
        rows = [
            ("ttl", self.ttl, "what the service grants"),
            ("− clock drift", -2 * DRIFT * self.ttl, f"two clocks, each within {DRIFT:.1%}"),
            ("− margin", -self.margin, "what may be on its way when a handler is stopped"),
            ("= trust", self.trust, "from when the request left; then the process ends where it is guarded"),
            ("− grace", -self.grace, "for a handler to end by itself"),
            ("= slack", self.slack, "here the lease is lost and the handler told to stop"),
            ("− cycle", -self.cycle, "between two heartbeats"),
            ("− call_timeout", -self.call_timeout, "a try that hangs"),
            ("− retry_wait", -self.retry_wait, "before the try that gets through"),
        ]
        if 1 / self.rate > self.retry_wait:
            rows[-1] = ("− 1 / rate", -1 / self.rate, "before the next slot, in which a try gets through")
        if self._last_try < 0:
            hint = "one failed heartbeat may cost a lease: lower cycle or retry_wait, or raise rate"
            rows.append(("+ missing", -self._last_try, hint))
        elif self.outage_survived < self._last_try:
            early = self.outage_survived - self._last_try
            rows.append(("− strikes", early, f"{self.max_failures} in a row end a lease early, from strike_after on"))
        rows.append(("= outage survived", self.outage_survived, "of any cause, at any phase"))
        lines = [f"{name:<18}{value:>9.1f} s  {why}" for name, value, why in rows]
        pace = f"{self.rate:g} slots/s × {self.batch} leases × {self.cycle:g} s"
        prompt = f"if answers take {self.in_flight / self.rate:g} s at most"
        return "\n".join([*lines, f"{'capacity':<18}{self.capacity:>9,d}    {pace}, {prompt}"])


def _durations(ttl: float) -> dict[str, float]:
    """Return the default durations for leases of one ttl; at 300 s, those of `Heartbeats()`."""
    return {
        "cycle": max(ttl / 3, min(120.0, ttl / 2 - 30.0)),
        "margin": max(min(15.0, ttl / 10), ttl / 20),
        "grace": min(10.0, ttl / 20),
        "call_timeout": min(10.0, ttl / 12),
        "retry_wait": min(5.0, ttl / 60),
    }


_SPENT = ("margin", "grace", "call_timeout")
_LEAST = {"ttl": _SHORTEST_TTL, "cycle": _SHORTEST_CYCLE, "batch": 1, "in_flight": 1, "max_failures": 1, "burst": 1}

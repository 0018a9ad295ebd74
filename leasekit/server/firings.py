"""When periodic tasks fire: arithmetic on instants, without a store and without a clock.

A firing is named by its nominal instant, which its rule gives; jitter moves when it is made, and not its name. The
rules of a `Cron` are for wall times, which a time zone may skip or repeat:

Rule 1: a rule for chosen hours fires once for each wall time. One that is skipped fires at the end of the gap, together
        with all others of that gap; one that is repeated fires the first time.
Rule 2: a rule for every hour (`*`) fires at each moment at which the wall clock shows such a time: also in the hour
        that is repeated, and not in the one that is skipped.
Rule 3: nominal instants are whole seconds, and increase strictly.
"""

import math
import zoneinfo
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby, islice, takewhile
from typing import NamedTuple, Protocol

from leasekit.errors import Refused
from leasekit.periodic import PeriodicTask

LATE = 60.0
"""Seconds after which a firing is late: `catch_up` says how many late ones are made up for."""
LAST = 253_402_200_000
"""An instant after which nothing fires: the last hours of the year 9999 cannot be expressed in every time zone."""
_MOST = 1000  # firings that are judged together, the latest ones
_SOME_DAY = 1_700_000_000  # in 2023: each weekday is once the 29 February of the 50 years after it
_MINUTE = timedelta(minutes=1)


class Rule(Protocol):
    """The nominal instants of a periodic task, in seconds since the epoch."""

    def after(self, instant: float) -> Iterator[int]:
        """Yield the instants after this one, in order."""
        ...

    def until(self, instant: float) -> Iterator[int]:
        """Yield the instants up to this one, the latest first."""
        ...


class Interval(NamedTuple):
    """Every so many seconds, counted from the epoch: a change of anything else moves no firing."""

    every: int

    def after(self, instant: float) -> Iterator[int]:
        return iter(range((int(instant // self.every) + 1) * self.every, LAST, self.every))

    def until(self, instant: float) -> Iterator[int]:
        return iter(range(int(instant // self.every) * self.every, -1, -self.every))


class Cron(NamedTuple):
    """The wall times of a cron expression of five fields in a time zone; see the rules of this module."""

    expression: str
    zone: zoneinfo.ZoneInfo

    @property
    def is_hourly(self) -> bool:
        return self.expression.split()[1] == "*"

    def after(self, instant: float) -> Iterator[int]:
        start = self._wall(instant) - self._repeated(instant)
        instants = self._instants(self._walls(start, reverse=False), reverse=False)
        return takewhile(lambda at: at < LAST, (at for at in instants if at > instant))

    def until(self, instant: float) -> Iterator[int]:
        start = self._wall(instant) + self._repeated(instant) + _MINUTE
        instants = self._instants(self._walls(start, reverse=True), reverse=True)
        return takewhile(lambda at: at >= 0, (at for at in instants if at <= instant))

    def _walls(self, start: datetime, *, reverse: bool) -> Iterator[datetime]:
        """Yield the wall times after `start`, or before it, in order; the search ends after 50 years without one."""
        from cronsim import CronSim

        walls = CronSim(self.expression, start, reverse=reverse)
        # Far from the ends of what a datetime can be.
        return takewhile(lambda wall: 1960 <= wall.year < 9990, walls)

    def _wall(self, instant: float) -> datetime:
        return datetime.fromtimestamp(int(instant // 1), self.zone).replace(tzinfo=None, fold=0)

    def _repeated(self, instant: float) -> timedelta:
        """Return the length of the repetition in which the wall clock is at this instant."""
        first, second = self._offsets(self._wall(instant))
        return max(first - second, timedelta(0))

    def _offsets(self, wall: datetime) -> tuple[timedelta, timedelta]:
        """Return the offsets of the zone when the wall clock shows a time first, and when it shows it again.

        If it skips that time: the offsets before and after the gap.
        """
        times = [wall.replace(tzinfo=self.zone, fold=fold).utcoffset() or timedelta(0) for fold in (0, 1)]
        return times[0], times[1]

    def _instants(self, walls: Iterator[datetime], *, reverse: bool) -> Iterator[int]:
        """Yield the instants of wall times, in order, each once."""
        last: int | None = None
        judged = ((wall, *self._offsets(wall)) for wall in walls)
        for is_repeated, group in groupby(judged, key=lambda item: item[1] > item[2]):
            if is_repeated:  # as many wall times as such a repetition has
                instants = iter(sorted({at for item in group for at in self._both(*item)}, reverse=reverse))
            else:
                instants = (at for item in group for at in self._only(*item))
            for at in instants:
                if at != last:
                    last = at
                    yield at

    def _both(self, wall: datetime, first: timedelta, second: timedelta) -> list[int]:
        return [_seconds(wall - first), _seconds(wall - second)][: 2 if self.is_hourly else 1]

    def _only(self, wall: datetime, before: timedelta, after: timedelta) -> list[int]:
        if before == after:
            return [_seconds(wall - before)]
        return [] if self.is_hourly else [self._end_of_gap(wall, before, after)]

    def _end_of_gap(self, wall: datetime, before: timedelta, after: timedelta) -> int:
        """Return the first instant at which the offset is no longer that of before the gap in which `wall` is."""
        moments = range(_seconds(wall - after), _seconds(wall - before) + 1)

        def is_over(at: int) -> int:
            return int(datetime.fromtimestamp(at, self.zone).utcoffset() != before)

        return moments[bisect_left(moments, 1, key=is_over)]


def _seconds(utc: datetime) -> int:
    return int(utc.replace(tzinfo=UTC).timestamp())


def rule_of(task: PeriodicTask) -> Rule:
    """Return when a periodic task fires. Raises `Refused` if that is never, or the time zone is unknown here."""
    return Interval(task.every) if task.every is not None else _cron(task.cron or "", task.tz or "UTC")


@lru_cache(maxsize=10_000)
def _cron(expression: str, tz: str) -> Cron:
    rule = Cron(expression, _zone(tz))
    try:
        from cronsim import CronSimError
    except ImportError:
        raise _refused("cron", "needs the library cronsim: pip install 'leasekit[server]', or give `every`") from None
    if len(expression.split()) != 5:
        raise _refused("cron", f"has five fields, minute hour day month weekday, got {expression!r}")
    try:
        if next(rule.after(_SOME_DAY), None) is None:
            raise _refused("cron", f"names days that do not exist, got {expression!r}")
    except CronSimError as error:
        raise _refused("cron", f"is no cron expression: {error} in {expression!r}") from None
    return rule


def _zone(tz: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(tz)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise _refused("tz", f"is no time zone that the service knows, as in Europe/Berlin: got {tz!r}") from None


def _refused(field: str, detail: str) -> Refused:
    return Refused(f"{field} {detail}", errors=[{"field": field, "detail": detail}])


# Names and jitter -----------------------------------------------------------------------------------------------


def firing_id(name: str, instant: float) -> str:
    """Return the id of the task of a firing; two nodes that make the same firing make the same task."""
    at = datetime.fromtimestamp(round(instant, 3), UTC)
    part = f".{at.microsecond // 1000:03}" if at.microsecond else ""
    return f"{name}@{at:%Y-%m-%dT%H:%M:%S}{part}Z"


def delay(name: str, instant: int, jitter: float) -> float:
    """Return by how many seconds a firing comes later, less than `jitter`: the same on every node, and ever again."""
    if not jitter:
        return 0.0
    digest = blake2b(f"{name}@{instant}".encode(), digest_size=6).digest()
    return round(jitter * int.from_bytes(digest) / 2**48, 3)


# What is due ----------------------------------------------------------------------------------------------------


class Due(NamedTuple):
    """The firings that have come since the last look."""

    made: Sequence[int]
    """The nominal instants of those to be made, in order."""
    missed: Sequence[int]
    """Of those that were too late; of very many, only the latest."""
    since: int | None
    """The last one of both; None: there is none."""


def due(name: str, task: PeriodicTask, *, since: float, now: float) -> Due:
    """Judge the firings after the nominal instant `since` whose time has come by `now`."""
    until = takewhile(lambda at: at > since, rule_of(task).until(now))
    come = list(takewhile(lambda at: _time(name, task, at) <= now, reversed(list(islice(until, _MOST)))))
    lateness = {at: now - _time(name, task, at) for at in come}
    late = [at for at in come if lateness[at] > LATE]
    caught_up = late[max(0, len(late) - max(0, task.catch_up - (len(come) - len(late)))) :]
    deadline = task.start_deadline or math.inf
    lost = {at for at in late if at not in caught_up} | {at for at in come if lateness[at] > deadline}
    return Due([at for at in come if at not in lost], sorted(lost), come[-1] if come else None)


def _time(name: str, task: PeriodicTask, instant: int) -> float:
    """Return when the firing of a nominal instant is made: later by its jitter."""
    return instant + delay(name, instant, task.jitter)


def next_times(name: str, task: PeriodicTask, *, since: float, count: int) -> list[float]:
    """Return when the first `count` firings after the nominal instant `since` are made."""
    return [_time(name, task, at) for at in islice(rule_of(task).after(since), count)]

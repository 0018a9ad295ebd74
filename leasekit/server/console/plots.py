"""Small plots: how many runs ended in each minute, as paths of SVG; and the numbers that go with them.

Rule 1: this module is arithmetic; the present minute is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from leasekit.server.history import Counts, quantile

HEIGHT = 24
"""The height of a plot, in which its greatest value is as high; each value is one wide."""
_LATELY = 15  # minutes that a latency is of
_RATE = 5  # minutes that a rate is of, and the one under way, which is not complete, is not among them


class Plot(NamedTuple):
    """The runs that ended: those that succeeded, on top of those that did not."""

    good: str
    bad: str
    length: int
    most: int
    """The greatest value."""
    says: str
    """The plot in words."""


class Recent(NamedTuple):
    """The numbers of the last minutes."""

    rate: float
    """Runs that ended in a minute, of the last five."""
    start_p95: float | None
    """Seconds from due to the begin of the handler, of the last quarter of an hour."""
    lost: int
    """Leases that were lost in the last hour."""
    failed: int
    """Runs that failed in the last hour."""


_NOTHING = Counts()


def hour(minutes: Mapping[int, Counts], now: int) -> Plot:
    """Plot the last hour, in minutes."""
    return _plot([minutes.get(at, _NOTHING) for at in range(now - 59, now + 1)], "the last hour", "a minute")


def day(minutes: Mapping[int, Counts], now: int) -> Plot:
    """Plot the last day, in quarters of an hour."""
    quarters = [
        sum((minutes[at] for at in range(begin, begin + 15) if at in minutes), _NOTHING)
        for begin in range(now - 1439, now + 1, 15)
    ]
    return _plot(quarters, "the last day", "a quarter of an hour")


def recent(minutes: Mapping[int, Counts], now: int) -> Recent:
    """Return the numbers of the last minutes."""
    lately = _sum(minutes, range(now - _LATELY, now + 1))
    whole = _sum(minutes, range(now - _RATE, now))
    last_hour = _sum(minutes, range(now - 59, now + 1))
    return Recent(whole.ended / _RATE, quantile(lately.starts, 0.95), last_hour.lost, last_hour.failed)


def together(kinds: Iterable[Mapping[int, Counts]]) -> Mapping[int, Counts]:
    """Add the minutes of several kinds."""
    sums: dict[int, Counts] = {}
    for minutes in kinds:
        for at, counts in minutes.items():
            sums[at] = sums.get(at, _NOTHING) + counts
    return sums


def _sum(minutes: Mapping[int, Counts], at: Iterable[int]) -> Counts:
    return sum((minutes[each] for each in at if each in minutes), _NOTHING)


def _plot(values: Sequence[Counts], of: str, unit: str) -> Plot:
    ended, bad = [each.ended for each in values], [each.failed + each.lost for each in values]
    most = max(ended, default=0)
    says = f"{sum(ended):,} runs ended in {of}, {sum(bad):,} of them lost or failed; at most {most:,} in {unit}"
    return Plot(_bars(ended, most), _bars(bad, most), len(values), most, says)


def _bars(values: Sequence[int], most: int) -> str:
    """Return a path with a bar for each value that is not zero."""
    if not most:
        return ""
    heights = [(x, max(round(HEIGHT * value / most, 1), 0.8)) for x, value in enumerate(values) if value]
    return "".join(f"M{x + 0.1:g} {HEIGHT}v-{height:g}h.8v{height:g}z" for x, height in heights)

"""The life of a task, drawn to scale: a row for each run, and bars for what happened in it.

Rule 1: this module is arithmetic; `now` is an argument.
Rule 2: positions are percentages of the width, so that the picture fits every screen.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from leasekit._lifecycle.states import LEASED, REDRIVEN, RESCHEDULED
from leasekit.server.console.rendering import error_line, is_null, span
from leasekit.task import HistoryEntry, TaskInfo

_THINNEST = 0.4  # percent of the width: what is shorter can still be seen
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
          3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800, 2_592_000, 31_536_000)  # fmt: skip
_TICKS = 6
_SILENT = frozenset({"expired", "crash"})
_CLOSE = 0.15  # of the whole life: if all runs together are shorter, they get a picture of their own


class Bar(NamedTuple):
    """A part of a row."""

    x: float
    width: float
    tone: str
    title: str


class Tick(NamedTuple):
    """A mark of the scale, by its distance from the begin."""

    x: float
    label: str


class Row(NamedTuple):
    """A wait, a run, or an act of an operator."""

    name: str
    outcome: str
    bars: Sequence[Bar]
    took: str
    worker: str | None
    why: str
    error: Any


class Picture(NamedTuple):
    """Rows on one scale."""

    begins_at: datetime
    ends_at: datetime
    ticks: Sequence[Tick]
    rows: Sequence[Row]


class Life(NamedTuple):
    """The life of a task."""

    picture: Picture
    is_close_up: bool
    """Whether the picture begins with the first claim, because the wait before was so long."""
    waited: float
    """Seconds from due, or scheduled, to the first claim."""
    lost: str | None
    """Why the last lease that was lost, was lost: a sentence."""
    is_cut: bool
    """Whether earlier runs are no longer told."""


class _Scale:
    def __init__(self, begins_at: datetime, ends_at: datetime) -> None:
        self.begins_at, self.ends_at = begins_at, ends_at
        self.whole = max((ends_at - begins_at).total_seconds(), 1e-6)

    def x(self, at: datetime) -> float:
        return min(100.0, max(0.0, 100 * (at - self.begins_at).total_seconds() / self.whole))

    def bar(self, start: datetime, end: datetime, tone: str, what: str) -> Bar:
        x = min(self.x(start), 100 - _THINNEST)
        width = max(self.x(end) - x, _THINNEST)
        return Bar(round(x, 3), round(width, 3), tone, f"{what} {span((end - start).total_seconds())}")

    def ticks(self) -> list[Tick]:
        step = next((each for each in _STEPS if self.whole / each <= _TICKS), _STEPS[-1])
        return [Tick(round(100 * i * step / self.whole, 3), span(i * step)) for i in range(int(self.whole / step) + 1)]


def drawn(task: TaskInfo, now: datetime) -> Life:
    """Draw the life of a task up to its end, or to now."""
    runs = [_Run.ended(entry) for entry in task.history]
    if task.status in LEASED and task.claimed_at is not None:
        runs.append(_Run.current(task, now))
    begins_at = task.scheduled_at or min((run.begins_at for run in runs), default=task.at)
    ends_at = max([task.ended_at or now, *(run.at for run in runs)])
    if not runs and not task.status.ended and task.at > ends_at:  # its due time is a part of the picture
        ends_at = task.at
    first = min((run.begins_at for run in runs), default=ends_at)
    is_close_up = bool(runs) and (ends_at - first) < (ends_at - begins_at) * _CLOSE
    scale = _Scale(first if is_close_up else begins_at, ends_at)
    rows = [_wait(task, scale, begins_at, first)] if not is_close_up else []
    rows += [run.row(scale) for run in runs]
    lost = next((run for run in reversed(runs) if run.outcome in _SILENT), None)
    return Life(
        Picture(scale.begins_at, ends_at, scale.ticks(), rows),
        is_close_up,
        max(0.0, (first - begins_at).total_seconds()),
        None if lost is None else lost.why or _told(lost),
        bool(runs) and runs[0].fence > 1 and len(runs) >= 100,
    )


def _wait(task: TaskInfo, scale: _Scale, begins_at: datetime, until: datetime) -> Row:
    """Return the row before the first claim: not due yet, then due."""
    due = min(max(task.at, begins_at), until) if not task.history else begins_at
    bars = [scale.bar(begins_at, due, "later", "not due yet for")] if due > begins_at else []
    if until > due:
        bars.append(scale.bar(due, until, "due", "waited for a claim for"))
    return Row("scheduled", "", bars, span((until - begins_at).total_seconds()), None, "", None)


class _Run(NamedTuple):
    """A run, or an act of an operator, which has no claim."""

    fence: int
    attempt: int
    outcome: str
    at: datetime
    worker: str | None
    claimed_at: datetime | None
    started_at: datetime | None
    heartbeat_at: datetime | None
    error: Any
    is_over: bool = True

    @classmethod
    def ended(cls, entry: HistoryEntry) -> "_Run":
        return cls(
            entry.fence, entry.attempt, entry.outcome, entry.at, entry.worker, entry.claimed_at, entry.started_at,
            entry.heartbeat_at, None if is_null(entry.error) else entry.error,
        )  # fmt: skip

    @classmethod
    def current(cls, task: TaskInfo, now: datetime) -> "_Run":
        return cls(
            task.fence, task.attempt, task.status, now, task.worker, task.claimed_at, task.started_at,
            task.heartbeat_at, None, is_over=False,
        )  # fmt: skip

    @property
    def begins_at(self) -> datetime:
        return self.claimed_at or self.at

    @property
    def why(self) -> str:
        return "" if self.error is None else error_line(self.error)

    def row(self, scale: _Scale) -> Row:
        bars = list(self._bars(scale))
        took = "" if self.claimed_at is None else span((self.at - self.claimed_at).total_seconds())
        return Row(self._name, self.outcome, bars, took, self.worker, self.why, self.error)

    @property
    def _name(self) -> str:
        if self.outcome in (REDRIVEN, RESCHEDULED):
            return ""
        return f"run {self.fence}, attempt {self.attempt}"

    def _bars(self, scale: _Scale) -> Iterable[Bar]:
        if self.claimed_at is None:
            yield scale.bar(self.at, self.at, "act", self.outcome)
            return
        began = self.started_at or self.at
        if began > self.claimed_at:
            yield scale.bar(self.claimed_at, began, "held", "claimed, not begun, for")
        if self.started_at is None:
            return
        heard = self._heard_until()
        if heard > began:
            yield scale.bar(began, heard, self._tone, "ran for")
        if self.at > heard:
            yield scale.bar(heard, self.at, "silent", "no heartbeat for")

    def _heard_until(self) -> datetime:
        """Return until when the run was heard of: a run that settled was, up to its end."""
        if self.outcome in _SILENT or not self.is_over:
            return min(self.at, self.heartbeat_at or self.started_at or self.at)
        return self.at

    @property
    def _tone(self) -> str:
        tones = {"success": "good", "retry": "retry", "fatal": "bad", "expired": "bad", "crash": "bad"}
        return tones.get(self.outcome, "run")


def _told(run: _Run) -> str:
    who = f"worker {run.worker!r}" if run.worker else "its worker"
    return f"{who} died in run {run.fence}" if run.outcome == "crash" else f"the lease of {who} expired"

"""Loss report: say in one sentence why a lease was lost, from what is known of the lease. Sans-IO."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple


class Note(NamedTuple):
    """Something that happened to the whole process, noticed at `at`. `seconds`: its length, or the clock's step."""

    what: Literal["stopped", "starved", "blocked", "suspended", "jumped"]
    at: float
    seconds: float


class Try(NamedTuple):
    """A heartbeat of a lease since the last grant, and its outcome."""

    asked_at: float
    verdict: str  # a verdict's word, or *unanswered*
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """The facts known about a lease that was lost at `now`."""

    reason: str  # in one word
    is_gone: bool  # the service reported the lease as gone
    now: float
    granted_at: float  # when its last acknowledged heartbeat, or its claim, was sent
    lost_at: float  # when trust in it ended
    wall: float  # add this to an instant to get seconds since the epoch
    strikes: int
    has_beaten: bool  # an acknowledged heartbeat of it is known
    may_begin: bool = True  # False: its task waits for a first acknowledged heartbeat
    tries: Sequence[Try]  # since the last grant
    others: str | None  # why heartbeats of other leases failed since
    notes: Sequence[Note]
    crowd: tuple[int, int] | None  # leases held, and the number that a cycle can renew


_LITTLE = 10  # a stall shorter than 1/10 of the silence is not why a lease was lost

_GONE = {  # answers of a service about a lease that is gone, and their meaning
    "taken": "it was taken: another worker claimed it after this lease had expired",
    "expired": "it had expired: no beat came within its ttl",
    "overdue": "its max_runtime is over: give such tasks more, or less to do",
    "settled": "it was settled: its end has been reported before",
    "cancelled": "it was cancelled",
    "unknown": "the task is unknown: it was deleted, or is in another store",
}
_TOO_LATE = "its time, counted from the request that received it, was over before its block began"
_OUR_FAULT = ("taken", "expired")  # these may have a cause on this side

_STALLS = {
    "stopped": "the process was stopped for {:.0f} s (by a signal, or for want of a processor)",
    "starved": "other code of this process held the interpreter (the GIL) for {:.0f} s",
    "blocked": "a hook or the adapter blocked the driver's event loop for {:.0f} s",
    "suspended": "the machine was suspended for {:.0f} s",
}


def explain(facts: LossFacts) -> str:
    """Return why the lease was lost, without a full stop."""
    if facts.is_gone and facts.reason in _GONE:
        cause = _cause(facts) if facts.reason in _OUR_FAULT else None
        is_late = facts.reason == "expired" and not facts.may_begin
        return (_TOO_LATE if is_late else f"the service said that {_GONE[facts.reason]}") + (
            f"; {cause}" if cause else ""
        )
    if facts.is_gone or facts.reason not in ("expired", "strikes"):
        return f"the service answered that the lease is gone: {facts.reason}"
    why = _cause(facts) or f"no beat was acknowledged for {facts.now - facts.granted_at:.1f} s"
    if not facts.may_begin:  # it was never trusted
        return why
    return f"{why}; trust ended at {time.strftime('%H:%M:%S UTC', time.gmtime(facts.lost_at + facts.wall))}"


def _cause(facts: LossFacts) -> str | None:
    """Return in words what kept the lease's heartbeats from being acknowledged; None if nothing is known."""
    silence = facts.now - facts.granted_at
    stall = _worst(facts.notes, silence)
    if stall is not None and stall.seconds >= silence / 2:
        return _silence_text(facts, stall)
    if failed := _failures_text(facts):
        left = f"the last acknowledged one left {silence:.0f} s ago"
        since = left if facts.has_beaten else f"it was granted {silence:.0f} s ago"
        return f"{failed}, {since}" + (f"; besides, {_stall_text(stall)}" if stall is not None else "")
    if stall is not None:
        return _silence_text(facts, stall)
    if facts.crowd is not None:
        held, capacity = facts.crowd
        return (
            f"no beat was sent for {silence:.0f} s because {held:,} leases were held and {capacity:,} can beat in a "
            "cycle: raise rate, batch or cycle, or hold fewer"
        )
    if facts.others is not None:
        return f"no beat was sent for {silence:.0f} s while those of other leases failed ({facts.others})"
    return None


def _worst(notes: Sequence[Note], silence: float) -> Note | None:
    """Return the worst stall of the process, with stalls of one kind added up; None if it was short."""
    total: dict[str, Note] = {}
    for note in notes:
        if note.what in _STALLS:
            before = total.get(note.what)
            total[note.what] = note if before is None else note._replace(seconds=before.seconds + note.seconds)
    worst = max(total.values(), key=lambda note: note.seconds, default=None)
    return worst if worst is not None and worst.seconds >= silence / _LITTLE else None


def _silence_text(facts: LossFacts, stall: Note) -> str:
    sent = [facts.granted_at, *(one.asked_at for one in facts.tries), facts.now]
    gap = max(after - before for before, after in pairwise(sent))
    return f"no beat was sent for {gap:.0f} s because {_stall_text(stall)}"


def _stall_text(stall: Note) -> str:
    return _STALLS[stall.what].format(stall.seconds)


def _failures_text(facts: LossFacts) -> str | None:
    """Return in words how the lease's heartbeats failed since the last acknowledged one; None if none did."""
    parts: list[str] = []
    for verdict, words in (("unanswered", "was not answered"), ("failed", "failed"), ("throttled", "was throttled")):
        tries = [one for one in facts.tries if one.verdict == verdict]
        if not tries:
            continue
        count = len(tries)
        if verdict == "unanswered" and count == len(facts.tries):
            count = max(count, facts.strikes)  # the first of many may no longer be recorded
        what = f"1 beat {words}" if count == 1 else f"{count} beats in a row {words.replace('was', 'were')}"
        reason = next((one.reason for one in reversed(tries) if one.reason), None)
        parts.append(what + (f" ({reason})" if reason else ""))
    return ", ".join(parts) or None

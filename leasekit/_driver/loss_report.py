"""Why a lease was lost, in one sentence: what is known of it, and the words for it. Sans-IO."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

__all__ = ["LossFacts", "Note", "Try", "explain"]


class Note(NamedTuple):
    """Something that befell the whole process, noticed at `at`: for how long, or of a clock by how much."""

    what: Literal["stopped", "starved", "blocked", "suspended", "jumped"]
    at: float
    seconds: float


class Try(NamedTuple):
    """A beat of a lease since its last grant, and what came of it."""

    asked_at: float
    verdict: str  # a verdict's word, or *unanswered*
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What is known of a lease that was lost at `now`."""

    reason: str  # in one word
    said: str  # what there is to say if nothing more is known
    is_gone: bool  # the service said so
    now: float
    granted_at: float  # when its last acknowledged beat left, or when it was claimed
    lost_at: float  # when it cannot be believed in any more
    wall: float  # what has to be added to a moment to have it since the epoch
    strikes: int
    has_beaten: bool  # an acknowledged beat of it is known
    tries: Sequence[Try]  # since the last grant
    others: str | None  # why the beats of others failed since
    notes: Sequence[Note]
    crowd: tuple[int, int] | None  # so many leases are held, so many can beat in a cycle


_LITTLE = 10  # this part of the time without a beat, or less, is not why a lease was lost

_GONE = {  # what a service answers of a lease that is gone, and what that means
    "taken": "it was taken: another worker claimed it after this lease had expired",
    "expired": "it had expired: no beat came within its ttl",
    "settled": "it was settled: its end has been reported before",
    "cancelled": "it was cancelled: nobody wants it any more",
    "unknown": "it knows nothing of it: it was deleted, or is in another store",
}
_OUR_FAULT = ("taken", "expired")  # these may have a cause on this side

_STALLS = {
    "stopped": "the process was stopped for {:.0f} s (by a signal, or for want of a processor)",
    "starved": "other code of this process held the interpreter (the GIL) for {:.0f} s",
    "blocked": "a hook or the adapter blocked the driver's event loop for {:.0f} s",
    "suspended": "the machine was suspended for {:.0f} s",
}


def explain(facts: LossFacts) -> str:
    """Why it was lost, without a full stop."""
    if facts.is_gone and facts.reason in _GONE:
        cause = _cause(facts) if facts.reason in _OUR_FAULT else None
        return f"the service said that {_GONE[facts.reason]}" + (f"; {cause}" if cause else "")
    if facts.is_gone or facts.reason not in ("expired", "strikes"):
        return facts.said
    why = _cause(facts) or f"no beat was acknowledged for {facts.now - facts.granted_at:.1f} s"
    return f"{why}; trust ended at {_clock(facts.lost_at + facts.wall)}"


def _cause(facts: LossFacts) -> str | None:
    """What kept its beats from being acknowledged; None where nothing is known."""
    silence = facts.now - facts.granted_at
    stall = _worst(facts.notes, silence)
    if stall is not None and stall.seconds >= silence / 2:
        return _stalled(facts, stall)
    if failed := _failed(facts):
        left = f"the last acknowledged one left {silence:.0f} s ago"
        since = left if facts.has_beaten else f"it was granted {silence:.0f} s ago"
        return f"{failed}, {since}" + (f"; besides, {_phrase(stall)}" if stall is not None else "")
    if stall is not None:
        return _stalled(facts, stall)
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
    """The worst that befell the process, several of a kind together; None where that was little."""
    total: dict[str, Note] = {}
    for note in notes:
        if note.what in _STALLS:
            before = total.get(note.what)
            total[note.what] = note if before is None else note._replace(seconds=before.seconds + note.seconds)
    worst = max(total.values(), key=lambda note: note.seconds, default=None)
    return worst if worst is not None and worst.seconds >= silence / _LITTLE else None


def _stalled(facts: LossFacts, stall: Note) -> str:
    sent = [facts.granted_at, *(one.asked_at for one in facts.tries), facts.now]
    gap = max(after - before for before, after in pairwise(sent))
    return f"no beat was sent for {gap:.0f} s because {_phrase(stall)}"


def _phrase(stall: Note) -> str:
    return _STALLS[stall.what].format(stall.seconds)


def _failed(facts: LossFacts) -> str | None:
    """What became of its beats since the last that was acknowledged."""
    parts: list[str] = []
    for verdict, words in (("unanswered", "not answered"), ("failed", "refused"), ("throttled", "throttled")):
        tries = [one for one in facts.tries if one.verdict == verdict]
        if not tries:
            continue
        count = len(tries)
        if verdict == "unanswered" and count == len(facts.tries):
            count = max(count, facts.strikes)  # of many, the first may be forgotten
        what = "1 beat was" if count == 1 else f"{count} beats in a row were"
        reason = next((one.reason for one in reversed(tries) if one.reason), None)
        parts.append(f"{what} {words}" + (f" ({reason})" if reason else ""))
    return ", ".join(parts) or None


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))

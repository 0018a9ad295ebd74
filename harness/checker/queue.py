"""The law of a queue (as in Jepsen): what comes out went in, and what went in comes out once everything is drained."""

from collections.abc import Iterator

from harness.checker.index import Life, Lives
from harness.checker.rules import Violation

__all__ = ["queue"]

_WITH_SUCCESSORS = frozenset({"success", "fatal"})


def queue(lives: Lives) -> list[Violation]:
    """What came out of nowhere, and what did not come out."""
    return [*_out_of_nowhere(lives), *_lost(lives)]


def _out_of_nowhere(lives: Lives) -> Iterator[Violation]:
    """Tasks that nobody scheduled are successors of others: no more of them than were asked for."""
    nobodys = [life for life in lives.tasks.values() if not life.asked and (life.known or life.final is not None)]
    asked = {
        (one.task, one.fence, one.digest): one.then
        for life in lives.tasks.values()
        for lease in life.leases.values()
        for one in lease.settle_asked
        if one.outcome in _WITH_SUCCESSORS
    }
    if len(nobodys) > sum(asked.values()):
        events = [lease.grant for life in nobodys for lease in life.known[:1]]
        names = ", ".join(life.task for life in nobodys[:3])
        why = f"{len(nobodys)} tasks were scheduled by nobody ({names} …), {sum(asked.values())} can be successors"
        yield Violation(rule="queue", why=why, events=events)


def _lost(lives: Lives) -> Iterator[Violation]:
    """After a full drain all that was promised is there: tasks, and successors of settlements that were accepted."""
    if lives.over_at is None or not any(life.final is not None for life in lives.tasks.values()):
        return
    promised = {
        (one.task, one.fence): one.then
        for life in lives.tasks.values()
        for lease in life.leases.values()
        for one in lease.settle_answered
        if one.verdict == "settled" and one.outcome in _WITH_SUCCESSORS
    }
    there = sum(life.final is not None and not life.asked for life in lives.tasks.values())
    if there < sum(promised.values()):
        why = f"{sum(promised.values())} successors were promised, {there} are there"
        yield Violation(rule="queue", why=why)
    for life in lives.tasks.values():
        if life.final is not None and life.final.status == "success" and not _was_run(life):
            why = "it stands as a success, and nobody reported one"
            yield Violation(rule="queue", task=life.task, why=why, events=[life.final])


def _was_run(life: Life) -> bool:
    return any(ask.outcome == "success" for lease in life.leases.values() for ask in lease.settle_asked)

"""The law of a queue, as in Jepsen: a task that comes out went in, and after a drain each that went in has come out."""

from collections.abc import Iterator

from harness.checker.index import Life, Lives
from harness.checker.rules import Violation

_WITH_SUCCESSORS = frozenset({"success", "fatal"})


def queue(lives: Lives) -> list[Violation]:
    """Find tasks that nothing scheduled, and promised tasks that are missing."""
    return [*_out_of_nowhere(lives), *_lost(lives)]


def _unasked(lives: Lives) -> list[Life]:
    """The tasks that no client has scheduled, without the firings of periodic tasks."""
    firings = tuple(f"{event.name}@" for event in lives.periodics)
    return [life for life in lives.tasks.values() if not life.asked and not (firings and life.task.startswith(firings))]


def _out_of_nowhere(lives: Lives) -> Iterator[Violation]:
    """Tasks without a schedule are successors: there are at most as many as the settlements asked for."""
    unasked = [life for life in _unasked(lives) if life.known or life.final is not None]
    successors = {
        (ask.task, ask.fence, ask.digest): ask.then
        for life in lives.tasks.values()
        for lease in life.leases.values()
        for ask in lease.settle_asked
        if ask.outcome in _WITH_SUCCESSORS
    }
    if len(unasked) > sum(successors.values()):
        events = [lease.grant for life in unasked for lease in life.known[:1]]
        names = ", ".join(life.task for life in unasked[:3])
        why = f"{len(unasked)} tasks have no schedule ({names} …), {sum(successors.values())} can be successors"
        yield Violation(rule="queue", why=why, events=events)


def _lost(lives: Lives) -> Iterator[Violation]:
    """After a full drain the successors of all accepted settlements exist, and each success was reported."""
    if lives.over_at is None or not any(life.final is not None for life in lives.tasks.values()):
        return
    promised = {
        (answer.task, answer.fence): answer.then
        for life in lives.tasks.values()
        for lease in life.leases.values()
        for answer in lease.settle_answered
        if answer.verdict == "settled" and answer.outcome in _WITH_SUCCESSORS
    }
    count = sum(life.final is not None for life in _unasked(lives))
    if count < sum(promised.values()):
        why = f"{sum(promised.values())} successors were promised, {count} exist"
        yield Violation(rule="queue", why=why)
    for life in lives.tasks.values():
        if (
            life.final is not None
            and life.final.status == "success"
            and not any(ask.outcome == "success" for lease in life.leases.values() for ask in lease.settle_asked)
        ):
            why = "its final status is success, which no settlement reported"
            yield Violation(rule="queue", task=life.task, why=why, events=[life.final])

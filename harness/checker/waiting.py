"""The rules of what a task waits for, A7-A10: other tasks, a new time, its firing, and not for too long."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise

from harness import history as log
from harness.checker.index import Life, Lives
from harness.checker.rules import Rules, Violation

_ROUNDED = 1e-3  # seconds: instants are floats


def waiting(lives: Lives, rules: Rules) -> list[Violation]:
    of_clients = (*_a7_after(lives), *_a8_rescheduled(lives), *_a10_late(lives, rules))
    return [*of_clients, *_a9_firings(lives, rules)]


def _a7_after(lives: Lives) -> Iterator[Violation]:
    """A task is granted once all that it runs after have succeeded, and dropped only if one of them did not."""
    if not lives.sees_store:
        return
    for task, life in lives.tasks.items():
        if not life.asked or not (after := life.asked[0].after) or len({asked.after for asked in life.asked}) != 1:
            continue
        ends = {name: _ends_of(lives, name) for name in after}
        for lease in life.known:
            early = [name for name, of in ends.items() if not _has_succeeded(of, by=lease.grant.at)]
            if early:
                why = f"it was granted before {early[0]} had succeeded"
                yield Violation(rule="A7", task=task, why=why, events=[life.asked[0], *ends[early[0]], lease.grant])
        has_failed = any(_has_failed(lives, name) for name in after)
        is_dropped = life.final is not None and life.final.status == "dropped"
        if is_dropped and not has_failed and life.asked[0].start_deadline is None:
            why = "it was dropped, and all that it was to run after have succeeded"
            yield Violation(
                rule="A7", task=task, why=why, events=[life.asked[0], *(end for of in ends.values() for end in of)]
            )


def _has_succeeded(ends: Sequence[log.Closed], *, by: float) -> bool:
    return any(end.status == "success" and end.at <= by for end in ends)


def _ends_of(lives: Lives, task: str) -> list[log.Closed]:
    leases = lives.of(task).leases.values() if task in lives.tasks else ()
    return sorted((end for lease in leases for end in lease.closed if end.ended), key=lambda end: end.at)


def _has_failed(lives: Lives, task: str) -> bool:
    final = lives.of(task).final if task in lives.tasks else None
    return final is None or final.status != "success" or any(end.status != "success" for end in _ends_of(lives, task))


def _a8_rescheduled(lives: Lives) -> Iterator[Violation]:
    """A task that was rescheduled is not granted before its new time, unless it was rescheduled again."""
    for task, life in lives.tasks.items():
        for answer in life.reschedule_answered:
            others = [ask.at for ask in life.reschedule_asked if ask.at != answer.asked_at]
            for grant in (issued for lease in life.known for issued in lease.issued):
                is_early = grant.by_store is not None and grant.by_store < answer.due_by_store - _ROUNDED
                is_later = any(at <= grant.at for at in others)
                if grant.at > answer.at and is_early and not is_later and not _ran_between(life, answer.at, grant.at):
                    why = f"it was granted {answer.due_by_store - (grant.by_store or 0):g} s before its new due time"
                    yield Violation(rule="A8", task=task, why=why, events=[answer, grant])


def _ran_between(life: Life, since: float, until: float) -> bool:
    """Whether another wait of the task began in between, at the end of a run, a late result too, or by a redrive."""
    ends = (end.at for lease in life.leases.values() for end in lease.closed)
    return any(since < at <= until for at in (*ends, *(redrive.at for redrive in life.redriven)))


_FIRING = re.compile(r"(.+)@(\d{4}-\d\d-\d\dT[\d:.]+Z)")


def _a9_firings(lives: Lives, rules: Rules) -> Iterator[Violation]:
    """A periodic task fires at each of its instants, once: its tasks are one interval apart, and as many as fit."""
    for begun in lives.periodics:
        end = next((event for event in lives.periodics if event.name == begun.name and event.at > begun.at), None)
        if not begun.every or end is None:
            continue
        found = [_FIRING.fullmatch(task) for task, life in lives.tasks.items() if life.final is not None]
        made = sorted(datetime.fromisoformat(one[2]).timestamp() for one in found if one and one[1] == begun.name)
        for before, after in pairwise(made):
            if after - before != begun.every:
                why = f"it fired at {before:.0f}, and next at {after:.0f}: it fires each {begun.every} s"
                yield Violation(rule="A9", task=begun.name, why=why, events=[begun])
        least = (end.at - begun.at) / begun.every - 2
        if rules.due_slack is not None and len(made) < least:
            why = f"it fired {len(made)} times, and had time for {least:.0f}"
            yield Violation(rule="A9", task=begun.name, why=why, events=[begun, end])


def _a10_late(lives: Lives, rules: Rules) -> Iterator[Violation]:
    """A task is not granted for the first time after its start deadline, and is dropped then if it has not begun."""
    for task, life in lives.tasks.items() if rules.due_slack is not None else ():
        asked = life.asked[0] if life.asked else None
        if asked is None or asked.start_deadline is None or life.reschedule_asked or life.redriven:
            continue
        if not (created := [answer for answer in life.acknowledged if answer.created]):
            continue
        by = max(asked.due_at or 0.0, created[0].at) + asked.start_deadline + (rules.due_slack or 0.0)
        late = [grant for lease in life.known[:1] for grant in lease.issued if grant.at > by]
        if late:
            yield Violation(rule="A10", task=task, why="it was granted after its start deadline", events=[asked, *late])

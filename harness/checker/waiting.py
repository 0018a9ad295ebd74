"""The rules of what a task waits for: other tasks, a new time, its firing, and not for too long (A7-A10); and of acts
on what waits: bulk acts (A12), and submissions that replace others (A13).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise

from harness import history as log
from harness.checker.index import Lease, Life, Lives
from harness.checker.rules import Rules, Violation

_ROUNDED = 1e-3  # seconds: instants are floats


def waiting(lives: Lives, rules: Rules) -> list[Violation]:
    of_clients = (*_a7_after(lives), *_a8_rescheduled(lives), *_a10_late(lives, rules))
    return [*of_clients, *_a9_firings(lives, rules), *_a12_bulk(lives), *_a12_untouched(lives), *_a13_replaced(lives)]


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
    """A task is not granted before the time of its last reschedule, and none is answered that was not written.

    A reschedule counts from its commit. Its answer may be that to a repeat, and come after the next change.
    """
    if not lives.sees_store:
        return
    for task, life in lives.tasks.items():
        asks = {ask.request: ask for ask in life.reschedule_asked if ask.request}
        for grant in (issued for lease in life.known for issued in lease.issued):
            last = next((change for change in reversed(life.rescheduled) if change.at <= grant.at), None)
            if last is None or (ask := asks.get(last.request)) is None or _waits_anew(life, last.at, grant.at):
                continue
            early = (ask.due_by_store or 0.0) - lives.latest_by_store(last.at, grant)
            if early > _ROUNDED:
                why = f"it was granted {early:g} s before its new due time"
                yield Violation(rule="A8", task=task, why=why, events=[ask, last, grant])
        for answer in life.reschedule_answered:
            if not any(answer.asked_at <= change.at <= answer.at for change in life.rescheduled):
                why = "it was answered with a new due time, which was not written"
                yield Violation(rule="A8", task=task, why=why, events=[answer])


def _waits_anew(life: Life, since: float, until: float) -> bool:
    """Whether another wait of the task began in between: after a run, by a redrive or by a debounced submission."""
    ends = (end for lease in life.known for end in lease.closed)  # of a late result too; a reschedule's own is of none
    return any(since <= event.at <= until for event in (*ends, *life.redriven, *life.replaced))


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
    """A task that has not begun is not granted after its start deadline, and is dropped then."""
    for task, life in lives.tasks.items() if rules.due_slack is not None else ():
        asked = life.asked[0] if life.asked else None
        moves = life.reschedule_asked or life.redriven or life.replaced
        if asked is None or asked.start_deadline is None or moves:
            continue
        if not (created := [answer for answer in life.acknowledged if answer.created]):
            continue
        by = max(asked.due_at or 0.0, created[0].at) + asked.start_deadline + (rules.due_slack or 0.0)
        late = [grant for lease in _until_begun(life) for grant in lease.issued if grant.at > by]
        if late:
            yield Violation(rule="A10", task=task, why="it was granted after its start deadline", events=[asked, *late])


def _until_begun(life: Life) -> Iterator[Lease]:
    """Yield the leases of a task up to the first under which its handler has begun."""
    for lease in life.known:
        yield lease
        if lease.started or any(settled.outcome != "release" for settled in lease.settle_asked):
            return


def _a12_bulk(lives: Lives) -> Iterator[Violation]:
    """A bulk act changes all tasks that were there when its dry run began, unless they have begun or changed since."""
    for act in lives.bulk_answered:
        for task, life in lives.tasks.items():
            if not _is_counted(life, act):
                continue
            grant = next((lease.grant for lease in life.known if lease.grant.at > act.at), None)
            if grant is not None and act.act == "cancel":
                why = f"all of the kind {act.kind} were cancelled while it waited, and it was granted after that"
                yield Violation(rule="A12", task=task, why=why, events=[act, grant])
            elif grant is not None and _is_early(lives, grant, act) and not _is_moved_after(life, act, by=grant.at):
                why = f"all of the kind {act.kind} were rescheduled while it waited, and it was granted earlier"
                yield Violation(rule="A12", task=task, why=why, events=[act, grant])


def _is_counted(life: Life, act: log.BulkAnswered) -> bool:
    """Whether a task waited from before the dry run until after the act, and nothing else changed it meanwhile."""
    is_there = any(
        answer.created and answer.asked == life.task and answer.at < act.counted_from for answer in life.acknowledged
    )
    has_begun = any(lease.grant.at <= act.at for lease in life.known) or bool(life.redriven)
    is_changed = any(act.asked_at <= change.at <= act.at for change in life.replaced)
    is_changed |= any(ask.at <= act.at and ask.at != act.asked_at for ask in life.reschedule_asked)
    return is_there and life.asked[0].kind == act.kind and not has_begun and not is_changed


def _is_early(lives: Lives, grant: log.Issued | log.Granted, act: log.BulkAnswered) -> bool:
    due = act.due_by_store or 0.0
    return isinstance(grant, log.Issued) and lives.latest_by_store(act.asked_at, grant) < due - _ROUNDED


def _is_moved_after(life: Life, act: log.BulkAnswered, *, by: float) -> bool:
    return any(act.asked_at < change.at <= by for change in (*life.reschedule_asked, *life.replaced))


def _a12_untouched(lives: Lives) -> Iterator[Violation]:
    """A bulk act touches no task that was scheduled after its dry run: a task whose cancel or reschedule nobody asked
    for is neither cancelled nor rescheduled. A reschedule takes a fence.
    """
    for task, life in lives.tasks.items() if lives.bulk_asked else ():
        asks = [ask for lease in life.leases.values() for ask in lease.settle_asked if ask.outcome == "cancelled"]
        for end in (end for lease in life.leases.values() for end in lease.closed):
            is_free = not any(ask.at <= end.at for ask in (*life.cancel_asked, *asks))
            if end.status == "cancelled" and is_free and not end.reason:  # a gate says so
                yield Violation(rule="A12", task=task, why="it was cancelled, and nobody asked for that", events=[end])
        moves = (*life.reschedule_asked, *life.replaced, *life.redriven)
        for lease in life.known[:1] if lives.sees_store and not moves else ():
            if lease.fence > 1:
                why = "it was rescheduled, and nobody asked for that"
                yield Violation(rule="A12", task=task, why=why, events=[*life.asked[:1], lease.grant])


def _a13_replaced(lives: Lives) -> Iterator[Violation]:
    """A task has the payload of the last submission that replaced it, which was before its first run; and its due time,
    which was put off for no longer than the submission says.
    """
    asks = {asked.payload: asked for life in lives.tasks.values() for asked in life.asked if asked.debounce is not None}
    for task, life in lives.tasks.items():
        for why, event in _replaced_badly(lives, life, asks):
            yield Violation(rule="A13", task=task, why=why, events=[*life.asked[:1], *life.replaced[-2:], event])
        for answer in life.acknowledged if lives.sees_store else ():
            if answer.replaced and not _has_replaced(lives, life, answer):
                why = f"{answer.asked} was answered with it as replaced, and was not written"
                yield Violation(rule="A13", task=task, why=why, events=[answer])


def _replaced_badly(lives: Lives, life: Life, asks: Mapping[str, log.Asked]) -> Iterator[tuple[str, log.Event]]:
    grants = [issued for lease in life.known for issued in lease.issued]
    for change in life.replaced:
        if grants and grants[0].at < change.at:
            yield "its payload was replaced after it had begun", grants[0]
        allowed = asks[change.payload].debounce if change.payload in asks else None
        if allowed is not None and change.put_off > allowed + _ROUNDED:
            yield f"it was put off by {change.put_off:g} s, and {allowed:g} s are allowed", change
    if not life.asked or life.asked[0].debounce is None:
        return
    key = (life.asked[0].kind, life.asked[0].dedupe_key)
    # In the transaction that makes a task, others may replace it at once.
    of_key = {payload for payload, asked in asks.items() if (asked.kind, asked.dedupe_key) == key}
    expected = {life.replaced[-1].payload} if life.replaced else of_key
    for start in (start for lease in life.leases.values() for start in lease.started):
        if start.payload and start.payload not in expected:
            yield "it has run with another payload than that of the last submission", start
    for last in () if life.reschedule_asked or life.redriven else life.replaced[-1:]:
        if grants and lives.latest_by_store(last.at, grants[0]) < last.due_by_store - _ROUNDED:
            yield "it was granted before the due time of the last submission", grants[0]


def _has_replaced(lives: Lives, life: Life, answer: log.Acknowledged) -> bool:
    """Whether the store has written a payload meanwhile: the last of a transaction, or that of a new task."""
    since = lives.of(answer.asked).asked[0].at
    was_there = any(other.at < since for other in life.acknowledged)
    return not was_there or any(since <= change.at <= answer.at for change in life.replaced)

"""Backlog: what waits of each kind, found by the index of waiting tasks, for `/metrics`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from leasekit._lifecycle.states import WAITING
from leasekit.server.roles.following import AWAITING_AT
from leasekit.server.store import Lane, View

_MOST = 40_000
"""Tasks of each sort that are counted one by one, over all lanes: some ten milliseconds."""
_LEAST = 200
_BEFORE_AWAITING = AWAITING_AT - 1  # all other tasks that wait are due by then


class Backlog(NamedTuple):
    """The waiting tasks of a kind."""

    age: float = 0.0  # how long the oldest task has been due, in seconds; 0: no task is due
    due: int = 0
    later: int = 0
    keys: int = 0  # that have due tasks
    awaiting: int = 0  # tasks that wait for other tasks: they count as `later` too


def count_waiting(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return how many tasks of each kind wait, given the counts of all statuses."""
    return {kind: sum(of.get(status, 0) for status in WAITING) for kind, of in counts.items()}


def backlogs(view: View, waiting: Mapping[str, int], *, now: float) -> dict[str, Backlog]:
    """Return what waits of these kinds, given how many tasks of each wait.

    Tasks that are due are counted up to a bound, and so are those that are due later: one number follows from the
    other. If both are above the bound, each is at least what is returned: no store is too big to be looked at.
    """
    found = dict.fromkeys(waiting, Backlog())
    names = [*waiting, *view.routes(waiting)]
    full = view.full_keys(names, now=now, limit=_MOST)
    full_keys = Counter(lane[:2] for lane, _ in full if lane.due_at <= now)
    lanes = _first_of_each([*view.lanes(names), *(lane for lane, _ in full)])
    most = max(_LEAST, _MOST // max(1, len(lanes)))
    for lane in lanes:
        age, due, later, keys, awaiting = found[lane.kind]
        more_due, more_later = view.count_waiting(lane, now=now, most=most)
        if more_later:
            awaiting += view.count_waiting(lane, now=_BEFORE_AWAITING, most=most)[1]
        if lane.has_keys:
            keys += view.count_keys(lane, now=now, most=most) + full_keys[lane[:2]]
        found[lane.kind] = Backlog(max(age, now - lane.due_at), due + more_due, later + more_later, keys, awaiting)
    return {kind: _completed(backlog, waiting[kind], most) for kind, backlog in found.items()}


def _first_of_each(lanes: Iterable[Lane]) -> list[Lane]:
    """Return each lane once, with the earliest of its due times."""
    found: dict[tuple[int, str, bool], Lane] = {}
    for lane in lanes:
        of = (lane.priority, lane.name, lane.has_keys)
        found[of] = min(lane, found.get(of, lane))
    return list(found.values())


def _completed(backlog: Backlog, waiting: int, most: int) -> Backlog:
    if backlog.due < most:
        return backlog._replace(later=max(backlog.later, waiting - backlog.due))
    if backlog.later < most:
        return backlog._replace(due=max(backlog.due, waiting - backlog.later))
    return backlog

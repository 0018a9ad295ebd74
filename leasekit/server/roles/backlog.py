"""Backlog: what waits of each kind, found by the index of waiting tasks, for `/metrics`."""

from collections.abc import Mapping
from typing import NamedTuple

from leasekit.server.store import View

_MOST = 40_000
"""Tasks of each sort that are counted one by one, over all lanes: some ten milliseconds."""
_LEAST = 200


class Backlog(NamedTuple):
    """The waiting tasks of a kind."""

    age: float = 0.0  # how long the oldest task has been due, in seconds; 0: no task is due
    due: int = 0
    later: int = 0
    keys: int = 0  # that have due tasks


def backlogs(view: View, waiting: Mapping[str, int], *, now: float) -> dict[str, Backlog]:
    """Return what waits of these kinds, given how many tasks of each wait.

    Tasks that are due are counted up to a bound, and so are those that are due later: one number follows from the
    other. If both are above the bound, each is at least what is returned: no store is too big to be looked at.
    """
    found = dict.fromkeys(waiting, Backlog())
    lanes = view.lanes(waiting)
    most = max(_LEAST, _MOST // max(1, len(lanes)))
    for lane in lanes:
        age, due, later, keys = found[lane.kind]
        more_due, more_later = view.count_waiting(lane, now=now, most=most)
        keys += view.count_keys(lane, now=now, most=most) if lane.has_keys else 0
        found[lane.kind] = Backlog(max(age, now - lane.due_at), due + more_due, later + more_later, keys)
    return {kind: _completed(backlog, waiting[kind], most) for kind, backlog in found.items()}


def _completed(backlog: Backlog, waiting: int, most: int) -> Backlog:
    if backlog.due < most:
        return backlog._replace(later=max(backlog.later, waiting - backlog.due))
    if backlog.later < most:
        return backlog._replace(due=max(backlog.due, waiting - backlog.later))
    return backlog

"""Unmet requirements: due tasks that no known worker can have, because none claims their kind with the labels."""

import heapq
from collections.abc import Iterable, Mapping

from leasekit.named import PREFIXES
from leasekit.server.roles.backlog import count_waiting
from leasekit.server.store import View
from leasekit.server.store.routes import fits, kind_of, labels_of, requirements_of
from leasekit.task import WorkerInfo

_MOST = 1000
"""Kinds that are looked at, those of which the most tasks wait: some milliseconds."""


def unmet(
    view: View, counts: Mapping[str, Mapping[str, int]], workers: Iterable[WorkerInfo], *, now: float
) -> dict[str, list[dict[str, str]]]:
    """Return, by kind, the labels that due tasks require and no worker of that kind has; {}: there is no worker."""
    waits = {kind: count for kind, count in count_waiting(counts).items() if count and not kind.startswith(PREFIXES)}
    kinds = heapq.nlargest(_MOST, waits, key=lambda kind: (waits[kind], kind))
    names = [*kinds, *view.routes(kinds)] if kinds else []
    due = {lane.name for lane in view.lanes(names) if lane.due_at <= now} if names else ()
    drained = {row.worker for row in view.drains()} if due else ()
    known = _labels_by_kind(worker for worker in workers if worker.name not in drained)
    found: dict[str, list[dict[str, str]]] = {}
    for name in sorted(due):
        if not any(fits(name, labels) for labels in known.get(kind_of(name), ())):
            required, of_kind = requirements_of(name), found.setdefault(kind_of(name), [])
            if required not in of_kind:  # tasks that prefer different labels may require the same
                of_kind.append(required)
    return found


def _labels_by_kind(workers: Iterable[WorkerInfo]) -> dict[str, set[frozenset[str]]]:
    """Return the different sets of labels of the workers of each kind."""
    found: dict[str, set[frozenset[str]]] = {}
    for worker in workers:
        labels = labels_of(worker.labels)
        for kind in worker.kinds or ():
            found.setdefault(kind, set()).add(labels)
    return found

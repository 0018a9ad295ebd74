"""Unmet requirements: due tasks that no known worker can have, because none claims their kind with the labels."""

from collections.abc import Collection, Iterable, Mapping

from leasekit.named import PREFIXES
from leasekit.server.roles.backlog import count_waiting
from leasekit.server.roles.directory import Claims
from leasekit.server.store import View
from leasekit.server.store.routes import fits, kind_of, labels_of, requirements_of


def waiting(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return how many tasks of each kind wait, for the kinds of which workers are wanted."""
    return {kind: count for kind, count in count_waiting(counts).items() if count and not kind.startswith(PREFIXES)}


def unmet(
    view: View, kinds: Collection[str], workers: Iterable[Claims], *, now: float
) -> dict[str, list[dict[str, str]]]:
    """Return, by kind, the labels that due tasks of these kinds require and no worker of that kind has."""
    names = [*kinds, *view.routes(kinds)] if kinds else []
    due = {lane.name for lane in view.lanes(names) if lane.due_at <= now} if names else ()
    drained = {row.worker for row in view.drains()} if due else ()
    known = _labels_by_kind({*map(kind_of, due)}, (worker for worker in workers if worker.name not in drained))
    found: dict[str, list[dict[str, str]]] = {}
    for name in sorted(due):
        if not any(fits(name, labels) for labels in known.get(kind_of(name), ())):
            required, of_kind = requirements_of(name), found.setdefault(kind_of(name), [])
            if required not in of_kind:  # tasks that prefer different labels may require the same
                of_kind.append(required)
    return found


def _labels_by_kind(kinds: Collection[str], workers: Iterable[Claims]) -> dict[str, set[frozenset[str]]]:
    """Return the different sets of labels of the workers of each of these kinds."""
    found: dict[str, set[frozenset[str]]] = {kind: set() for kind in kinds}
    for worker in workers if found else ():
        labels = labels_of(worker.labels)
        for kind in worker.kinds or ():
            if kind in found:
                found[kind].add(labels)
    return found

"""Routes: the tasks of a kind that require or prefer the same labels of their workers, in lanes of their own.

Rule 1: in the tables of lanes, such tasks stand under the name of their route, in place of their kind: `KIND LF
        NAME=VALUE,…`, and if they prefer labels `FF NAME=VALUE,… FF SECONDS` after that. No kind has a line feed, no
        label a form feed. So no claim reads tasks that its worker may not have.
Rule 2: a worker fits if it has all required labels of the route, with these values.
Rule 3: a worker that lacks a preferred label gets a task only once it has been due for the seconds of the route. So
        such a claim takes the tasks of a lane that were due by a moment, and the others wait behind these in the lane.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from leasekit.task import NewTask
from leasekit.task.words import PREFER_FOR

MOST = 32
"""Routes of a kind whose tasks wait at one time: each costs a claim that fits a look."""

_BREAK = "\n"
_PREFERENCE = "\f"
AFTER_BREAK = "\v"
"""The character after the one that ends the kind in a name."""
NO_LABELS = frozenset[str]()


class _Route(NamedTuple):
    required: frozenset[str]
    preferred: frozenset[str]
    prefer_for: float


def route_of(task: NewTask) -> str | None:
    """Return the name of the route of a task; None: it requires and prefers nothing."""
    if not (task.requires or task.prefers):
        return None
    name = f"{task.kind}{_BREAK}{_listed(task.requires)}"
    if not task.prefers:
        return name
    seconds = task.prefer_for or PREFER_FOR
    return f"{name}{_PREFERENCE}{_listed(task.prefers)}{_PREFERENCE}{seconds:.12g}"


def _listed(labels: Mapping[str, str]) -> str:
    return ",".join(sorted(labels_of(labels)))


def labels_of(labels: Mapping[str, str]) -> frozenset[str]:
    """Return labels as they stand in a route."""
    return frozenset(f"{name}={value}" for name, value in labels.items()) if labels else NO_LABELS


def is_route(name: str) -> bool:
    return _BREAK in name


def kind_of(name: str) -> str:
    """Return the kind of a lane: before the break in the name of a route, or the name."""
    return name.partition(_BREAK)[0]


def requirements_of(name: str) -> dict[str, str]:
    """Return what the tasks of a route require; nothing if it is the name of a kind."""
    return _pairs(_route(name).required)


def preference_of(name: str) -> tuple[dict[str, str], float] | None:
    """Return what the tasks of a route prefer, and for how many seconds; None: nothing."""
    route = _route(name)
    return (_pairs(route.preferred), route.prefer_for) if route.preferred else None


def fits(name: str, labels: frozenset[str]) -> bool:
    """Return whether a worker with these labels may have the tasks of a lane, now or later."""
    return _BREAK not in name or _route(name).required <= labels


def hold_back(name: str, labels: frozenset[str]) -> float:
    """Return for how many seconds a worker that fits does not get a task that is due: none if it is preferred."""
    if _PREFERENCE not in name or _route(name).preferred <= labels:
        return 0.0
    return _route(name).prefer_for


def gets_at_once(name: str, labels: frozenset[str]) -> bool:
    """Return whether a worker with these labels may have the tasks of a lane as soon as they are due."""
    return fits(name, labels) and not hold_back(name, labels)


@lru_cache(10_000)
def ready_after(name: str) -> tuple[tuple[str, float], ...]:
    """Return under which names the tasks of a lane are ready, and how many seconds after they are due.

    Tasks that prefer labels have two: their route, and later that of tasks that only require the same, for the others.
    If they require nothing, that is a name with the break and nothing after it, and not the kind.
    """
    if _PREFERENCE not in name:
        return ((name, 0.0),)
    return ((name, 0.0), (name.partition(_PREFERENCE)[0], _route(name).prefer_for))


def fitting(names: Iterable[str], labels: Iterable[frozenset[str]]) -> list[str]:
    """Return the routes that any of these workers fits."""
    workers = list(labels)
    return [name for name in names if any(fits(name, worker) for worker in workers)]


@lru_cache(10_000)
def _route(name: str) -> _Route:
    required, _, preference = name.partition(_BREAK)[2].partition(_PREFERENCE)
    preferred, _, seconds = preference.partition(_PREFERENCE)
    return _Route(_set_of(required), _set_of(preferred), float(seconds or 0.0))


def _set_of(listed: str) -> frozenset[str]:
    return frozenset(listed.split(",")) if listed else NO_LABELS


def _pairs(labels: frozenset[str]) -> dict[str, str]:
    pairs = (label.partition("=") for label in sorted(labels))
    return {label: value for label, _, value in pairs}

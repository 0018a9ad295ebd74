"""Routes: the tasks of a kind that require the same labels of their workers, in lanes of their own.

Rule 1: in the tables of lanes, such tasks stand under the name of their route, in place of their kind: `KIND LF
        NAME=VALUE,…`. No kind has a line feed. So no claim reads tasks that its worker may not have.
Rule 2: a worker fits if it has all labels of the route, with these values.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

MOST = 32
"""Routes of a kind whose tasks wait at one time: each costs a claim that fits a look."""

_BREAK = "\n"
AFTER_BREAK = "\v"
"""The character after the one that ends the kind in a name."""
NO_LABELS = frozenset[str]()


def route_of(kind: str, requires: Mapping[str, str]) -> str:
    """Return the name of the route of a task."""
    return f"{kind}{_BREAK}{','.join(sorted(labels_of(requires)))}"


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
    pairs = (label.partition("=") for label in sorted(_required(name)))
    return {label: value for label, _, value in pairs}


def fits(name: str, labels: frozenset[str]) -> bool:
    """Return whether a worker with these labels may have the tasks of a lane."""
    return _BREAK not in name or _required(name) <= labels


def fitting(names: Iterable[str], labels: Iterable[frozenset[str]]) -> list[str]:
    """Return the routes that any of these workers fits."""
    workers = list(labels)
    return [name for name in names if any(fits(name, worker) for worker in workers)]


@lru_cache(10_000)
def _required(name: str) -> frozenset[str]:
    required = name.partition(_BREAK)[2]
    return frozenset(required.split(",")) if required else NO_LABELS

"""Circles: tasks that wait for one another, of which none would ever be ready.

Rule 1: what closes a circle is refused. A circle leads through new tasks only, or through one of them that an older
        task awaits already. So the store is searched from those alone, and from all of them at once.
Rule 2: a search reads each wait once, at most `_MOST` waits of older tasks in at most `_STEPS` statements. If there are
        more behind new tasks that are awaited already, these are refused: what is accepted makes no circle.
Rule 3: two nodes may each be given one half of a circle at the same time. Neither knows the other's tasks, so the ids
        are noted, and `following.keep` looks for a circle behind them, within the bounds of Rule 2. A circle of two
        nodes with more behind it is not found: its tasks wait until one of them is cancelled.
"""

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from leasekit.errors import Refused
from leasekit.server.store import Tx
from leasekit.task import NewTask

_MOST = 10_000
_STEPS = 500
_TOLD = 10  # tasks of a circle that a message names

Graph = Mapping[str, Sequence[str]]  # what each task waits for


def refuse(tx: Tx, tasks: Sequence[NewTask], after: Graph) -> None:
    """Raise `Refused` if one of these tasks, which are not written yet, would wait for itself.

    `after` has what those of `tasks` wait for that are new.
    """
    items = {task.id: item for item, task in reversed(list(enumerate(tasks))) if task.id and task.id in after}
    awaited = tx.awaited(items) if items and tx.has_waits() else ()
    graph = _behind(tx, awaited, after)
    if graph is None:
        item = min(items[name] for name in awaited)
        raise _refusal(
            item,
            f"tasks wait for this one already, and it would wait, by way of others, for more than {_MOST:,} tasks, or "
            f"in a row of more than {_STEPS}: schedule it before the tasks that wait for it",
        )
    circle = [name for name in _circle(graph) if name in items]
    if circle:
        name = min(circle, key=items.__getitem__)
        way = _told(_way_back(graph, name))
        raise _refusal(items[name], f"makes a circle, in which no task would ever be ready: {way}")


def _refusal(item: int, detail: str) -> Refused:
    return Refused(f"item {item}: after: {detail}", errors=[{"item": item, "field": "after", "detail": detail}])


def find(tx: Tx, names: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """Return which of these tasks wait for themselves, each with the way, and those that must be looked at later.

    One is looked at always: if more waits are behind it than a search reads, it counts as one in no circle.
    """
    later: Sequence[str] = ()
    graph = _behind(tx, names, {})
    if graph is None and len(names) > 1:
        names, later = names[:1], names[1:]
        graph = _behind(tx, names, {})
    if graph is None or not _circle(graph):
        return {}, later
    ways = {name: _way_back(graph, name) for name in names}
    return {name: _told(way) for name, way in ways.items() if way}, later


def _behind(tx: Tx, names: Collection[str], new: Graph) -> Graph | None:
    """Return what `new` tasks wait for, and each task that any of `names` waits for, by whatever way.

    None: that is too much. Tasks that wait for nothing are left out.
    """
    graph: dict[str, list[str]] = {name: list(after) for name, after in new.items()}
    level, seen, room = list(names), set(names), _MOST
    for _ in range(_STEPS):
        older: list[str] = []
        for name in level:  # gets longer meanwhile
            if name in new:
                level += (unseen := set(new[name]) - seen)
                seen |= unseen
            else:
                older.append(name)
        waits = tx.waits_of(older, limit=room + 1) if older else []
        room -= len(waits)
        if not waits or room < 0:
            return None if waits else graph
        for awaited, name in waits:
            graph.setdefault(name, []).append(awaited)
        level = list({awaited for awaited, _ in waits} - seen)
        seen.update(level)
    return None


def _circle(graph: Graph) -> Sequence[str]:
    """Return the tasks of a circle; empty: there is none."""
    try:
        TopologicalSorter({name: [one for one in after if one in graph] for name, after in graph.items()}).prepare()
    except CycleError as error:
        return error.args[1]  # type: ignore[no-any-return]
    return ()


def _way_back(graph: Graph, name: str) -> list[str]:
    """Return the shortest way from a task back to itself; empty: there is none."""
    came_from: dict[str, str] = {}
    reached = [name]
    for one in reached:  # gets longer meanwhile
        for awaited in graph.get(one, ()):
            if awaited not in came_from:
                came_from[awaited] = one
                reached.append(awaited)
            if awaited == name:
                way = [name]
                while len(way) == 1 or way[-1] != name:
                    way.append(came_from[way[-1]])
                return way[::-1]
    return []


def _told(way: Sequence[str]) -> str:
    words = [f'"{name}"' for name in way]
    return " after ".join(words if len(words) <= _TOLD else [*words[: _TOLD // 2], "…", *words[-_TOLD // 2 :]])

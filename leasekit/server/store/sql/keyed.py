"""Tasks with keys in an SQL store: when they are due, and the shares of their keys.

Rule 1: only this module knows that the row of a waiting task with a key does not say when the task is due.
Rule 2: the share of a key that has left its lane says a later first due time, so no claim reads it: the year 9999
        (`QUEUED_AT`), or the moment at which the key comes back.
Rule 3: a transaction that changes what waits of a key reads at its end, with the share locked, when the first of these
        tasks is due, and writes that into the share. So a share is true whatever other writers do at the same time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy import bindparam, select

from leasekit._lifecycle.states import WAITING
from leasekit.server.store import Lane, Trigger, damage
from leasekit.server.store.routes import is_route
from leasekit.server.store.schema import QUEUED_AT, is_waiting, keeps_place, keyed, trigger
from leasekit.server.store.sql.statements import Insert, Session, Statement, Update, is_one_of

KEYED = Statement(select(keyed).where(is_one_of(keyed.c.seq, "seqs")))
ADD_KEYED = Insert(keyed)
SAVE_KEYED = Update(keyed.c.seq, first=4, last=4)
SAVE_PLACES = Update(keyed.c.seq, first=4, last=5)
_WAITS_SINCE = sa.case((is_waiting(), trigger.c.next_trigger_at), else_=None)
KEPT_OF_KIND = Statement(
    select(keyed.c.seq, keyed.c.kind, keyed.c.priority, keyed.c.key, _WAITS_SINCE)
    .join_from(keyed, trigger, trigger.c.seq == keyed.c.seq)
    .where(keyed.c.kind == bindparam("of_kind", type_=sa.Text), keeps_place())
)
DROP_PLACES = Statement(sa.update(keyed).where(is_one_of(keyed.c.seq, "seqs"), keeps_place()).values(keeps_place=False))
KEPT_PLACES = Statement(select(keyed.c.seq).where(is_one_of(keyed.c.seq, "seqs"), keeps_place()))
_DUE = list(trigger.c).index(trigger.c.next_trigger_at)
SET_DUE = Update(trigger.c.seq, first=_DUE, last=_DUE)
DROP_KEYED = Statement(sa.delete(keyed).where(is_one_of(keyed.c.seq, "seqs")))


class Place(NamedTuple):
    """A key of a lane."""

    kind: str  # or the name of a route
    priority: int
    key: str


class Charge(NamedTuple):
    """A change of a share. Without `base` and `now`, nothing was taken from it, and it does not join."""

    place: Place
    taken: int = 0
    base: float | None = None
    now: float | None = None
    until: float | None = None  # the key leaves its lane until then


def with_due_times(session: Session, tasks: list[Trigger]) -> tuple[list[Trigger], dict[int, Place]]:
    """Return the states of tasks, with their due times filled in, and the places of waiting tasks that have keys."""
    queued = [task.seq for task in tasks if task.next_trigger_at == QUEUED_AT]
    if not queued:
        return tasks, {}
    found = {seq: (Place(*place), due_at) for seq, *place, due_at, _ in session.rows(KEYED, seqs=queued)}
    due = {seq: due_at for seq, (_, due_at) in found.items() if damage.is_number(due_at)}
    tasks = [replace(task, next_trigger_at=due[task.seq]) if task.seq in due else task for task in tasks]
    return tasks, {seq: place for seq, (place, _) in found.items()}


class KeyedTasks:
    """The tasks with keys that one transaction has met, and what it changes of their shares."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._places: dict[int, Place] = {}
        self._kept: set[int] = set()  # tasks that keep the places of their keys, and wait beside the queues
        self._charges: dict[Place, Charge] = {}
        self._lanes: dict[tuple[int, str], Lane] = {}  # those in which this transaction has queued tasks …
        self._keys: dict[tuple[int, str], set[str]] = {}  # … and the keys of these tasks
        self.queued_routes: dict[str, list[float]] = {}  # the routes of these tasks, and when they are due

    def read(self, tasks: list[Trigger]) -> list[Trigger]:
        """Return the states of tasks with the due times that the table `keyed` has, and note the places of these."""
        tasks, places = with_due_times(self._session, tasks)
        self._places.update(places)
        return tasks

    def add(self, tasks: Sequence[Trigger], keys: Mapping[int, str], routes: Mapping[int, str]) -> Sequence[Trigger]:
        """Queue new tasks; return them as they are to be written."""
        if not keys and not routes:
            return tasks
        of = {
            task.seq: Place(routes.get(task.seq, task.kind), task.priority, keys.get(task.seq, ""))
            for task in tasks
            if task.seq in keys or task.seq in routes
        }
        self._places.update(of)
        rows = [(task.seq, *of[task.seq], task.next_trigger_at, False) for task in tasks if task.seq in of]
        self._session.insert(ADD_KEYED, rows)
        return [self._queued(task) if task.seq in of else task for task in tasks]

    def save(self, tasks: Sequence[Trigger]) -> Sequence[Trigger]:
        """Queue those of these tasks that wait and have keys; return all as they are to be written."""
        self._look_up([task.seq for task in tasks if task.status in WAITING])
        changed = [task for task in tasks if task.seq in self._places]
        if not changed:
            return tasks
        due = {task.seq: task.next_trigger_at if task.status in WAITING else None for task in changed}
        self._session.update(SAVE_KEYED, [(due_at, seq) for seq, due_at in due.items()])
        return [self._queued(task) if task.seq in due else task for task in tasks]

    def move(self, seqs: Collection[int], priority: int) -> None:
        """Note that tasks go to another lane, if they have keys; `save` queues them there."""
        self._look_up(seqs)
        for seq in seqs:
            if (place := self._places.get(seq)) is not None:
                self._touch(place)
                self._places[seq] = place._replace(priority=priority)

    def end(self, seqs: Iterable[int]) -> None:
        """Take ended tasks out of their queues."""
        waited = [seq for seq in seqs if seq in self._places]
        self._session.update(SAVE_KEYED, [(None, seq) for seq in waited])
        for seq in waited:
            self._touch(self._places[seq])

    def forget(self, places: Mapping[int, Place], queued: Collection[int]) -> None:
        """Write the shares of these tasks anew; only the `queued` ones wait."""
        self._session.update(SAVE_KEYED, [(None, seq) for seq in places if seq not in queued])
        for place in places.values():
            self._touch(place)

    def note(self, lane: Lane, key: str, tasks: Iterable[Trigger]) -> None:
        """Note the key of tasks that were read from its queue."""
        place = Place(lane.name, lane.priority, key)
        self._places.update((task.seq, place) for task in tasks)

    def charge(self, lane: Lane, taken: Mapping[str, int], *, base: float, now: float) -> None:
        for key, count in taken.items():
            place = Place(lane.name, lane.priority, key)
            before = self._charges.get(place, Charge(place)).taken
            self._charges[place] = Charge(place, before + count, base, now)

    def leave(self, lane: Lane, until: Mapping[str, float | None]) -> None:
        for key, again_at in until.items():
            place = Place(lane.name, lane.priority, key)
            at = QUEUED_AT if again_at is None else again_at
            self._charges[place] = self._charges.get(place, Charge(place))._replace(until=at)

    def leaving(self) -> dict[str, set[str]]:
        """Return, by kind or route, the keys that are to leave their lanes until one of their runs ends.

        Those that leave until a known moment are not among them.
        """
        of_kinds: dict[str, set[str]] = {}
        for place, charge in self._charges.items():
            if charge.until == QUEUED_AT:
                of_kinds.setdefault(place.kind, set()).add(place.key)
        return of_kinds

    def stay(self, kind: str, keys: Collection[str]) -> None:
        """Let keys that were to leave their lanes stay."""
        for place, charge in self._charges.items():
            if place.kind == kind and place.key in keys:
                self._charges[place] = charge._replace(until=None)

    def come_back(self, full: Iterable[tuple[Lane, str]]) -> list[Lane]:
        """Put keys back into the lanes that they have left; return these lanes."""
        lanes: list[Lane] = []
        for lane, key in full:
            self._touch(Place(lane.name, lane.priority, key))
            self._note_queued(lane, key)
            lanes.append(lane)
        return lanes

    def changes(self) -> list[Charge]:
        """Return what is to be written into shares, in the order in which all writers lock them."""
        return sorted(self._charges.values(), key=lambda charge: charge.place)

    def lanes(self, kinds: Collection[str]) -> list[Lane]:
        """Return the lanes of these kinds and routes in which this transaction has queued tasks."""
        return [lane for lane in self._lanes.values() if lane.name in kinds]

    def keys(self, lane: Lane) -> set[str]:
        """Return the keys of a lane for which this transaction has queued tasks."""
        return self._keys.get(lane[:2], set())

    def _queued(self, task: Trigger) -> Trigger:
        """Return a task with a key as it is to be written."""
        place = self._places[task.seq]
        self._touch(place)
        if task.status not in WAITING or task.next_trigger_at is None:
            return task
        self._note_queued(Lane(place.priority, place.kind, task.next_trigger_at, has_keys=True), place.key)
        if is_route(place.kind):
            self.queued_routes.setdefault(place.kind, []).append(task.next_trigger_at)
        return replace(task, next_trigger_at=QUEUED_AT)

    def _note_queued(self, lane: Lane, key: str) -> None:
        self._lanes[lane[:2]] = min(lane, self._lanes.get(lane[:2], lane))
        self._keys.setdefault(lane[:2], set()).add(key)

    def _touch(self, place: Place) -> None:
        self._charges.setdefault(place, Charge(place))

    def queued(self, seqs: Collection[int]) -> list[tuple[int, Place, float]]:
        """Return those of these tasks that wait in queues of keys without labels: where, and when they are due."""
        rows = self._session.rows(KEYED, seqs=seqs)
        return [(row[0], Place(*row[1:4]), row[4]) for row in rows if row[3] and row[4] and not is_route(row[1])]

    def keep(self, tasks: Sequence[tuple[int, Place, float]]) -> None:
        """Take tasks out of the queues of their keys, whose places they keep."""
        self._session.update(SET_DUE, [(due_at, seq) for seq, _, due_at in tasks])
        self._session.update(SAVE_PLACES, [(None, True, seq) for seq, _, _ in tasks])
        for seq, place, _ in tasks:
            self._touch(place)
            self._places.pop(seq, None)
            self._kept.add(seq)

    def drop_places_of(self, kind: str) -> None:
        """Put the tasks of a kind that keep places back into the queues of their keys."""
        kept = self._session.rows(KEPT_OF_KIND, of_kind=kind)
        self._session.update(SAVE_PLACES, [(row[4], False, row[0]) for row in kept])
        self._session.update(SET_DUE, [(QUEUED_AT, row[0]) for row in kept if row[4] is not None])
        self._kept.difference_update(row[0] for row in kept)
        for row in kept:
            self._touch(Place(*row[1:4]))

    def _look_up(self, seqs: Iterable[int]) -> None:
        """Read the places of those of these tasks that have keys, if they are not known yet."""
        if unknown := [seq for seq in seqs if seq not in self._places and seq not in self._kept]:
            for seq, *place, _, keeps in self._session.rows(KEYED, seqs=unknown):
                if keeps:
                    self._kept.add(seq)
                else:
                    self._places[seq] = Place(*place)

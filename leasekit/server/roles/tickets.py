"""Tickets: the tasks that one claim names by messages of queues, in place of the due tasks of its kinds.

Rule 1: a ticket entitles to nothing that a claim of due tasks would not get: gates and limits are judged again.
Rule 2: a task that cannot start for such a reason is due again at once, so that it waits as tasks without queues do.
Rule 3: a ticket is refused if it is of no use later either. Only then, or if its task was granted, is its message
        deleted; a message that is left costs another call, and nothing else.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from leasekit._lifecycle.transitions import is_claimable, unqueue
from leasekit.server.due_tasks import Sieve
from leasekit.server.key_rooms import UNKEYED
from leasekit.server.rooms import Rooms
from leasekit.server.store import Trigger
from leasekit.server.store.gates import KIND, PARKED_AT
from leasekit.server.store.routes import NO_LABELS, fits, hold_back
from leasekit.server.unit_of_work import UnitOfWork
from leasekit.task import Ticket


class TicketTasks:
    """The tasks of some tickets that can be claimed, each taken once; the counterpart of `DueTasks` for one claim."""

    def __init__(
        self,
        turn: UnitOfWork,
        tickets: Sequence[Ticket],
        kinds: Iterable[str],
        *,
        labels: frozenset[str] = NO_LABELS,
    ) -> None:
        self._turn = turn
        self._kinds = frozenset(kinds)
        fences = {ticket.id: ticket.fence for ticket in tickets}
        rows, self._locked = turn.tx.unlocked_triggers(fences)
        usable = [row for task_id, row in rows.items() if self._is_usable(row, fences[task_id])]
        routes = turn.tx.routes_of([row.seq for row in usable])
        usable = [row for row in usable if fits(routes.get(row.seq, ""), labels)]
        kept = {row.id for row in usable if self._is_held_back(row, routes.get(row.seq, ""), labels)}
        usable = [row for row in usable if row.id not in kept]
        others = kept.union(row.id for row in rows.values() if row.kind not in self._kinds)
        self.refused = [task_id for task_id in fences if task_id not in others.union(self._locked)]
        self.rooms = Rooms(turn, {row.kind for row in usable})
        self.sieve = Sieve(turn)
        self._put_off: list[Trigger] = []
        self._keys: dict[int, str] = {}  # of the tasks whose kinds limit keys
        self._left = self._startable(self._due(usable), order=list(fences))

    def take(self, _kinds: Iterable[str], limit: int, *, labels: frozenset[str] = NO_LABELS) -> list[Trigger]:
        """Take up to `limit` tasks, in the order of the tickets; `labels` were looked at before."""
        taken, self._left = self._left[:limit], self._left[limit:]
        for row in taken:
            self.rooms.start(row.kind)
        self._give_back(self._left)
        return taken

    def put_back(self, rows: Sequence[Trigger]) -> None:
        """Undo the last `take` for these tasks."""
        self._left = [*rows, *self._left]
        for row in rows:
            self.rooms.start(row.kind, -1)
        self._give_back(rows)

    def drop(self, rows: Iterable[Trigger]) -> None:
        """Do nothing: tasks that do not run after all are charged to no key here."""

    def close(self) -> None:
        """Move tasks that must not start now from their tickets to the due tasks, and settle which tickets are refused.

        Tickets of tasks that only the limit of the claim left over are not refused.
        """
        self._turn.tx.save([unqueue(row, due_at=row.next_trigger_at or self._turn.now) for row in self._put_off])
        for row in self._put_off:
            self._turn.ready(row.kind, self._turn.now)
        left = {row.id for row in self._left}
        self.refused = [task_id for task_id in self.refused if task_id not in left]

    def _is_usable(self, row: Trigger, fence: int) -> bool:
        is_parked = row.next_trigger_at == PARKED_AT  # and comes back when its gate is opened
        return row.kind in self._kinds and not is_parked and is_claimable(row, fence, now=self._turn.now)

    def _is_held_back(self, row: Trigger, route: str, labels: frozenset[str]) -> bool:
        """Return whether a task is kept for other workers for now: its ticket stays good."""
        seconds = hold_back(route, labels)
        return seconds > 0 and (row.next_trigger_at or 0.0) + seconds > self._turn.now

    def _due(self, rows: Sequence[Trigger]) -> list[Trigger]:
        """Return these tasks as due since they were enqueued, for what measures how long they have waited."""
        ahead = [row.seq for row in rows if (row.next_trigger_at or 0.0) > self._turn.now]
        limits = self._turn.tx.limits(ahead) if ahead else {}
        since = {seq: limits[seq].enqueue_timeout if seq in limits else 0.0 for seq in ahead}
        now = self._turn.now
        return [
            replace(row, next_trigger_at=min(now, (row.next_trigger_at or now) - since[row.seq]))
            if row.seq in since
            else row
            for row in rows
        ]

    def _startable(self, rows: Sequence[Trigger], *, order: Sequence[str]) -> list[Trigger]:
        """Return the tasks that neither a gate nor a limit stops, in this order; put the others off."""
        closed = self._turn.gates.holding(KIND, self._turn.now)
        open_rows = self.sieve.sift([row for row in rows if row.kind not in closed])
        self._put_off += [row for row in rows if row.kind in closed]
        startable: list[Trigger] = []
        places = {row.kind: self.rooms.left(row.kind) for row in open_rows}
        full = self.rooms.full()
        for row in sorted(open_rows, key=lambda row: order.index(row.id)):
            places[row.kind] -= 1
            if places[row.kind] >= 0 and self._has_place_of_key(row):
                startable.append(row)
            elif row.kind in full and full[row.kind][1] == "node":  # for a moment: the ticket stays good
                self.refused.remove(row.id)
            else:
                self._put_off.append(row)
        return startable

    def _has_place_of_key(self, row: Trigger) -> bool:
        """Take a place and a token of the task's key, if its kind limits keys and there are some."""
        rooms = self.rooms.of_keys(row.kind)
        if rooms is None or self._turn.tx.kept_places([row.seq]):
            return True
        key = self._turn.tx.keys([row.seq]).get(row.seq, UNKEYED)
        rooms.look([key])
        if rooms.why_full(key) is not None:
            return False
        rooms.start(key)
        self._keys[row.seq] = key
        return True

    def _give_back(self, rows: Iterable[Trigger]) -> None:
        """Give back the places and tokens of keys that were taken for tasks that do not start."""
        for row in rows:
            if (rooms := self.rooms.of_keys(row.kind)) is not None:
                rooms.start(self._keys.get(row.seq, UNKEYED), -1)

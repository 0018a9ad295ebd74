"""Mutants of gates: what is closed, what is dropped, and what is put back."""

from collections.abc import Mapping

from harness.simulation.mutants.edit import Edit
from harness.simulation.mutants.mutant import Histories, Mutant, tested

_BY_HISTORIES: Mapping[str, Mutant] = {
    "closed-kinds-claimed": Mutant(
        "A claim takes tasks of a kind that is closed.",
        Edit("server.unit_of_work:UnitOfWork.lanes", "self.gates.holding(KIND, self.now).keys()", "set()"),
        by=Histories("gates", ["A1"]),
    ),
    "closed-collections-claimed": Mutant(
        "A claim takes tasks of a collection that is closed.",
        Edit("server.due_tasks:Sieve.sift", "not self._closed or not rows", "True"),
        by=Histories("gates", ["A1"]),
    ),
    "changed-gates-not-read": Mutant(
        "A node goes on with the gates that it has read first.",
        Edit("server.store.kind_defaults:KindDefaults.read", "Gates(tx.gates())", "self.gates"),
        by=Histories("gates", ["A1"]),
    ),
    "paused-kinds-dropped": Mutant(
        "Due tasks of a paused kind end, as if it were dropped.",
        Edit("server.roles.gates:keep", "row.mode == DROP", "True"),
        by=Histories("gates", ["A2"]),
    ),
    "dropped-without-a-reason": Mutant(
        "A dropped task does not say which gate has ended it.",
        Edit("server.roles.gates:_drop", "_why(row)", "None"),
        by=Histories("gates", ["A2"]),
    ),
}

_BY_THE_MODEL = tested(
    "each needs many tasks behind one gate, or an order of a few steps: the random histories of tests/model have both",
    """
claims-give-up-behind-parked-tasks: A claim finds no task if more tasks come first than it parks at once.
server.roles.claims:_served
- due_tasks.sieve.is_full
+ False
tests/model/test_model.py::test_gates

gates-never-open-by-themselves: A gate holds after its `until`.
server.store.rows:GateRow.holds
- self.until is None or now < self.until
+ True
tests/model/test_model.py::test_gates

parked-behind-a-gate-that-opened-by-itself: The tasks of a collection stay parked when its gate opens by itself.
server.roles.gates:keep
- not row.holds(turn.now)
+ row.mode == OPEN
tests/model/test_model.py::test_gates

parked-for-ever: Parked tasks are not put back if there are more of them than one transaction takes.
server.roles.gates:_open
- found < most
+ True
tests/model/test_model.py::test_gates

parked-tasks-lose-their-place: Parked tasks are put back as if they had just become due.
server.roles.gates:_open
- replace(task, next_trigger_at=due_at)
+ replace(task, next_trigger_at=turn.now)
tests/model/test_model.py::test_gates

dropped-kinds-wait: Due tasks of a dropped kind wait as if it were paused.
server.roles.gates:keep
- _drop_lanes(turn, row, left)
+ 0
tests/model/test_model.py::test_gates

dropped-before-they-are-due: Tasks of a dropped kind end before they are due.
server.roles.gates:_drop_lanes
- if lane.due_at <= turn.now and ended < most:
-     rows = _first(turn, lane, most - ended)
-     _drop(turn, [(task, row) for task in rows])
-     ended += len(rows)
+ rows = turn.tx.ready(lane, now=1e12, after=_FIRST, limit=most - ended)
+ _drop(turn, [(task, row) for task in rows])
+ ended += len(rows)
tests/model/test_model.py::test_gates

dropped-collections-wait: A claim passes the tasks of a dropped collection, which wait on.
server.roles.gates:shut_out
- row.mode == DROP
+ False
tests/model/test_model.py::test_gates

parked-tasks-not-dropped: Tasks that were parked before their collection was dropped wait on.
server.roles.gates:keep
- _drop_parked(turn, row, left)
+ 0
tests/server/roles/test_gates.py::test_parked_tasks_end_when_their_collection_is_dropped[memory]
""",
)

_BY_A_TEST = tested(
    "the random histories have no claim that waits, and seldom a late report of a parked task",
    """
parked-tasks-revived: A task that ended while it was parked waits again when its collection is opened.
server.roles.gates:_parked
- task.status in WAITING and task.next_trigger_at == PARKED_AT
+ True
tests/server/roles/test_gates.py::test_a_parked_task_that_ends_is_not_put_back

gate-opens-without-a-word: Claims that wait are not woken when the gate of their kind is opened.
server.unit_of_work:UnitOfWork.opened
- self.ready(kind, self.now)
+ pass
tests/server/roles/test_gates.py::test_a_waiting_claim_is_woken_when_the_gate_is_opened
""",
)

GATES: Mapping[str, Mutant] = {**_BY_HISTORIES, **_BY_THE_MODEL, **_BY_A_TEST}
